"""Plugins are found by metadata, loaded by name only, and refused with a reason and a remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from toy_plugins import distribution, policy_file

from phloem.errors import PluginError
from phloem.interfaces import PluginContext
from phloem.model_spec import GroupSpec, LayerSpec, ModelSpec
from phloem.registry import Registry, build, did_you_mean


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of distributions, on the import path too."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_built_ins_are_found_like_strangers() -> None:
    found = {(f.kind, f.name): f for f in Registry().found()}
    assert found["cache", "radix"].distribution == "phloem"
    assert found["cache", "radix"].target == "phloem.plugins.cache.radix:RadixCache"
    policies = "dfs-weight fcfs hrrn lof lpm priority random routing-key shortest-prefill"
    assert Registry().names("schedule") == policies.split()


def test_listing_imports_no_plugin() -> None:
    program = (
        "import sys; from phloem.registry import Registry; print(len(Registry().found()) > 5);"
        "print([m for m in sys.modules if m.startswith('phloem.plugins') or m in ('torch', 'numpy', 'pydantic')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True", "[]"]


def test_only_the_named_plugin_is_imported(shelf: Path) -> None:
    policy_file(shelf, "reg_good.py")
    (shelf / "reg_bomb.py").write_text("raise SystemExit('imported')")
    entries = {"phloem.schedule": {"good": "reg_good:Policy", "bomb": "reg_bomb:Policy"}}
    distribution(shelf, "toys", entries)
    assert Registry([str(shelf)]).load("schedule", "good").__name__ == "Policy"
    assert "reg_bomb" not in sys.modules


def test_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(PluginError, match=r"no cache plugin is named 'radx' \(did you mean 'radix'\?\)"):
        Registry().load("cache", "radx")
    with pytest.raises(PluginError, match=r"no router plugin is named 'x' \(none is installed\)"):
        Registry().load("router", "x")
    assert did_you_mean("zzz", ["b", "a"]) == "(known: a, b)"


def test_duplicate_names_both_distributions(shelf: Path) -> None:
    for name in ("one", "two"):
        distribution(shelf, name, {"phloem.schedule": {"same": "toy:Policy"}})
    with pytest.raises(PluginError, match=r"schedule plugin 'same' is provided by 'one' 1.0 and by 'two' 1.0") as error:
        Registry([str(shelf)]).load("schedule", "same")
    assert "uninstall one of them" in str(error.value)


def test_built_in_names_are_reserved(shelf: Path) -> None:
    distribution(shelf, "evil", {"phloem.cache": {"radix": "evil:Radix"}})
    registry = Registry([str(shelf), *sys.path])
    with pytest.raises(PluginError, match=r"'evil' 1.0 and by 'phloem' .*; names of built-in plugins are reserved"):
        registry.load("cache", "radix")
    assert registry.load("cache", "chunk").__name__ == "ChunkCache"  # another name is not concerned


def test_equal_names_in_two_kinds_do_not_collide(shelf: Path) -> None:
    distribution(shelf, "toys", {"phloem.cache": {"x": "toy:A"}, "phloem.spec": {"x": "toy:B"}})
    registry = Registry([str(shelf)])
    assert [registry.find(kind, "x").target for kind in ("cache", "spec")] == ["toy:A", "toy:B"]


def test_a_copy_further_down_the_path_is_shadowed(tmp_path: Path) -> None:
    for i, version in enumerate(("2.0", "1.0")):
        distribution(tmp_path / str(i), "toys", {"phloem.spec": {"x": "toy:X"}}, version=version)
    assert Registry([str(tmp_path / "0"), str(tmp_path / "1")]).find("spec", "x").version == "2.0"


@pytest.mark.parametrize(
    ("dist", "remedy"),
    [("phloem", "pip install 'phloem[toyx]'"), ("stranger", "pip install --upgrade stranger")],
)
def test_missing_module_names_the_pip_line(shelf: Path, dist: str, remedy: str) -> None:
    (shelf / f"reg_needs_{dist}.py").write_text("import no_such_module_xyz")
    entries = {"phloem.grammar": {"toyx": f"reg_needs_{dist}:G"}}
    distribution(shelf, dist, entries, extra={"toyx": "no-such-module-xyz"})
    with pytest.raises(
        PluginError, match=r"'toyx' cannot be imported: ModuleNotFoundError: .*no_such_module_xyz"
    ) as error:
        Registry([str(shelf)]).load("grammar", "toyx")
    assert error.value.hint == remedy


def test_extra_is_found_by_requirement_where_no_extra_has_the_plugins_name(shelf: Path) -> None:
    (shelf / "reg_api.py").write_text("import no_such_web_framework.routing")
    distribution(shelf, "phloem", {"phloem.api": {"odd": "reg_api:Api"}}, extra={"server": "no-such-web-framework>=1"})
    with pytest.raises(PluginError) as error:
        Registry([str(shelf)]).load("api", "odd")
    assert error.value.hint == "pip install 'phloem[server]'"


def test_syntax_error_names_file_and_line(shelf: Path) -> None:
    (shelf / "reg_broken.py").write_text("x = 1\ndef oops(:\n")
    distribution(shelf, "toys", {"phloem.spec": {"broken": "reg_broken:X"}})
    with pytest.raises(PluginError, match=r"cannot be imported: SyntaxError: .*reg_broken.py:2"):
        Registry([str(shelf)]).load("spec", "broken")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        ("Old", "speaks plugin API 0, this phloem speaks 1"),
        ("Silent", "breaks the contract of its kind: the class has no `api = 1`"),
        (
            "NoOptions",
            "it has no `Options`, a pydantic model; it has no method order(waiting); it has no method victim",
        ),
        ("LooseOptions", 'its `Options` are not frozen with extra="forbid"'),
        ("WrongOrder", r"order(waiting) cannot be called: too many positional arguments"),
        ("Confused", "`requires` has 'atention:tree_mask', which is no kind:capability"),
        ("Missing", "has no class 'Missing' (known: "),
        ("Polcy", "has no class 'Polcy' (did you mean 'Policy'?)"),
        ("", "needs a class: file.py:Class"),
    ],
)
def test_contract(tmp_path: Path, cls: str, message: str) -> None:
    file = policy_file(tmp_path)
    with pytest.raises(PluginError) as error:
        Registry().load("schedule", f"{file}:{cls}" if cls else str(file))
    assert message in str(error.value)


def test_local_file_and_module(shelf: Path) -> None:
    file = policy_file(shelf, "reg_local.py")
    assert Registry().load("schedule", f"{file}:Policy").__name__ == "Policy"
    assert Registry().load("schedule", "reg_local:Other").__name__ == "Other"
    with pytest.raises(PluginError, match=r"there is no file .*nowhere\.py"):
        Registry().load("schedule", f"{shelf}/nowhere.py:Policy")


def test_build_gives_options_and_context(tmp_path: Path) -> None:
    context = PluginContext("schedule", "toy", page_size=4)
    plugin = build("schedule", f"{policy_file(tmp_path)}:Policy", context)
    assert (plugin.options.depth, plugin.context.page_size) == (3, 4)


def test_build_names_a_plugin_whose_constructor_raises(tmp_path: Path) -> None:
    from phloem.config import load_config

    file = policy_file(tmp_path)
    config = load_config(sections={"schedule": {"use": f"{file}:Policy", "depth": 7}}, env={})
    with pytest.raises(PluginError, match=r"toy.py:Policy' failed to start: RuntimeError: no depth 7 today"):
        build("schedule", config.schedule, PluginContext("schedule", "toy"))


def test_none_builds_nothing() -> None:
    assert build("grammar", "none", PluginContext("grammar", "none")) is None


def test_auto_takes_the_first_that_supports_and_lists_all_reasons(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as error:
        Registry().resolve_auto("model", str(tmp_path))
    lines = str(error.value).splitlines()
    assert lines[0] == f"no model plugin can serve {tmp_path}:"
    assert [line.partition(":")[0].strip() for line in lines[1:]] == ["native", "transformers"]
    name, cls = Registry().resolve_auto("attention", PluginContext("attention", "auto", device="cuda"))
    assert (name, cls.__name__) == ("torch", "TorchAttention")


@pytest.mark.parametrize(
    ("groups", "layers", "cache"),
    [
        ([GroupSpec("full")], [0], "radix"),
        ([GroupSpec("full"), GroupSpec("w", "window", 8)], [0, 0], "radix"),
        ([GroupSpec("full"), GroupSpec("w", "window", 8)], [0, 1], "swa"),
        ([GroupSpec("w", "window", 8)], [0], "swa"),
    ],
)
def test_auto_takes_the_cache_that_suits_the_models_groups(
    groups: list[GroupSpec], layers: list[int], cache: str
) -> None:
    spec = ModelSpec("toy", 8, 99, tuple(LayerSpec(1, 1, 1, group) for group in layers), tuple(groups))
    assert Registry().resolve_auto("cache", spec)[0] == cache
