"""Tools through the chat route: shapes whole and streamed, prompts, thoughts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import shouting_parser
from test_openai_api import events, post, refused

from phloem.config import load_config
from phloem.errors import ConfigError, PluginError
from phloem.interfaces import PluginContext
from phloem.plugins.api.openai import OpenAIApi

Run = Callable[..., Any]
USER: list[Any] = [{"role": "user", "content": "How warm is it?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Do {name}", "parameters": SCHEMA} | more}


TOOLS = [tool("weather"), tool("now", parameters=None, description=None)]
OSLO = '{"name": "weather", "arguments": {"city": "Oslo 🌳", "n": 1.0}}'
NOW = '{"name": "now", "arguments": {}}'
# a template that shows tools, calls and results, and thinks
THINKER = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}\n"
    "{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.id }} {{ c.function.name }} {{ c.function.arguments.items() | list }}"
    "</tool_call>{% endfor %}{{ ' of ' + m.tool_call_id if m.tool_call_id }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
WIDE: dict[str, Any] = {"context": 8000, "grammar": True}


def chat(run: Run, body: dict[str, Any], reply: str | list[str] = "fine", **options: Any) -> dict[str, Any]:
    """A whole answer, once its stream has been seen to say the same."""
    texts = [reply] if isinstance(reply, str) else reply
    base = {"messages": USER, "max_tokens": 500} | body
    options = WIDE | {"reply": texts} | options
    response = post(run, "/v1/chat/completions", base, **options)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(run, "/v1/chat/completions", base | more, **options))
    for choice in whole["choices"]:
        check_stream(
            choice, [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == choice["index"]]
        )
    assert chunks[-1]["usage"] == whole["usage"]
    return whole


def check_stream(choice: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """The parts of a stream, put together as OpenAI's clients do, are the choice. Ids differ, and only those."""
    message = dict(choice["message"])
    message.pop("refusal")
    made: dict[str, Any] = dict.fromkeys(message)
    calls: list[dict[str, Any]] = []
    for part in parts:
        delta = part["delta"]
        assert len(delta) <= (2 if part is parts[0] else 1)
        for name in ("role", "content", "reasoning_content"):
            if delta.get(name) is not None:
                made[name] = (made[name] or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls), "calls begin in order"
                assert call["function"]["arguments"] == ""
                calls.append({key: call[key] for key in ("id", "type", "function")})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert len({call["id"] for call in calls}) == len(calls)
    for call, other in zip(calls, message.get("tool_calls", []), strict=True):
        assert call["id"] != other["id"]
        assert call | {"id": ""} == other | {"id": ""}
    if calls:
        made["tool_calls"] = message["tool_calls"]
    assert made == message
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] == choice["finish_reason"]


def seen(run: Run, body: dict[str, Any], path: str = "/v1/chat/completions", **options: Any) -> tuple[Any, str]:
    """The parameters that reach the engine, and the prompt's text."""

    async def test(client: httpx.AsyncClient, engine: Any, _: Any) -> tuple[Any, str]:
        response = await client.post(path, json={"messages": USER, "max_tokens": 1} | body)
        assert response.status_code == 200, response.text
        (call,) = engine.core.seen
        tag = call.params.structural_tag  # travels as text
        params = msgspec.structs.replace(call.params, structural_tag=json.loads(tag) if tag else None)
        return params, engine.core.tokenizer.decode(call.prompt, skip_special_tokens=False)

    found: tuple[Any, str] = run(test, **(WIDE | options))
    return found


def test_a_call(run: Run) -> None:
    choice = chat(run, {"tools": TOOLS}, OSLO)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert len(call["id"]) == 29
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo 🌳", "n": 1.0}'}, "not retyped"


def test_parallel_calls_keep_their_order(run: Run) -> None:
    message = chat(run, {"tools": TOOLS}, f"{NOW}\n{OSLO}\n{NOW}")["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now", "weather", "now"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]][::2] == [{}, {}]


