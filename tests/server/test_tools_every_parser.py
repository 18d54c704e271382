"""Every parser's constraint, enforced on a model of random weights and read back: valid calls, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from test_openai_api import events
from test_tools import check_stream

from phloem import Engine
from phloem.interfaces import PluginContext
from phloem.plugins.api.openai import OpenAIApi
from phloem.registry import Registry

PARSERS = [name for name in Registry().names("parser") if "tools" in Registry().load("parser", name).capabilities]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["k", "c"]}, "days": {"enum": [1, 20]}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
SIMPLE = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "first", "parameters": SIMPLE}},
    {"type": "function", "function": {"name": "second", "parameters": SCHEMA}},
]
BASE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": TOOLS,
    "seed": 5,
    "n": 2,
}


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    sections: dict[str, Any] = {"engine": {"threads": 1, "check": True}, "cache": {"tokens": 8192}}
    with Engine(str(tiny_model("llama")), grammar={"use": "llguidance"}, **sections) as engine:
        yield engine


def ask(engine: Engine, parser: str, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """Requests on an application whose parser is this one."""

    async def inner() -> list[httpx.Response]:
        context = PluginContext("api", "openai", extras={"parsers": {"tools": parser}})
        app = FastAPI()
        app.include_router(OpenAIApi(OpenAIApi.Options(), context).router(engine.service()))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            return [await client.post("/v1/chat/completions", json=BASE | body) for body in bodies]

    return asyncio.run(inner())


@pytest.mark.parametrize("parser", PARSERS)
def test_required_and_named_calls_are_valid(engine: Engine, parser: str) -> None:
    named = {"type": "function", "function": {"name": "second"}}
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    whole, streamed, one = ask(engine, parser, required, required | {"stream": True}, {"tool_choice": named})
    assert whole.status_code == one.status_code == 200, whole.text + one.text
    parts = [chunk["choices"][0] for chunk in events(streamed)]
    for response in (whole, one):
        for choice in response.json()["choices"]:
            (call,) = choice["message"]["tool_calls"]
            name = call["function"]["name"]
            assert name in (("first", "second") if response is whole else ("second",))
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA if name == "second" else SIMPLE)
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            if response is whole:
                check_stream(choice, [part for part in parts if part["index"] == choice["index"]])


@pytest.mark.parametrize("parser", PARSERS)
def test_a_conversation_in_the_parsers_words(engine: Engine, parser: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "first", "arguments": '{"on": true}'}}
    turns = [
        *BASE["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7 <°>"},
    ]
    (response,) = ask(engine, parser, {"messages": turns, "max_tokens": 2, "tools": TOOLS[:1]})
    assert response.status_code == 200, response.text
