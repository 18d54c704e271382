"""Refusals and notes about tools speak of the tools, not of the structural tag that stands for them."""

from __future__ import annotations

import copy
import json

import pytest

from phloem.constraint import Constraint
from phloem.errors import RequestError
from phloem.interfaces import PluginContext, Tool
from phloem.plugins.api._chat_call import _content_or_calls
from phloem.plugins.api._constraint import Given, in_callers_words
from phloem.plugins.api._tools import Toolset
from phloem.plugins.grammar import _tags
from phloem.plugins.grammar._report import Support
from phloem.registry import Registry

BAD = {"type": "object", "properties": {"a": {"type": "integer"}, "xs": {"type": "integer", "multipleOf": 3}}}
TOOLS = (Tool("f"), Tool("g", parameters=BAD, strict=True), Tool("h", parameters={"properties": BAD["properties"]}))
TABLE = Support(backend="mine", keywords=frozenset({"type", "properties", "items"}))


def found(tag: object) -> list[str]:
    """What a backend says of a tag."""
    constraint = Constraint(kind="structural_tag", value=json.dumps(tag))
    return [f"{pointer}: {why}" for pointer, why in _tags.report(constraint, TABLE)]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "g"])
@pytest.mark.parametrize("name", ["deepseek", "gemma", "generic", "harmony", "hermes", "mistral", "pythonic"])
def test_places_in_tools(name: str, choice: str, copied: bool) -> None:
    plugin = Registry().load("parser", name)
    parser = plugin(plugin.Options(), PluginContext("parser", name))
    tag = parser.constraint(TOOLS, choice, True)
    given = Given("tools", "structural_tag", copy.deepcopy(tag) if copied else tag, tools=TOOLS)
    told = set(given.said(found(tag)))
    assert "g.parameters#/properties/xs/multipleOf: mine ignores multipleOf" in told
    assert not any("#/format" in one for one in told), told


def test_refusals_are_in_the_callers_words() -> None:
    plugin = Registry().load("parser", "hermes")
    parser = plugin(plugin.Options(), PluginContext("parser", "hermes"))
    offered = Toolset(TOOLS, "auto")
    content = Given("response_format", "json_schema", {"type": "array", "contains": {}})
    beside = _content_or_calls(content, offered, parser, None)
    only = Given("tools", "structural_tag", parser.constraint(TOOLS, "required", True), tools=TOOLS)
    for given, wanted in ((only, "these tools: g.parameters#"), (beside, "this response_format: #/contains")):
        text = f"mine cannot enforce all of this structural_tag: {'; '.join(found(given.value))}"
        with pytest.raises(RequestError, match=wanted) as error, in_callers_words(given):
            raise RequestError(text, param="structural_tag")
        assert "#/format" not in str(error.value)
        assert "g.parameters#/properties/xs/multipleOf" in str(error.value)
        assert error.value.param == given.name
