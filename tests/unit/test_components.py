"""Components in a configuration: chosen by the kind of group, typed, and refused where they have nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem import Engine, SamplingParams
from phloem.config import load_config
from phloem.errors import ConfigError, StepError

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "phloem-trunk-window" / "phloem_trunk_window.py"
TRUNK = f"{EXAMPLE}:TrunkWindow"


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(str(path), env={})
    return str(error.value).replace(str(path), "engine.yaml")


def test_options_are_typed_and_errors_have_places(tmp_path: Path) -> None:
    config = load_config(sections={"cache": {"components": {"window": {"use": TRUNK, "trunk": 7}}}}, env={})
    window: Any = config.cache.components.window
    assert (window.trunk, config.cache.components.full.use) == (7, "full")
    assert config.cache.components.recurrent.use == "recurrent"
    wrong = f"cache:\n  components:\n    window: {{use: '{TRUNK}', trunk: 0, tronk: 1}}\n"
    said = refusal(tmp_path, wrong)
    assert "cache.components.window.trunk: must be greater than or equal to 1, got 0" in said
    assert "engine.yaml:3:" in said
    assert "cache.components.window.tronk: unknown key (did you mean 'trunk'?)" in said
    assert "(did you mean 'window'?)" in refusal(tmp_path, "cache: {components: {windows: {use: window}}}")
    assert "no component plugin is named 'windw' (did you mean 'window'?)" in refusal(
        tmp_path, "cache: {components: {window: windw}}"
    )


def test_what_cannot_serve_a_group_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, "cache: {components: {window: full}}")
    assert "engine.yaml:1:9: cache.components: 'full' is for layers of kind full, not for window" in said
    said = refusal(tmp_path, f"cache: {{use: chunk, components: {{window: '{TRUNK}'}}}}")
    assert f"cache.components.window: '{TRUNK}' needs cache with components; cache 'chunk' has none" in said


def test_an_engine_has_the_component_that_is_chosen(tiny_model: Callable[[str], Path]) -> None:
    """On a model with windows; on another it has nothing to do, and the same outputs with both."""
    sections: dict[str, Any] = {"grammar": "none", "engine": {"check": True, "threads": 1}}
    greedy, prompt = SamplingParams(temperature=0.0, max_tokens=8), [5, 6, 7] * 20
    outputs = []
    for components in ({}, {"window": {"use": TRUNK, "trunk": 20}}):
        cache = {"tokens": 256, "components": components}
        with Engine(str(tiny_model("gemma3")), cache=cache, **sections) as engine:
            outputs.append(engine.generate(prompt, greedy).token_ids)
            parts = engine.core.ledger.cache._components  # type: ignore[attr-defined]
            assert [type(part).__name__ for part in parts] == ["Full", "TrunkWindow" if components else "Window"]
    assert outputs[0] == outputs[1]
    for use in ("auto", "radix"):
        cache = {"use": use, "components": {"window": TRUNK}}
        with pytest.raises(ConfigError, match=r"argument cache: cache.components.window: '.*' has nothing to do"):
            Engine(str(tiny_model("llama")), cache=cache, **sections)


FAILING = """
from phloem.components import Component


class Failing(Component):
    failures = 1

    def narrow(self, node, low, start):
        if Failing.failures:
            Failing.failures -= 1
            raise RuntimeError("no")
        return super().narrow(node, low, start)
"""


def test_what_a_component_raises_fails_its_step_only(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    file = tmp_path / "failing.py"
    file.write_text(FAILING)
    cache = {"tokens": 512, "components": {"window": f"{file}:Failing"}}
    sections: dict[str, Any] = {"grammar": "none", "engine": {"check": True, "threads": 1}}
    greedy, prompt = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), [5, 6, 7] * 20
    with Engine(str(tiny_model("gemma3")), cache=cache, **sections) as engine:
        with pytest.raises(StepError, match="the step failed: RuntimeError: no"):
            engine.generate(prompt, greedy)
        assert len(engine.generate(prompt, greedy).token_ids) == 40