def test_an_answer_without_a_call(run: Run) -> None:
    choice = chat(run, {"tools": TOOLS}, "It is {warm}.")["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It is {warm}.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_choices_are_read_apart(run: Run) -> None:
    choices = chat(run, {"tools": TOOLS, "n": 3}, [OSLO, "No.", NOW])["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    assert [len(choice["message"].get("tool_calls", [])) for choice in choices] == [1, 0, 1]


def test_a_call_that_is_cut_ends_with_length(run: Run) -> None:
    choice = chat(run, {"tools": TOOLS, "max_tokens": 45}, OSLO)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'


def test_logprobs_are_those_of_the_raw_tokens(run: Run) -> None:
    body = {"messages": USER, "tools": TOOLS, "logprobs": True, "max_tokens": 200}
    options = WIDE | {"reply": [NOW]}
    whole = post(run, "/v1/chat/completions", body, **options).json()["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in whole) == NOW
    chunks = events(post(run, "/v1/chat/completions", body | {"stream": True}, **options))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [item for part in parts if part for item in part["content"]] == whole


def test_none_tells_the_model_of_no_tools(run: Run) -> None:
    _, prompt = seen(run, {"tools": TOOLS, "tool_choice": "none"})
    assert prompt == seen(run, {})[1]
    choice = chat(run, {"tools": TOOLS, "tool_choice": "none"}, NOW)["choices"][0]
    assert choice["message"]["content"] == NOW
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "names", "strict"),
    [
        ({"tool_choice": "required"}, ["weather", "now"], False),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ["now"], False),
        ({"parallel_tool_calls": False}, ["weather", "now"], False),
        ({"tools": [tool("weather", strict=True)]}, ["weather"], True),
        ({"tools": [tool("weather")], "tool_choice": "required", "strict": True}, ["weather"], True),
    ],
)
def test_what_is_asked_for_is_enforced(run: Run, body: dict[str, Any], names: list[str], strict: bool) -> None:
    params, _ = seen(run, {"tools": TOOLS} | body)
    tag = json.dumps(params.structural_tag)
    assert [name for name in ("weather", "now") if name in tag] == names
    assert params.strict is strict
    assert params.constraints == ["structural_tag"]


def test_free_calls_need_no_grammar(run: Run) -> None:
    params, _ = seen(run, {"tools": TOOLS}, grammar=False)
    assert params.constraints == []


def test_allowed_tools(run: Run) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    params, prompt = seen(run, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}})
    assert "weather" not in json.dumps(params.structural_tag) + prompt
    assert "now" in prompt


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
ROUND = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "call_2", "index": 1}]},
    {"role": "tool", "tool_call_id": "call_2", "content": "12"},
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": [{"type": "text", "text": "13"}]},
]


def test_a_conversation_in_words_where_the_template_knows_no_tools(run: Run) -> None:
    _, prompt = seen(run, {"tools": TOOLS, "messages": ROUND})
    turns = prompt.split("<|im_start|>")[1:]
    assert [turn.partition("\n")[0] for turn in turns] == ["system", "user", "assistant", "user", "assistant"]
    assert turns[0].startswith("system\nBe brief.\n\n# Tools")
    assert '"name": "now", "description": "", "parameters"' in turns[0]
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    assert turns[2] == f"assistant\n{call}\n{call}<|im_end|>\n"
    assert turns[3] == "user\nResult of weather:\n12\nResult of weather:\n13<|im_end|>\n"


def test_a_conversation_by_the_template_where_it_knows_tools(run: Run) -> None:
    _, prompt = seen(run, {"tools": TOOLS, "messages": ROUND}, template=THINKER)
    shown = json.loads(prompt.partition("<tools>")[2].partition("</tools>")[0])
    assert shown[0] == TOOLS[0]
    assert shown[1]["function"] == {"name": "now", "parameters": {"type": "object", "properties": {}}}
    assert "<tool_call>call_1 weather [('city', 'Oslo')]</tool_call>" in prompt, "arguments are an object"
    assert "<|im_start|>tool weather\n12 of call_2<|im_end|>" in prompt
    assert "# Tools" not in prompt


def test_tokenize_counts_what_a_chat_request_would(run: Run) -> None:
    _, prompt = seen(run, {"tools": TOOLS})
    tokens = post(run, "/tokenize", {"messages": USER, "tools": TOOLS}, **WIDE).json()["tokens"]
    assert len(tokens) == len(prompt.replace("<|im_start|>", "<").replace("<|im_end|>", ">").encode())
    refused(post(run, "/tokenize", {"prompt": "a", "tools": TOOLS}), "messages", "go with messages")


