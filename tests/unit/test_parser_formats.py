"""What each format reads: its documented forms, and the ways in which models get them wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phloem.errors import RequestError
from phloem.interfaces import PluginContext, Tool
from phloem.registry import Registry
from phloem.testing.parser import read

TOOLS = (Tool("f", "Does it.", {"type": "object", "properties": {"a": {"type": "integer"}}}), Tool("g"))
CALL = '{"name": "f", "arguments": {"a": 1}}'
LLAMA = CALL.replace("arguments", "parameters")
F = ["call:f", 'arguments:{"a": 1}']
G = ["call:g", "arguments:{}"]
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def parser(name: str, **options: Any) -> Any:
    """A built-in parser by its name in the configuration."""
    cls = Registry().load("parser", name)
    return cls(cls.Options(**options), PluginContext("parser", name))


def shown(name: str, text: str, prompt: str = "", tools: tuple[Tool, ...] = TOOLS, **options: Any) -> list[str]:
    """What is read of an answer that comes a character at a time: kind and text."""
    return [f"{p.kind}:{p.text}" for p in read(parser(name, **options), list(text), tools, prompt)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f"Sure.\n<tool_call>\n{CALL}\n</tool_call>", ["content:Sure.\n", *F]),
        (f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", [*F, *F]),
        (f"\n\n<tool_call>\n{CALL}\n</tool_call>\n", F),
        (f"<tool_call>\n{CALL}\n</tool_call>\n\nDone. ", [*F, "content:\n\nDone. "]),
        (f"<tool_call>\n{CALL}", F),
        (f"<tool_call>\n{CALL[:-1]}\n</tool_call> x", [*F, "content: x"]),
        (f"<tool_call>\n{CALL}<tool_call>\n{CALL}", [*F, *F]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', F),
        ('<tool_call>{"id": 7, "name": "f", "x": ["}"], "arguments": {"a": 1}, "y": null}</tool_call>', F),
        ('<tool_call>{"name": "g"}</tool_call>', G),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}, "name": "g"}</tool_call>', F),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', ["call:unknown", "arguments:{}"]),
        ('<tool_call>{"name": "\\u0066", "arguments": {"a": 1}}</tool_call>', F),
        # passed on verbatim: spaces, digits, escapes, types
        (
            '<tool_call>{"name":"f","arguments": {"a" :1.50, "b":"1"} }</tool_call>',
            [F[0], 'arguments:{"a" :1.50, "b":"1"}'],
        ),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [F[0], 'arguments:"{\\"a\\": 1}"']),
        ('<tool_call>{"name":"f","arguments":null}</tool_call>', [F[0], "arguments:null"]),
        (
            '<tool_call>{"name":"f","arguments":{"a":"</tool_call><think>"}}</tool_call>',
            [F[0], 'arguments:{"a":"</tool_call><think>"}'],
        ),
        # no calls: content, as it stands
        ('<tool_call>{"name": null, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "\\x", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', None),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", None),
        ('<tool_call>{"name": "f", "argu', None),
        ('<tool_call>{"name": "f", "arguments": }</tool_call>', None),
        ("<tool_call>[]</tool_call> <tool_call", None),
        # broken off, and broken
        ('<tool_call>{"name": "f", "arguments": {"a": "x', [F[0], 'arguments:{"a": "x']),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x', F),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>!', [F[0], 'arguments:{"a": 1', "content:!"]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>', [*F, "content:, oops}</tool_call>"]),
        (f"<tool_call>oops<tool_call>{CALL}</tool_call>", ["content:<tool_call>oops", *F]),
    ],
)
def test_hermes(text: str, pieces: list[str] | None) -> None:
    assert shown("hermes", text) == ([f"content:{text}"] if pieces is None else pieces)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (LLAMA, F),
        (f"<|python_tag|>{LLAMA}", F),
        (f"{LLAMA}; {LLAMA};\n{LLAMA}", [*F, *F, *F]),
        (f"{LLAMA};", F),
        (f"{LLAMA}; then", [*F, "content:; then"]),
        (f'Ok {{"type": "function", {LLAMA[1:]} bye', ["content:Ok ", *F, "content: bye"]),
        (CALL, F),
        ('{"name": "f"}', None),
        ('{"name": "Bob", "age": 3, "parameters": {}}', None),
        ('{"a": {"name": "f", "b": 1}}', None),
    ],
)
def test_llama3(text: str, pieces: list[str] | None) -> None:
    assert shown("llama3", text) == ([f"content:{text}"] if pieces is None else pieces)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('Ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', ["content:Ok", *F, *G]),
        (f"[TOOL_CALLS] [{CALL}, {CALL}]", [*F, *F]),
        (f'[TOOL_CALLS][{CALL[:-1]}, "id": "bbc5b7ede"}}]', F),
        ('[TOOL_CALLS]f[CALL_ID]bbc5b7ede[ARGS]{"a": 1}', F),
        ('[TOOL_CALLS]f{"a": 1}', F),
        (f"[TOOL_CALLS] [{CALL}, 5]", [*F, "content:, 5]"]),
        ("[TOOL_CALLS] 5", None),
        ('[THINK]Hm.[/THINK][TOOL_CALLS]f[ARGS]{"a": 1}', ["reasoning:Hm.", *F]),
    ],
)
def test_mistral(text: str, pieces: list[str] | None) -> None:
    assert shown("mistral", text) == ([f"content:{text}"] if pieces is None else pieces)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f'{BEGIN}f{SEP}{{"a": 1}}{END}{BEGIN}g{SEP}{{}}{END}<｜tool▁calls▁end｜>', [*F, *G]),
        (
            f'{BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n```{END}\n{BEGIN}function{SEP}g\n```json\n{{}}\n```{END}',
            [*F, *G],
        ),
        (f"{BEGIN}function{SEP}{{}}{END}<｜tool▁calls▁end｜>", ["call:function", "arguments:{}"]),
        (f'{BEGIN}f{SEP}{{"a": 1}}{END} x', [*F, "content: x"]),
        (f'{BEGIN}f{SEP}{{"a": {END}<｜tool▁calls▁end｜>', [F[0], 'arguments:{"a": ']),
        (f"{BEGIN}f{SEP}[1]{END}", None),
    ],
)
def test_deepseek(text: str, pieces: list[str] | None) -> None:
    text = f"<｜tool▁calls▁begin｜>{text}"
    assert shown("deepseek", text) == ([f"content:{text}"] if pieces is None else pieces)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<start_function_call>call:f{a:1}<end_function_call><start_function_response>", F),
        ("<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|><|tool_response>", [*F, *G]),
        (
            '<start_function_call>call:f{s:<escape>a{"},\n\\<escape>}<end_function_call>',
            ["call:f", r'arguments:{"s": "a{\"},\n\\"}'],
        ),
        (
            '<|tool_call>call:f{a:[1,{b:true,<|"|>c d<|"|>:None}],e:1.50}<tool_call|>',
            ["call:f", 'arguments:{"a": [1, {"b": true, "c d": null}], "e": 1.50}'],
        ),
        (
            "<start_function_call>call:f{unit:two words}<end_function_call>",
            ["call:f", 'arguments:{"unit": "two words"}'],
        ),
        ("<start_function_call>call:f{a:<escape>x", ["call:f", 'arguments:{"a": "x']),
        ("<start_function_call>call f", None),
        ("<|channel>thought\nHm.\n<channel|>Yes.", ["reasoning:Hm.", "content:Yes."]),
    ],
)
def test_gemma(text: str, pieces: list[str] | None) -> None:
    assert shown("gemma", text) == ([f"content:{text}"] if pieces is None else pieces)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f"[{CALL}, {CALL}]", [*F, *F]),
        (f"{CALL}\n{CALL}\n", [*F, *F]),
        (f"Sure: {CALL}. Done.", ["content:Sure: ", *F, "content:. Done."]),
        (f"[{CALL},", F),
        ('{"name": "f"}', None),
        ('{"name": "Bob", "arguments about": {}}', None),
        ('A set {1, 2}, a list [3], {"name": 4}', None),
    ],
)
def test_generic(text: str, pieces: list[str] | None) -> None:
    assert shown("generic", text) == ([f"content:{text}"] if pieces is None else pieces)


HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (HARMONY_CALL, F),
        (HARMONY_CALL.removesuffix("<|call|>"), F),
        (f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}", ["reasoning:Hm.", *F]),
        ("<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant" + HARMONY_CALL, ["content:Plan.", *F]),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', F),
        ('<|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": 1}', F),
        ("<|channel|>commentary to=functions.g<|message|><|call|>", G),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", ["call:python", "arguments:print(1)"]),
        ("<|channel|>final<|message|>Yes.<|return|>", ["content:Yes."]),
        (
            "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>",
            ["reasoning:A\nB"],
        ),
        ("<|channel|>analysis<|message|>A<|end|><|start|>assistant", ["reasoning:A"]),
        ("No channel at all.", None),
        ("<|channel|>commentary to=functions.f", None),
        ("<|channel|>two words<|message|>x", None),
    ],
)
def test_harmony(text: str, pieces: list[str] | None) -> None:
    assert shown("harmony", text) == ([f"content:{text}"] if pieces is None else pieces)


def test_harmony_in_a_thought_that_the_prompt_opened() -> None:
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    text = "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert shown("harmony", text, prompt) == ["reasoning:Hm.", "content:Yes."]
    assert shown("harmony", HARMONY_CALL, tools=()) == ["content:" + HARMONY_CALL.removesuffix("<|call|>")]


@pytest.mark.parametrize("name", ["hermes", "deepseek", "think"])
def test_thoughts(name: str) -> None:
    """what-breaks 37: the mark that closes a thought is missing, or the one that opens it is in the prompt."""
    assert shown(name, "<think>\nHm.\n</think>\n\nYes.") == ["reasoning:Hm.", "content:Yes."]
    assert shown(name, "Hm.</think>Yes.", "<|assistant|><think>\n") == ["reasoning:Hm.", "content:Yes."]
    assert shown(name, "<think>Hm.</think>Yes.", "<|assistant|><think>\n") == ["reasoning:Hm.", "content:Yes."]
    assert shown(name, "Hm.\n", "<|assistant|><think>") == ["reasoning:Hm.\n"]
    assert shown(name, "Hm.</think>Yes.", opened=True) == ["reasoning:Hm.", "content:Yes."]
    assert shown(name, "Yes.", "What is <think>?<|assistant|>") == ["content:Yes."]
    assert shown(name, "Yes.", "<|assistant|><think>\n\n</think>\n\n") == ["content:Yes."]
    assert shown(name, "<think></think>") == []
    for text in ("No.</think>Yes.", "See <think>this</think>.", "<thin"):
        assert shown(name, text) == [f"content:{text}"]


def test_calls_within_a_thought_are_none() -> None:
    call = f"<tool_call>{CALL}</tool_call>"
    assert shown("hermes", f"<think>{call}</think>{call}") == [f"reasoning:{call}", *F]


def test_plain_calls_with_strict_tools_are_those_that_the_constraint_sees() -> None:
    """Where no marker can trigger the constraint, other spellings were not constrained: they are no calls."""
    strict = (Tool("f", parameters=TOOLS[0].parameters, strict=True), Tool("g"))
    assert shown("generic", CALL, tools=strict) == F
    assert shown("generic", CALL.replace("{", "{ ", 1), tools=strict) == ["content:" + CALL.replace("{", "{ ", 1)]
    assert shown("pythonic", "[f(a=1)]", tools=strict) == F
    assert shown("pythonic", "[ f(a=1)]", tools=strict) == ["content:[ f(a=1)]"]
    assert shown("hermes", f"<tool_call>{CALL}", tools=strict) == F


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "\n"),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}', "; "),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', ""),
        ("gemma", "<start_function_call>call:f{a:1}<end_function_call>", ""),
        ("generic", CALL, "\n"),
    ],
)
def test_earlier_calls_are_written_as_the_model_would(name: str, first: str, second: str) -> None:
    calls = [("f", '{"a": 1}')]
    assert parser(name).call_text(calls) == first
    assert parser(name).call_text(calls * 2) == first + second + first


def test_other_notations_keep_the_digits_of_earlier_calls() -> None:
    arguments = '{"a": 1.50, "b": 1e400, "c": [true, null, {"d": "x\\"é"}], "e": 12345678901234567890}'
    assert parser("pythonic").call_text([("f", arguments)]) == (
        '[f(a=1.50, b=1e400, c=[true, null, {"d": "x\\"é"}], e=12345678901234567890)]'
    )
    assert parser("gemma").call_text([("f", arguments)]) == (
        '<start_function_call>call:f{a:1.50,b:1e400,c:[true,null,{d:<escape>x"é<escape>}],e:12345678901234567890}'
        "<end_function_call>"
    )


@pytest.mark.parametrize("name", ["pythonic", "gemma"])
@pytest.mark.parametrize("arguments", ["[1]", "{", "null", "x"])
def test_earlier_arguments_must_be_an_object_to_be_rewritten(name: str, arguments: str) -> None:
    with pytest.raises(RequestError, match="the arguments of an earlier call of f are no JSON object") as error:
        parser(name).call_text([("f", arguments)])
    assert error.value.param == "messages"


def test_the_parser_of_thoughts_refuses_tools() -> None:
    think = parser("think")
    assert (think.constraint((), "auto", True), think.instructions((), True), think.call_text([])) == (None, "", "")
    for ask in (
        lambda: think.constraint(TOOLS, "required", True),
        lambda: think.instructions(TOOLS, True),
        lambda: think.call_text([("f", "{}")]),
    ):
        with pytest.raises(RequestError, match="the parser think reads no tool calls") as error:
            ask()
        assert error.value.param == "tools"


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "deepseek", "pythonic", "generic"])
def test_instructions_show_the_form_and_the_schemas(name: str) -> None:
    one = parser(name)
    text, lone = one.instructions(TOOLS, True), one.instructions(TOOLS, False)
    for line in text.splitlines():
        if line.startswith('{"type": "function"'):
            assert json.loads(line)["function"]["name"] in ("f", "g")
    assert text.count('{"type": "function"') == 2
    assert "Does it." in text
    assert len(lone) < len(text), "one call at a time is less to say"
    assert one.format.forms[0].marker in text


TEMPLATES = {
    "hermes": "{{ tools }}<tools></tools><tool_call>\\n<think>",
    "llama3": '<|start_header_id|>{{ tools }}{"name": function name, "parameters": dictionary}',
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]",
    "deepseek": "<｜Assistant｜><think>{{ tools }}",
    "gemma": "{{ tools }}<start_function_call>call:",
    "pythonic": "<|start_header_id|>{{ tools }} a python list of the calls [func_name1(params_name1=params_value1)]",
    "harmony": "<|start|>{{ tools }}<|channel|>final<|message|>",
    "generic": "{% for message in messages %}<|im_start|>{{ message['role'] }}{% endfor %}",
    "think": "{{ messages }}<think>\\n</think>",
}
OTHERS = [
    "{{ tools }}<tool_call>\n<function=name>\n<parameter=x>",
    "{{ tools }}<tool_call>name<arg_key>",
    "<｜Assistant｜>{{ tools }}<｜DSML｜function_calls>",
]


def test_templates_are_of_one_format() -> None:
    for name, template in TEMPLATES.items():
        assert [other for other in TEMPLATES if type(parser(other)).matches(template)] == [name]
    for template in OTHERS:
        assert [name for name in TEMPLATES if type(parser(name)).matches(template)] == []
