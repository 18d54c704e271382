"""The command line: help without heavy imports, one import per command, clean errors, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs  # schemathesis brings it
import pytest
from toy_plugins import distribution, policy_file

from phloem.plugins.command.main import main

COMMANDS = ("serve", "run", "chat", "bench", "plugins", "config", "doctor")


def phloem(*arguments: str, stdin: str = "", **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "phloem", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, check=False, **kwargs)


def imported_by(*calls: list[str]) -> set[str]:
    """Top-level modules that calls in one process leave imported."""
    program = (
        "import sys, io, contextlib\nfrom phloem.plugins.command.main import main\n"
        f"for call in {calls!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n        main(call)\n"
        "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_help_lists_commands_in_groups() -> None:
    done = phloem("--help")
    assert done.returncode == 0
    for title in ("Serve and generate:", "Inspect:"):
        assert title in done.stdout
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert phloem().returncode == 2


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pydantic", "transformers", "fastapi", "yaml", "pluggy", "rich"}
    assert not imported_by(["--help"]) & heavy


def test_inspection_imports_no_torch() -> None:
    calls = ["plugins"], ["config", "show"], ["config", "check"], ["plugins", "list", "--json"]
    assert not imported_by(*calls) & {"torch", "transformers", "fastapi"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"usage: phloem {name}" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert "there is no command 'srve' (did you mean 'serve'?)" in capsys.readouterr().err


def test_errors_are_one_message(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("cache:\n  page_sise: 1\n")
    done = phloem("config", "check", str(file))
    assert done.returncode == 2
    assert done.stderr == f"phloem config: {file}:2:3: cache.page_sise: unknown key (did you mean 'page_size'?)\n"
    debug = phloem("config", "check", str(file), "--debug")
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr


def test_version() -> None:
    assert phloem("--version").stdout == "phloem 0.1.0\n"


def test_third_party_commands_are_listed_and_run(tmp_path: Path) -> None:
    (tmp_path / "cli_hello.py").write_text(
        "class Hello:\n"
        "    def configure(self, parser): parser.add_argument('--to', default='world')\n"
        "    def run(self, args): print('hello', args.to); return 3\n"
        "hello = Hello()\n"
    )
    commands = {"hello": "cli_hello:hello", "broken": "no_such_module_xyz:x"}
    distribution(tmp_path, "phloem-hello", {"phloem.commands": commands})
    env = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    assert "From other distributions:\n  broken        from phloem-hello\n  hello " in phloem("--help", env=env).stdout
    done = phloem("hello", "--to", "you", env=env)
    assert (done.stdout, done.returncode) == ("hello you\n", 3)
    broken = phloem("broken", env=env)
    assert broken.returncode == 2
    assert "hint: pip install --upgrade phloem-hello" in broken.stderr


# --- plugins


def test_plugins_lists_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--json"]) == 0
    rows = {(row["kind"], row["name"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["cache", "radix"]["status"] == "selected"
    assert rows["cache", "chunk"]["status"] == "ok"
    assert rows["cache", "chunk"]["distribution"] == "phloem"
    assert all(row["description"] for row in rows.values())
    assert main(["plugins"]) == 0
    header, first = capsys.readouterr().out.splitlines()[:2]
    assert header.split() == ["kind", "name", "version", "distribution", "status", "description"]
    assert first.split()[:2] == ["api", "native"]


def test_plugins_tells_what_is_wrong_without_importing(tmp_path: Path) -> None:
    policy_file(tmp_path, "cli_toy.py")
    (tmp_path / "cli_extra.py").write_text("import no_such_module_xyz\nclass G:\n    '''A grammar.'''\n    api = 1\n")
    (tmp_path / "cli_bomb.py").write_text("raise SystemExit('imported')\nclass B:\n    '''A bomb.'''\n    api = 1\n")
    (tmp_path / "cli_syntax.py").write_text("class (:\n")
    entries = {
        "phloem.schedule": {"old": "cli_toy:Old", "gone": "cli_toy:Gone", "lpm": "cli_toy:Policy"},
        "phloem.grammar": {"xyz": "cli_extra:G", "bomb": "cli_bomb:B", "syntax": "cli_syntax:S"},
        "phloem.spec": {"nowhere": "cli_nowhere:N"},
    }
    distribution(tmp_path, "phloem-toys", entries, extra={"xyz": "no-such-module-xyz"})
    done = phloem("plugins", "list", "--json", env={"PYTHONPATH": str(tmp_path), "PATH": ""})
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout) if row["distribution"] == "phloem-toys"}
    found = {name: (row["status"], row["description"], row["remedy"]) for name, row in rows.items()}
    taken = "schedule plugin 'lpm' is provided by 'phloem' 0.1.0 and by 'phloem-toys' 1.0"
    taken += "; names of built-in plugins are reserved"
    reinstall = "pip install --force-reinstall --no-deps phloem-toys"
    assert found == {
        "lpm": ("duplicate", "A policy of the tests.", taken),
        "old": ("API mismatch", "", "it speaks plugin API 0, this phloem speaks 1"),
        "gone": ("import error", "cli_toy has no Gone", reinstall),
        "xyz": ("missing extra", "A grammar.", "pip install 'phloem-toys[xyz]'"),
        "bomb": ("ok", "A bomb.", None),
        "syntax": ("import error", "invalid syntax", reinstall),
        "nowhere": ("import error", "there is no module cli_nowhere", reinstall),
    }


def test_plugins_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "lpm"]) == 0
    out = capsys.readouterr().out
    assert "schedule.lpm  (phloem 0.1.0, phloem.plugins.schedule.lpm:Lpm)" in out
    assert "capabilities: listens, matched, queue" in out
    assert "| `max_overtakes` | integer | `512` |" in out
    assert main(["plugins", "show", "native"]) == 2
    assert "'native' is ambiguous: say api.native or model.native" in capsys.readouterr().err
    assert main(["plugins", "show", "lpn"]) == 2
    assert "no plugin is named 'lpn' (did you mean" in capsys.readouterr().err


def test_plugins_check(tmp_path: Path) -> None:
    good = phloem("plugins", "check", "schedule.lpm", "--set", "max_overtakes=512")
    assert good.returncode == 0, good.stdout
    assert "35 passed" in good.stdout
    (tmp_path / "bad.py").write_text(
        policy_file(tmp_path).read_text()
        + "\n\nclass Loser(Policy):\n    def order(self, waiting): return waiting[1:]\n"
    )
    bad = phloem("plugins", "check", "--kind", "schedule", "./bad.py:Loser", cwd=tmp_path)
    assert bad.returncode == 1
    assert "a request was lost, repeated or invented" in bad.stdout
    broken = phloem("plugins", "check", "--kind", "schedule", "./bad.py:Old", cwd=tmp_path)
    assert broken.returncode == 2
    assert "speaks plugin API 0" in broken.stderr
    kindless = phloem("plugins", "check", "./bad.py:Loser", cwd=tmp_path)
    assert kindless.returncode == 2
    assert "say --kind KIND" in kindless.stderr


def test_kinds_with_a_template_are_those_that_help_lists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plugins", "new", "--help"])
    kinds = "api, attention, cache, component, events, eviction, grammar, key, observer, parser, quant, sampler"
    assert f"{kinds}, schedule, spec, storage" in " ".join(capsys.readouterr().out.split())
    assert main(["plugins", "new", "router", "x"]) == 2
    assert "there is no template for kind 'router'" in capsys.readouterr().err


# --- config


def test_config_check_says_what_it_took_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "engine.yam"]) == 0
    assert capsys.readouterr().out.startswith("engine.yam, taken as a model, with the defaults: right\n")
    assert main(["config", "check"]) == 0
    first, *chosen = capsys.readouterr().out.splitlines()
    assert first == "the configuration is right"
    assert "cache: auto, of radix, swa, hybrid the first that suits" in chosen


def test_config_show_tells_where_values_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.yaml"
    file.write_text("cache: {page_size: 8}\nobservers: [jsonl]\n")
    assert main(["config", "show", str(file), "--set", "engine.seed=5"]) == 0
    lines = {
        line.split("#")[0].strip(): line.split("#")[1].strip()
        for line in capsys.readouterr().out.splitlines()
        if "#" in line
    }
    assert lines["page_size: 8"] == f"{file}:1:9"
    assert lines["seed: 5"] == "--set engine.seed=5"
    assert lines["port: 30000"] == "default"
    assert lines["use: jsonl"] == f"{file}:2:13"


def test_config_schema_holds_every_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    shapes = {
        s["properties"]["use"].get("const"): s for s in schema["properties"]["schedule"]["anyOf"] if "properties" in s
    }
    assert {"lpm", "fcfs", None} < set(shapes)
    assert "max_overtakes" in shapes["lpm"]["properties"]
    assert "max_overtakes" not in shapes["fcfs"]["properties"]
    assert shapes["fcfs"]["required"] == ["use"]


def test_config_schema_accepts_what_loads(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "schema"])
    schema = json.loads(capsys.readouterr().out)
    good: dict[str, Any] = {
        "model": "smollm2-135m",
        "cache": {"use": "radix", "page_size": "16", "size": "2GiB", "eviction": "lru"},
        "schedule": {"max_tokens_per_step": "2k", "max_overtakes": 9},
        "attention": {"prefill": "torch", "decode": {"use": "auto"}},
        "observers": ["jsonl", {"use": "jsonl", "path": "x"}, {"use": "./mine.py:Mine", "any": 1}],
        "server": {"api_key": {"env": "X"}, "apis": ["openai"]},
    }
    validator = jsonschema_rs.validator_for(schema)
    assert list(validator.iter_errors(good)) == []
    for bad in (
        {"cache": {"page_sise": 1}},
        {"schedule": "lpn"},
        {"schedule": {"use": "fcfs", "max_overtakes": 1}},
        {"x": 1},
    ):
        assert not validator.is_valid(bad)


def test_schema_tolerates_what_cannot_be_imported(tmp_path: Path) -> None:
    distribution(tmp_path, "phloem-toys", {"phloem.spec": {"nowhere": "cli_nowhere:N"}})
    done = phloem("config", "schema", env={"PYTHONPATH": str(tmp_path), "PATH": ""})
    assert done.returncode == 0
    assert "left out: spec.nowhere: spec plugin 'nowhere' cannot be imported" in done.stderr
    assert json.loads(done.stdout)


def test_config_reference_documents_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    undocumented = [row for row in rows if not row.rstrip("| ").rpartition("|")[2].strip()]
    assert not undocumented
