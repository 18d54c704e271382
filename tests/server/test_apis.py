"""`server.apis`: names, or mappings of a name and its options; what is wrong is told with its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from live import Live

from phloem.config import load_config
from phloem.errors import ConfigError
from phloem.server._apis import api_name


def test_options_reach_the_plugin(tiny_model: Callable[[str], Path]) -> None:
    entry = "{use: program, most: 2, idle_s: 7}"
    with Live(tiny_model("llama"), f"server.apis=[openai, native, {entry}]") as server:
        assert server.http.get("/v1/programs").json()["most_states"] == 2
        made = [server.http.post("/v1/programs", json={"text": "a"}) for _ in range(3)]
        assert [answer.status_code for answer in made] == [200, 200, 429]
        assert made[0].json()["expires_s"] == 7


def test_options_are_checked_with_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(
        "server:\n"
        "  apis: [openai, {use: native, x: 1}, {use: program, most: 0, idle_s: long}]\n"
        "  tool_parser:\n"
        "    use: hermes\n"
        "    opend: 1\n"
        "  reasoning_parser: {use: none, x: 1}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(config), env={})
    problems = str(caught.value)
    assert "server.apis[1].x: api plugin 'native' has no such option (it has none)" in problems
    assert "server.apis[2].most: must be greater than or equal to 1, got 0" in problems
    assert "server.apis[2].idle_s: must be a valid number" in problems
    assert "engine.yaml:5:5: server.tool_parser.opend: parser plugin 'hermes' has no such option (did you" in problems
    assert "server.reasoning_parser: 'none' has no options" in problems


def test_names_are_checked() -> None:
    assert [api_name(entry) for entry in ("openai", {"use": "native"})] == ["openai", "native"]
    for wrong in ("{uses: program}", "{use: programme}"):
        with pytest.raises(ConfigError, match="no api plugin is named"):
            load_config(sets=[f"server.apis=[{wrong}]"], env={})
