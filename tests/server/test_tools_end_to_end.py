"""Tools and schemas with the official client, a real server and the default model, whose template knows no tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from live import Live
from pydantic import BaseModel, ConfigDict, Field
from test_openai_api import events
from test_tools import check_stream

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
MODEL = "smollm2-135m"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
USER: list[Any] = [{"role": "user", "content": "What is the weather in Oslo, in celsius?"}]
BASE: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 96}


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    country: Literal["Norway", "France", "Peru"]
    large: bool


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(MODEL) as server:
        yield server
        server.until(server.all_slots_back)


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return live.openai


def test_a_tool_conversation_of_two_turns(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**BASE, messages=USER, tools=[WEATHER], tool_choice="required")
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
    assert first.usage is not None
    assert first.usage.completion_tokens > 10

    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 °C"} for call in choice.message.tool_calls]
    messages: list[Any] = [*USER, choice.message, *results]
    second = client.chat.completions.create(
        **(BASE | {"max_tokens": 16}), messages=messages, tools=[WEATHER], tool_choice="none"
    )
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].message.content
    free = client.chat.completions.create(**BASE, messages=messages, tools=[WEATHER]).choices[0]
    assert (free.finish_reason == "tool_calls") == bool(free.message.tool_calls)
    assert free.message.content or free.message.tool_calls


@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["auto", "all", "one"],
)
def test_a_stream_is_the_whole_in_parts(live: Live, choice: Any) -> None:
    body = BASE | {"messages": USER, "tools": [WEATHER], "tool_choice": choice, "logprobs": True}
    whole = live.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    parts = [
        chunk["choices"][0] for chunk in events(live.http.post("/v1/chat/completions", json=body | {"stream": True}))
    ]
    check_stream(whole, parts)
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert [entry["token_id"] for entry in entries] == [entry["token_id"] for entry in whole["logprobs"]["content"]]


def test_the_clients_own_stream(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(**BASE, messages=USER, tools=[WEATHER], tool_choice=named) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])


def test_several_choices_call_apart(client: openai.OpenAI) -> None:
    wanted = BASE | {"temperature": 1.5, "seed": 3, "n": 3}
    answer = client.chat.completions.create(**wanted, messages=USER, tools=[WEATHER], tool_choice="required")
    ids = []
    for choice in answer.choices:
        assert choice.finish_reason in ("tool_calls", "length")
        for call in choice.message.tool_calls or []:
            assert call.type == "function"
            ids.append(call.id)
        if choice.finish_reason == "tool_calls":
            last: Any = (choice.message.tool_calls or [])[-1]
            jsonschema.validate(json.loads(last.function.arguments), WEATHER["function"]["parameters"])
    assert len(set(ids)) == len(ids) >= 3


def test_pydantic_models_as_tools_and_as_answers(client: openai.OpenAI) -> None:
    """What the client's `parse` sends is strict, and what comes back is of the model's class."""
    ask: list[Any] = [{"role": "user", "content": "Tell me of the capital of Norway."}]
    answer = client.chat.completions.parse(**BASE, messages=ask, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)
    assert answer.choices[0].finish_reason == "stop"
    called = client.chat.completions.parse(
        **BASE,
        messages=ask,
        tools=[openai.pydantic_function_tool(City)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    calls = called.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, City)
    assert len(calls) == 1


def test_a_json_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    schema = WEATHER["function"]["parameters"]
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema, "strict": True}}
    wanted: dict[str, Any] = BASE | {"messages": USER, "response_format": form}
    whole = client.chat.completions.create(**wanted).choices[0]
    jsonschema.validate(json.loads(whole.message.content or ""), schema)
    assert whole.finish_reason == "stop"
    parts = list(client.chat.completions.create(**wanted, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.message.content
    cut = client.chat.completions.create(**(wanted | {"max_tokens": 4})).choices[0]
    assert cut.finish_reason == "length"
    assert (whole.message.content or "").startswith(cut.message.content or "?")


def test_other_constraints(client: openai.OpenAI) -> None:
    def content(**extra: Any) -> str:
        return client.chat.completions.create(**BASE, messages=USER, extra_body=extra).choices[0].message.content or ""

    assert content(guided_choice=["warm", "cold"]) in ("warm", "cold")
    assert content(structured_outputs={"regex": "[0-9]{2} °C"})[2:] == " °C"
    assert content(ebnf='root ::= "ab" [0-9]')[:2] == "ab"
    assert isinstance(json.loads(content(json_object=True, max_tokens=200)), dict)


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "x",
        ),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex", "unterminated"),
        ({"extra_body": {"json_object": True, "grammar_backend": "llama"}}, "grammar_backend", "llama"),
    ],
)
def test_what_cannot_be_enforced_is_refused_in_the_callers_words(
    client: openai.OpenAI, extra: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.chat.completions.create(**(BASE | extra), messages=USER, stream=stream)
        assert caught.value.param == param
