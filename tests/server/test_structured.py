"""Constraints through the public door: every spelling, one at a time, in the caller's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from test_openai_api import events, post, refused

Run = Callable[..., Any]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
FORMAT = {"type": "any_text"}
STRUCTURES = [{"begin": "<a>", "schema": {}, "end": "</a>"}]


def formatted(**more: Any) -> dict[str, Any]:
    return {"response_format": more}


def schema_format(**more: Any) -> dict[str, Any]:
    return formatted(type="json_schema", json_schema={"name": "s", "schema": SCHEMA} | more)


def outputs(**more: Any) -> dict[str, Any]:
    return {"structured_outputs": more}


GIVEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
    ({"json_schema": json.dumps(SCHEMA)}, {"json_schema": json.dumps(SCHEMA)}),
    ({"json_schema": True}, {"json_schema": True}),
    ({"json_object": True}, {"json_object": True}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"ebnf": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    ({"lark": 'start: "a"'}, {"lark": 'start: "a"'}),
    ({"choices": ["a", "b"]}, {"choices": ["a", "b"]}),
    ({"structural_tag": {"format": FORMAT}}, {"structural_tag": {"format": FORMAT}}),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choices": ["a"]}),
    ({"guided_grammar": "g"}, {"ebnf": "g"}),
    (outputs(json=SCHEMA), {"json_schema": SCHEMA}),
    (outputs(regex="a+"), {"regex": "a+"}),
    (outputs(choice=["a"]), {"choices": ["a"]}),
    (outputs(grammar="g"), {"ebnf": "g"}),
    (outputs(json_object=True), {"json_object": True}),
    (outputs(structural_tag="{}", disable_fallback=False), {"structural_tag": "{}"}),
    (formatted(type="text"), {}),
    (formatted(type="text") | {"regex": "a", "json_object": False}, {"regex": "a"}),
    (formatted(type="json_object"), {"json_object": True}),
    (schema_format(), {"json_schema": SCHEMA}),
    (schema_format(strict=True, description="d"), {"json_schema": SCHEMA}),
    (schema_format(strict=None), {"json_schema": SCHEMA}),
    (schema_format(strict=False), {"json_schema": SCHEMA, "strict": False}),
    (schema_format() | {"strict": False}, {"json_schema": SCHEMA, "strict": False}),
    (
        formatted(type="structural_tag", format=FORMAT),
        {"structural_tag": {"type": "structural_tag", "format": FORMAT}},
    ),
    (
        formatted(type="structural_tag", structures=STRUCTURES, triggers=["<a"]),
        {"structural_tag": {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<a"]}},
    ),
    ({"regex": "a", "grammar_backend": "outlines"}, {"regex": "a", "grammar_backend": "outlines"}),
    (
        {"regex": "a", "think_start": "(", "think_end": ")", "thinking_budget": 3},
        {"regex": "a", "think_start": "(", "think_end": ")", "think_tokens": 3},
    ),
    ({"think_end": ")", "think_tokens": 3}, {"think_end": ")", "think_tokens": 3}),
]
FIELDS = ("json_schema", "json_object", "regex", "ebnf", "lark", "choices", "structural_tag", "strict")
FIELDS += ("grammar_backend", "think_start", "think_end", "think_tokens")


def as_sent(value: Any) -> Any:
    """Schemas travel to the engine as text: it need not take them apart."""
    return json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else value


@pytest.mark.parametrize(("path", "base"), PATHS)
def test_every_spelling_reaches_the_engine(run: Run, path: str, base: dict[str, Any]) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, _: Any) -> None:
        for body, wanted in GIVEN:
            response = await client.post(path, json=base | body)
            assert response.status_code == 200, response.text
            params = engine.core.seen[-1].params
            plain = type(params)()
            found = {name: getattr(params, name) for name in FIELDS}
            assert found == {name: as_sent(wanted.get(name, getattr(plain, name))) for name in FIELDS}, body

    run(test, grammar=True)


def test_the_order_of_properties_is_kept(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, _: Any) -> None:
        await client.post("/v1/chat/completions", json=CHAT | schema_format())
        assert list(json.loads(engine.core.seen[-1].params.json_schema)["properties"]) == ["z", "a"]

    run(test, grammar=True)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "a", "choices": ["b"]}, "choices", "regex and choices are given together"),
    ({"guided_json": {}, "json_schema": {}}, "guided_json", "json_schema and guided_json are given together"),
    ({"json_object": True, "guided_regex": "a"}, "guided_regex", "json_object and guided_regex are given together"),
    (
        outputs(json={}, choice=["a"]),
        "structured_outputs.choice",
        "structured_outputs.json and structured_outputs.choice are given together",
    ),
    (outputs(), "structured_outputs", "structured_outputs is empty (give one of json, regex"),
    (outputs(json_object=False), "structured_outputs", "is empty"),
    (outputs(jsn={}), "structured_outputs.jsn", "did you mean 'json'"),
    (outputs(json={}, whitespace_pattern=" *"), "structured_outputs.whitespace_pattern", "cannot be honoured"),
    (schema_format() | {"ebnf": "g"}, "response_format", "ebnf and response_format are given together"),
    (schema_format() | outputs(regex="a"), "response_format", "structured_outputs.regex and response_format are"),
    (schema_format(strict=True) | {"strict": False}, "strict", "strict and the strict of response_format differ"),
    (formatted(type="json_schema"), "response_format", "response_format json_schema has no schema"),
    (formatted(type="json_schema", json_schema={"name": "s"}), "response_format", "has no schema"),
    (
        formatted(type="json_object", json_schema={"schema": {}}),
        "response_format.json_schema",
        "goes with type json_schema, not with json_object",
    ),
    (formatted(type="text", triggers=[]), "response_format.triggers", "goes with type structural_tag, not with text"),
    (formatted(type="structural_tag"), "response_format", "needs either format, or structures and triggers"),
    (formatted(type="structural_tag", triggers=[], format={}), "response_format", "needs either format"),
    (formatted(type="regex"), "response_format.type", "'structural_tag'"),
    (schema_format(schemas={}), "response_format.json_schema.schemas", "did you mean 'schema'"),
    ({"choices": []}, "choices", "choices must be a non-empty list"),
    ({"guided_choice": []}, "guided_choice", "guided_choice must be a non-empty list"),
    (outputs(choice=[""]), "structured_outputs.choice", "structured_outputs.choice must be a non-empty list"),
    ({"regex": 5}, "regex", "valid string"),
    ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "grammar.whitespace"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "use grammar_backend"),
    ({"think_end": "", "think_tokens": 1}, "think_end", "must not be empty"),
    ({"think_end": "x", "think_tokens": -1}, "think_tokens", "at least 0"),
    ({"think_end": "x", "think_tokens": 1, "thinking_budget": 2}, "thinking_budget", "differ"),
]


@pytest.mark.parametrize(("path", "base"), PATHS)
def test_refusals_name_what_the_caller_wrote(run: Run, path: str, base: dict[str, Any]) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        for body, param, words in REFUSED:
            refused(await client.post(path, json=base | body), param, words)

    run(test, grammar=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "base"), PATHS)
def test_the_engines_refusals_do_so_too(run: Run, path: str, base: dict[str, Any], stream: bool) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        spoken: list[tuple[dict[str, Any], str]] = [
            (schema_format(), "response_format"),
            (formatted(type="json_object"), "response_format"),
            ({"guided_grammar": "g"}, "guided_grammar"),
            (outputs(json={}), "structured_outputs.json"),
            ({"lark": "g"}, "lark"),
        ]
        for body, name in spoken:
            response = await client.post(path, json=base | body | {"stream": stream})
            refused(response, name, f"{name} cannot be honoured: no grammar backend")

    run(test)


@pytest.mark.parametrize(("path", "base"), PATHS)
def test_notes_come_with_the_end(run: Run, path: str, base: dict[str, Any]) -> None:
    notes = ["#/a/uniqueItems: xgrammar ignores uniqueItems"]
    body = base | {"json_schema": {}, "strict": False, "n": 2}
    whole = post(run, path, body, grammar=True, notes=notes).json()
    assert [choice["notes"] for choice in whole["choices"]] == [notes, notes]
    chunks = events(post(run, path, body | {"stream": True}, grammar=True, notes=notes))
    found = [choice for chunk in chunks for choice in chunk["choices"] if "notes" in choice]
    assert [choice["notes"] for choice in found] == [notes, notes]
    assert all(choice["finish_reason"] for choice in found)
    assert "notes" not in post(run, path, body, grammar=True).json()["choices"][0]


NATIVE: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "a", "choices": ["b"]}, "choices", "regex and choices are given together"),
    ({"guided_json": {}}, "guided_json", "use json_schema"),
    ({"grammar": "g"}, "grammar", "use ebnf or lark"),
    ({"response_format": {}}, "response_format", "use json_schema, json_object or structural_tag"),
    ({"thinking_budget": 5}, "thinking_budget", "use think_tokens"),
    ({"think_tokens": 5}, "think_end", "need think_end"),
    ({"ebnf": 5}, "ebnf", "`str"),
]


def test_the_native_route(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, _: Any) -> None:
        for fields, param, words in NATIVE:
            body = {"text": "a", "sampling_params": {"max_tokens": 1} | fields}
            refused(await client.post("/generate", json=body), param, words)
        fields = {"ebnf": "g", "strict": False, "think_end": "x", "max_tokens": 1}
        for stream in (False, True):
            response = await client.post("/generate", json={"text": "a", "sampling_params": fields, "stream": stream})
            answer = events(response)[-1] if stream else response.json()
            assert answer["meta_info"]["notes"] == ["so"]
            params = engine.core.seen[-1].params
            assert (params.ebnf, params.strict, params.think_end) == ("g", False, "x")

    run(test, grammar=True, notes=["so"])
    plain = post(run, "/generate", {"text": "a", "sampling_params": {"max_tokens": 1}}).json()
    assert "notes" not in plain["meta_info"]
