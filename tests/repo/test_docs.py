"""The documentation is run: snippets on a tiny model, links, tables that name every option, parameter and command."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from phloem import Engine, SamplingParams
from phloem.config import load_config
from phloem.plugins.command.main import main
from phloem.registry import Registry

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Snippet(NamedTuple):
    """A fenced block: its language, the file it wants to be saved as, other words of the fence, and its text."""

    language: str
    title: str | None
    words: list[str]
    text: str


def rel(page: Path) -> str:
    """How a page is named in test ids."""
    return page.relative_to(ROOT).as_posix()


def snippets(page: Path) -> list[Snippet]:
    """Fenced blocks in order."""
    found = []
    for language, rest, text in FENCE.findall(page.read_text()):
        title = re.search(r'title="([^"]+)"', rest)
        found.append(Snippet(language, title and title[1], re.sub(r'title="[^"]+"', "", rest).split(), text))
    return found


def pages_with(language: str) -> list[Path]:
    """Pages that have something to run or load."""
    return [page for page in PAGES if any(snippet.language == language for snippet in snippets(page))]


def save(page: Path, folder: Path, model: Path) -> list[Snippet]:
    """Write titled snippets to files, with a tiny model in place of the real one; returns all, so changed."""
    changed = []
    for snippet in snippets(page):
        text = snippet.text.replace("smollm2-135m", str(model))
        changed.append(snippet._replace(text=text))
        if snippet.title:
            (folder / snippet.title).write_text(text)
    return changed


@pytest.mark.parametrize("page", pages_with("python"), ids=rel)
def test_python_snippets_run(
    page: Path, tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program per page: snippets follow on each other. Titled ones are files, `client` ones need a server."""
    monkeypatch.chdir(tmp_path)
    for snippet in snippets(page):
        if snippet.language == "python":
            compile(snippet.text, rel(page), "exec")
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in save(page, tmp_path, tiny_model("llama")):
        if snippet.language == "python" and not snippet.title and "client" not in snippet.words:
            exec(compile(snippet.text, rel(page), "exec"), names)
    engine = names.get("engine")
    if isinstance(engine, Engine):
        assert engine.core.counters.steps > 0
        engine.close()


@pytest.mark.parametrize("page", pages_with("yaml"), ids=rel)
def test_yaml_snippets_are_valid(
    page: Path, tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for snippet in save(page, tmp_path, tiny_model("llama")):
        if snippet.language == "yaml" and snippet.title:
            config = load_config(snippet.title, env={})
            assert config.model.path == str(tiny_model("llama"))


def test_the_plugin_of_the_readme_serves(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and the YAML of the README together."""
    save(ROOT / "README.md", tmp_path, tiny_model("llama"))
    monkeypatch.chdir(tmp_path)
    with Engine.from_yaml("short.yaml") as engine:
        assert type(engine.core.scheduler.policy).__name__ == "ShortFirst"
        assert len(engine.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_the_tutorials_plugin_passes_its_suite(tmp_path: Path) -> None:
    save(ROOT / "docs" / "plugins" / "write-one.md", tmp_path, tmp_path)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links() -> Iterator[tuple[Path, str]]:
    """Relative links of all pages."""
    for page in PAGES:
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            if not re.match(r"[a-z]+:", target):
                yield page, target


def test_links_lead_somewhere() -> None:
    broken = []
    for page, target in links():
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{rel(page)}: {target}")
    assert not broken


def test_config_page_is_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    text = (ROOT / "docs" / "config.md").read_text()
    shown = text.partition("<!-- reference -->\n")[2].partition("<!-- /reference -->")[0]
    assert shown == capsys.readouterr().out, "run: make docs"


def test_sampling_page_names_every_parameter() -> None:
    text = (ROOT / "docs" / "sampling.md").read_text()
    missing = [name for name in SamplingParams.__struct_fields__ if f"`{name}`" not in text]
    assert not missing


def test_server_page_names_every_parameter_and_metric() -> None:
    from phloem.plugins.api._inert import CHAT, COMPLETIONS
    from phloem.plugins.api._schema import ChatBody, CompletionBody
    from phloem.server.metrics import COUNTERS, GAUGES, HISTOGRAMS

    text = (ROOT / "docs" / "server.md").read_text() + (ROOT / "docs" / "sampling.md").read_text()
    openai = {"model", "messages", "prompt", "stream", "echo", "top_logprobs", "max_completion_tokens"}
    parameters = {*CHAT, *COMPLETIONS, *ChatBody.model_fields, *CompletionBody.model_fields} - openai
    metrics = {series.name for series in (*COUNTERS, *GAUGES)} | {row[1] for row in HISTOGRAMS}
    missing = [name for name in sorted(parameters | metrics) if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)]
    assert not missing


def test_pages_name_every_command_and_kind() -> None:
    registry = Registry()
    cli = (ROOT / "docs" / "cli.md").read_text()
    assert not [name for name in registry.names("commands") if f"phloem {name}" not in cli]
    kinds = {found.kind for found in registry.found() if found.distribution == "phloem"} - {"commands"}
    missing = [kind for kind in sorted(kinds) if not (ROOT / "docs" / "plugins" / f"{kind}.md").exists()]
    assert not missing


def test_readme_figures_are_bench_figures() -> None:
    """The README has no figures of its own; the page that has them is written by the benchmark."""
    text = FENCE.sub("", (ROOT / "README.md").read_text())
    assert not re.search(r"\d+(\.\d+)?\s*(x|times|%|tok/s|tokens/s|ms)\b", text)