def test_ids_of_nine_characters_where_the_template_insists(run: Run) -> None:
    strict = "{% if x %}{% if x | length != 9 %}{{ raise_exception('9') }}{% endif %}{% endif %}" + THINKER
    _, prompt = seen(run, {"tools": TOOLS, "messages": ROUND}, template=strict)
    (first, second) = [part.split(" ")[0] for part in prompt.split("<tool_call>")[1:]]
    assert len(first) == len(second) == 9
    assert f"12 of {second}<" in prompt


def test_a_template_without_system_messages(run: Run) -> None:
    plain = "{% for m in messages %}{{ raise_exception('no') if m.role == 'system' }}{{ m.content }}\n{% endfor %}"
    _, prompt = seen(run, {"tools": TOOLS}, template=plain)
    assert prompt.startswith("# Tools")
    assert prompt.endswith("\n\nHow warm is it?\n")


# --- thoughts


THOUGHT = "<think>\nLet me see.\n</think>\n\nIt is warm."
THINKS = {"template": THINKER}


def test_thoughts_are_told_from_the_answer(run: Run) -> None:
    message = chat(run, {}, THOUGHT, **THINKS)["choices"][0]["message"]
    assert message["reasoning_content"] == "Let me see."
    assert message["content"] == "It is warm."
    silent = chat(run, {}, "Warm.", **THINKS)["choices"][0]["message"]
    assert (silent["reasoning_content"], silent["content"]) == (None, "Warm.")


def test_a_thought_and_a_call(run: Run) -> None:
    reply = f"<think>Look it up.</think>\n<tool_call>\n{OSLO}\n</tool_call>"
    choice = chat(run, {"tools": TOOLS}, reply, **THINKS)["choices"][0]
    assert choice["message"]["reasoning_content"] == "Look it up."
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_a_thought_that_the_prompt_has_opened(run: Run) -> None:
    """what-breaks 37."""
    message = chat(run, {}, "Hm.</think>Warm.", template=THINKER + "<think>\n")["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Warm.")
    cut = chat(run, {"max_tokens": 3}, "Hm.</think>Warm.", template=THINKER + "<think>\n")["choices"][0]
    assert (cut["message"]["reasoning_content"], cut["message"]["content"]) == ("Hm.", None)


def test_thoughts_may_be_left_out_or_left_in(run: Run) -> None:
    message = chat(run, {"include_reasoning": False}, THOUGHT, **THINKS)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "It is warm.", "refusal": None}
    message = chat(run, {"separate_reasoning": False}, THOUGHT, **THINKS)["choices"][0]["message"]
    assert message["content"] == THOUGHT
    nobody = chat(run, {}, THOUGHT, parsers={"reasoning": "none"}, **THINKS)["choices"][0]["message"]
    assert nobody["content"] == THOUGHT


def test_a_constraint_begins_after_the_thought(run: Run) -> None:
    params, _ = seen(run, {"json_object": True, "thinking_budget": 7}, **THINKS)
    assert (params.think_start, params.think_end, params.think_tokens) == ("<think>", "</think>", 7)
    params, _ = seen(run, {"tools": TOOLS, "tool_choice": "required"}, **THINKS)
    assert params.think_end == "</think>"
    params, _ = seen(run, {}, **THINKS)
    assert params.think_end is None, "nothing to begin"
    params, _ = seen(run, {"json_object": True}, template=THINKER.replace("think>", "thought>"))
    assert params.think_end is None, "a template without the markers is of a model that does not think"


def test_variables_of_the_template(run: Run) -> None:
    _, prompt = seen(run, {"chat_template_kwargs": {"enable_thinking": False}}, **THINKS)
    assert prompt.endswith("<think></think>")
    template = THINKER + "{{ reasoning_effort }}"
    _, prompt = seen(run, {"reasoning_effort": "high"}, template=template)
    assert prompt.endswith("high")
    _, prompt = seen(run, {"messages": [USER[0] | {"name": "me"}]}, **THINKS)
    assert "user me\n" in prompt
    earlier = {"role": "assistant", "content": "Warm.", "reasoning_content": "Hm."}
    _, prompt = seen(run, {"messages": [*USER, earlier, *USER]}, **THINKS)
    assert "Hm.Warm." in prompt


# --- tools beside a constraint of the content


def test_content_follows_the_format_unless_tools_are_called(run: Run) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    params, _ = seen(run, {"tools": TOOLS, "response_format": form})
    content, calls = params.structural_tag["format"]["elements"]
    assert content == {"type": "json_schema", "json_schema": SCHEMA}
    assert "weather" in json.dumps(calls)
    assert SCHEMA in list(schemas(calls))
    params, _ = seen(run, {"tools": [tool("weather", strict=True)], "choices": ["a"]})
    content, calls = params.structural_tag["format"]["elements"]
    assert content == {"type": "or", "elements": [{"type": "const_string", "value": "a"}]}
    assert (SCHEMA in list(schemas(calls)), params.strict) == (True, True)
    for reply, called in ((OSLO, True), ('{"city": "Oslo"}', False)):
        message = chat(run, {"tools": TOOLS, "response_format": form}, reply)["choices"][0]["message"]
        assert bool(message.get("tool_calls")) == called
        assert message["content"] == (None if called else reply)


def schemas(node: Any) -> Iterator[Any]:
    """The JSON schemas in a format."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from [value] if key == "json_schema" else schemas(value)


def test_a_call_that_must_be_is_not_content(run: Run) -> None:
    alone, _ = seen(run, {"tools": TOOLS, "tool_choice": "required"})
    both, _ = seen(run, {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}})
    assert both.structural_tag == alone.structural_tag


# --- parsers by name


def test_special_tokens_reach_the_parser_and_not_the_caller(run: Run) -> None:
    """A parser whose markers are special tokens reads the raw text; what is left of them in content is taken out."""
    reply = "a<|im_start|>b<|im_end|>[TOOL_CALLS]now[ARGS]{}"
    names = {"tools": "mistral"}
    params, _ = seen(run, {"tools": TOOLS}, parsers=names)
    assert params.skip_special_tokens is False
    message = chat(run, {"tools": TOOLS}, reply, parsers=names)["choices"][0]["message"]
    assert message["content"] == "ab"
    assert message["tool_calls"][0]["function"]["name"] == "now"
    message = chat(run, {"tools": TOOLS, "skip_special_tokens": False}, reply, parsers=names)["choices"][0]["message"]
    assert message["content"] == "a<|im_start|>b<|im_end|>"
    params, _ = seen(run, {}, parsers=names)
    assert params.skip_special_tokens is True, "without tools nobody reads markers"


def test_two_parsers_one_after_the_other(run: Run) -> None:
    reply = f"<think>Hm. {NOW}</think>\n{NOW}"
    message = chat(run, {"tools": TOOLS}, reply, parsers={"reasoning": "think"})["choices"][0]["message"]
    assert message["reasoning_content"] == f"Hm. {NOW}"
    assert len(message["tool_calls"]) == 1
    assert message["content"] is None


def test_a_parser_with_options(run: Run) -> None:
    """Answers that begin within a thought, of a model whose prompt does not show it."""
    names = {"reasoning": {"use": "think", "opened": True}}
    message = chat(run, {"tools": TOOLS}, f"Hm.</think>{NOW}", parsers=names)["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert len(message["tool_calls"]) == 1


def test_a_parser_of_a_third_party(run: Run) -> None:
    names = {"tools": "shouting_parser:Shouting"}
    message = chat(run, {"tools": TOOLS}, "CALL now!", parsers=names)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("method", ["constraint", "instructions", "stream", "push", "finish"])
def test_a_fault_of_a_parser_fails_its_request_and_is_told(
    run: Run, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("never thought of that")

    owner = shouting_parser.Stream if method in ("push", "finish") else shouting_parser.Shouting
    monkeypatch.setattr(owner, method, broken)
    told = f"parser plugin 'shouting_parser:Shouting' failed in {method}: ValueError: never thought of that"

    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        body: dict[str, Any] = {"messages": USER, "max_tokens": 5, "tools": TOOLS}
        failed = await client.post("/v1/chat/completions", json=body)
        assert (failed.status_code, failed.json()["error"]["message"]) == (500, told)
        streamed = await client.post("/v1/chat/completions", json=body | {"stream": True})
        assert told in streamed.text
        assert (await client.post("/v1/chat/completions", json=body | {"tool_choice": "none"})).status_code == 200

    run(test, parsers={"tools": "shouting_parser:Shouting"}, **WIDE)


def test_parsers_are_loaded_with_the_api_if_they_are_named() -> None:
    def made(**names: Any) -> OpenAIApi:
        return OpenAIApi(OpenAIApi.Options(), PluginContext("api", "openai", extras={"parsers": names}))

    made(tools="hermes", reasoning="think")
    with pytest.raises(PluginError, match=r"server\.tool_parser: 'think' reads no tools"):
        made(tools="think")
    with pytest.raises(PluginError, match=r"server\.reasoning_parser: 'generic' reads no reasoning"):
        made(reasoning="generic")
    with pytest.raises(PluginError, match="no parser plugin is named 'hermess'"):
        made(tools="hermess")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("hermess", "server.tool_parser: no parser plugin is named 'hermess' (did you mean 'hermes'?)"),
        ("{uses: think}", "server.tool_parser: no parser plugin is named ''"),
        ("[hermes]", "must be a valid string"),
        ("{use: think, open: yes}", "server.tool_parser.open: parser plugin 'think' has no such option (did you mean"),
        ("{use: think, opened: maybe}", "server.tool_parser.opened: must be a valid boolean"),
    ],
)
def test_the_configuration_knows_parsers(value: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(sets=[f"server.tool_parser={value}"], env={})
    assert problem in str(caught.value)
    for fine in ("none", "mine.parsers:Mine", "{use: hermes, opened: true}"):
        load_config(sets=[f"server.reasoning_parser={fine}"], env={})


# --- refusals


def told(**more: Any) -> dict[str, Any]:
    """A conversation whose assistant message has other fields."""
    return {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]} | more]}


def result(**more: Any) -> dict[str, Any]:
    return {"messages": [*ROUND[:3], {"role": "tool", "tool_call_id": "call_1", "content": "1"} | more]}


def deep(levels: int) -> dict[str, Any]:
    """A schema that is no problem for JSON, and one for what recurs."""
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": schema}
    return schema


ALLOWED = {"type": "allowed_tools"}
NO_TOOLS = {"mode": "auto", "tools": []}
OBJECT = {"type": "json_object"}
LOOSE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": False}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "names 'f'"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "there are no tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "names no function"),
    ({"tools": TOOLS, "tool_choice": ALLOWED}, "tool_choice", "has no allowed_tools"),
    (
        {"tools": TOOLS, "tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice",
        "empty",
    ),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tools": [tool("a b")]}, "tools", "'a b' is no name of a tool"),
    ({"tools": [tool("auto")]}, "tools", "a word of tool_choice"),
    ({"tools": [tool("a"), tool("a")]}, "tools", "two tools are named 'a'"),
    ({"tools": [tool("a", parameters={"type": "array"})]}, "tools", "must be a JSON schema of type"),
    ({"tools": [tool("a", parameters=deep(200))]}, "tools", "nested more than 128 levels deep"),
    ({"tools": [tool("a", parameter={})]}, "tools[].function.parameter", "did you mean 'parameters'"),
    ({"tools": [tool("a")] * 1025}, "tools", "two tools"),
    ({"tools": [tool(f"f{i}") for i in range(1025)]}, "tools", "1025 tools are given, at most 1024"),
    (
        {"tools": TOOLS, "ebnf": 'root ::= "a"'},
        "ebnf",
        "ebnf and tools are given together, and ebnf cannot stand beside",
    ),
    (
        {"tools": TOOLS, "regex": "a", "tool_choice": "required"},
        "regex",
        "regex and tools are given together, and tool_ch",
    ),
    (
        {"tools": [tool("a", strict=True)], "response_format": LOOSE},
        "response_format",
        "strict is false in response_format, and a tool is strict",
    ),
    ({"tools": [tool("a", strict=True)], "strict": False}, "strict", "the strict of tools differ"),
    (told(tool_calls=None), "messages[1].content", "is missing"),
    (told(tool_calls=[]), "messages[1].content", "is missing"),
    (told(role="user"), "messages[1].tool_calls", "goes with role assistant, not with user"),
    (told(tool_calls=[CALL, CALL]), "messages[1].tool_calls[1].id", "no other call"),
    (
        told(tool_calls=[CALL | {"function": {"name": "f", "arguments": "[1]"}}]),
        "messages[1].tool_calls[0].function.arguments",
        "JSON object",
    ),
    (
        told(tool_calls=[CALL | {"function": {"name": "f", "arguments": '{"a": NaN}'}}]),
        "messages[1].tool_calls[0].function.arguments",
        "JSON object",
    ),
    (
        told(tool_calls=[CALL | {"function": {"name": "f", "arguments": {}}}]),
        "messages[1].tool_calls[0].function.arguments",
        "valid string",
    ),
    (told(function_call={"name": "f", "arguments": ""}), "messages[].function_call", "cannot be honoured"),
    (result(tool_call_id="call_9"), "messages[3].tool_call_id", "'call_9' is of no earlier tool call"),
    (result(tool_call_id=None), "messages[3].tool_call_id", "is missing"),
    (result(name="now"), "messages[3].name", "is 'now', the call was of 'weather'"),
    (result(content=None), "messages[3].content", "is missing"),
    ({"messages": [USER[0] | {"tool_call_id": "call_1"}]}, "messages[0].tool_call_id", "goes with role tool"),
    ({"messages": [USER[0] | {"reasoning_content": "x"}]}, "messages[0].reasoning_content", "goes with role assistant"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "does not read it"),
    ({"stream_reasoning": False}, "stream_reasoning", "cannot be honoured"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking", "is not read by"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "is not the caller's"),
    ({"think_tokens": 5}, "think_tokens", "no reasoning parser knows"),
    ({"think_tokens": 5, "thinking_budget": 6, "think_end": "x"}, "thinking_budget", "differ"),
]


MISSHAPEN: list[tuple[dict[str, Any], str]] = [
    ({"type": ["object", "null"]}, 'must be a JSON schema of type "object"'),
    ({"properties": 5}, "is no JSON schema: #/properties must be an object"),
    ({"properties": {"a": 5}}, "#/properties/a is no schema"),
    ({"properties": {"a": {"type": 5}}}, "#/properties/a/type must be a name, or a list of names"),
    ({"properties": {"a": {"type": ["string", 5]}}}, "#/properties/a/type must be a name"),
    ({"required": [5]}, "#/required must be a list of names"),
    ({"$defs": {"a": {"anyOf": [{"enum": []}]}}}, "#/$defs/a/anyOf/0/enum must be a list that is not empty"),
    ({"items": [{"items": 5}]}, "#/items/0/items is no schema"),
    ({"properties": {"a": {"minItems": "x"}}}, "#/properties/a/minItems must be a whole number, 0 or more"),
    ({"additionalProperties": {"maxLength": -1}}, "#/additionalProperties/maxLength must be a whole number"),
    ({"not": {"$ref": 5}}, "#/not/$ref must be a text"),
]


def test_parameters_that_are_no_schema(run: Run) -> None:
    """Every parser would choke on one or another of these."""

    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        for schema, words in MISSHAPEN:
            body = {"messages": USER, "tools": [tool("f", parameters=schema)], "max_tokens": 1}
            refused(await client.post("/v1/chat/completions", json=body), "tools", words)
        fine: dict[str, Any] = {"type": "object", "properties": {"type": {"const": 5}, "enum": True, "items": {}}}
        body = {"messages": USER, "tools": [tool("f", parameters=fine)], "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200

    run(test, **WIDE)


@pytest.mark.parametrize(
    ("body", "param", "words"), REFUSED, ids=[f"{i}-{param}" for i, (_, param, _) in enumerate(REFUSED)]
)
def test_refusals(run: Run, body: dict[str, Any], param: str, words: str) -> None:
    response = post(run, "/v1/chat/completions", {"messages": USER} | body, max_body=10**6, **WIDE)
    refused(response, param, words)


def test_refusals_by_configuration(run: Run) -> None:
    nobody = {"parsers": {"tools": "none"}, **WIDE}
    path = "/v1/chat/completions"
    refused(post(run, path, {"messages": USER, "tools": TOOLS}, **nobody), "tools", "without a tool parser")
    refused(post(run, path, {"messages": ROUND}, **nobody), "messages[2]", "knows no tools, and no parser")
    body = {"messages": USER, "tools": TOOLS, "separate_reasoning": False}
    refused(post(run, path, body, **WIDE, **THINKS), "separate_reasoning", "one parser reads thoughts and calls")
    weak = {"context": 8000}
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required"}
    for stream in (False, True):
        refused(post(run, path, body | {"stream": stream}, **weak), "tools", "tools cannot be honoured: no grammar")
