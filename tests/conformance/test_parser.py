"""The built-in parsers, and the fake, pass the suite that any parser can run."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from phloem.plugins.parser.deepseek import DeepSeek
from phloem.plugins.parser.gemma import Gemma
from phloem.plugins.parser.generic import Generic
from phloem.plugins.parser.harmony import Harmony
from phloem.plugins.parser.hermes import Hermes
from phloem.plugins.parser.llama3 import Llama3
from phloem.plugins.parser.mistral import Mistral
from phloem.plugins.parser.pythonic import Pythonic
from phloem.plugins.parser.think import Think
from phloem.testing import FakeParser, ParserSuite

CALL = json.dumps({"name": "get_weather", "arguments": {"city": "Oslo"}})
LLAMA = CALL.replace("arguments", "parameters")
SEP, END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V3 = f'<｜tool▁call▁begin｜>function{SEP}get_weather\n```json\n{{"city": "Oslo"}}\n```{END}'


class TestHermes(ParserSuite):
    plugin = Hermes
    templates = ("{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>\n",)
    texts = (
        f"<tool_call>{CALL}</tool_call>",
        f"<tool_call>{CALL}<tool_call>\n{CALL}</tool_call></tool_call>",
        f"<tool_call><tool_call>\n{CALL}\n",
        '<tool_call>\n{"arguments": {"city": "<tool_call>"}, "id": [1, {}], "name": "get_weather"}\n</tool_call>',
        '<tool_call>\n{"name": "clock"}\n</tool_call>',
        '<tool_call>\n{"name": "clock", "arguments": {"a": 1\n</tool_call> rest',
        '<tool_call>\n{"name": "clock", "arguments": {}, oops}\n</tool_call> rest',
        "<tool_call>\n" + '{"name": "' + "x" * 300 + '<tool_call>\n{"name": "clock"}',
        "<tool_ca<tool_call",
    )


class TestLlama3(ParserSuite):
    plugin = Llama3
    templates = ('<|start_header_id|>{{ tools }}{"name": function name, "parameters": dictionary}',)
    texts = (
        f"<|python_tag|>{LLAMA}; {LLAMA}",
        f"{LLAMA};{LLAMA} ; ",
        f"{LLAMA}; {LLAMA[:20]}",
        f'{{"type": "function", {LLAMA[1:]}',
        '{"name": "Bob"} {"name": "Bob", "age": 3} {"parameters": {}}',
    )


class TestMistral(ParserSuite):
    plugin = Mistral
    templates = ("{{ tools }}[TOOL_CALLS]",)
    texts = (
        f"[TOOL_CALLS] [{CALL}, {CALL}]",
        f'[TOOL_CALLS][{CALL[:-1]}, "id": "abc"}}]',
        f"[TOOL_CALLS] [{CALL}, 5] x",
        '[TOOL_CALLS]clock[CALL_ID]abc123[ARGS]{"a": 1}[TOOL_CALLS]clock{}',
        "[TOOL_CALLS]clock[ARGS]nothing[TOOL_CALLS][THINK]",
    )


class TestDeepSeek(ParserSuite):
    plugin = DeepSeek
    templates = ("{{ tools }}<｜tool▁calls▁begin｜>",)
    texts = (
        f"<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>",
        f"Ok <｜tool▁calls▁begin｜>{V3}{V3[:40]}",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}{{}}{END}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{SEP}{{{END}<｜tool▁calls▁end｜>",
    )


class TestGemma(ParserSuite):
    plugin = Gemma
    templates = ("{{ tools }}<start_function_call>", "{{ tools }}<|tool_call>call:")
    texts = (
        "<start_function_call>call:f{a:<escape>x<esc<escape>,b:[1,{c:None}],d:Oslo, e : -2.50}<end_function_call>",
        '<|tool_call>call:f{a:{<|"|>k<|"|>:<|"|>v\n"<|"|>},b:[]}<tool_call|><|tool_call>call:g{}<tool_call|>',
        "<start_function_call>call:f{a<end_function_call>",
    )


class TestPythonic(ParserSuite):
    plugin = Pythonic
    templates = ("{{ tools }}[func_name1(params_name1=params_value1), func_name2(params)]",)
    texts = (
        "[f(a=1_000, b='it\\'s', c=[1, .5, {'k': None}], d=True,), g()]",
        "<|python_start|>[f(a='''x''y''')]<|python_end|>",
        "[f(a=x)] [f(1)] [f(a=1+2), g()]",
        "See [f](g).\n[f(a=(1,))]\n[f(a={1: 2})]\n[f(a='\\x41\\u00e9\\N{DIGIT ONE}\\101\\q')]",
        "[f(a=1) g()]",
    )


class TestHarmony(ParserSuite):
    plugin = Harmony
    templates = ("{{ tools }}<|channel|>final<|message|>",)
    texts = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant<|channel|>commentary to=functions.clock"
        "<|constrain|>json<|message|>{}<|call|>",
        ' to=functions.clock<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "<|channel|>analysis<|message|>One.<|channel|>analysis<|message|>Two.",
        "<|channel|>oh no <|channel|>final<|message|>",
        "<|start|>assistant to=functions.clock<|message|>x",
    )


class TestGeneric(ParserSuite):
    plugin = Generic
    templates = ("{{ messages }}",)
    texts = (
        f"[{CALL}, {CALL}]",
        f"```json\n[{CALL},\n {CALL}\n]\n```",
        f"{{{CALL}}} [{CALL[:30]}",
        f"[{CALL} {CALL}]",
        '{"name": null, "arguments": {}} {"name": "f", "arguments": null} {"name": "", "arguments": {}}',
    )

    def test_templates_are_recognised(self) -> None:
        """This one is for templates that know nothing."""
        assert Generic.matches("{{ messages[0].content }}") is True
        assert Generic.matches("{{ tools }}{{ messages[0].content }}") is False


class TestThink(ParserSuite):
    plugin = Think
    templates = ("<think>\n</think>",)


class TestThinkOpened(ParserSuite):
    plugin = Think
    options: ClassVar[dict[str, Any]] = {"opened": True}

    def test_text_is_content_as_it_stands(self) -> None:
        """Here it follows a thought."""
        assert self.parser().stream(()).push("Hm.</think> x")[-1].text == "x"


class TestFakeParser(ParserSuite):
    plugin = FakeParser
    templates = ("<call>",)
    texts = ("<call>{}</call>", "<call><call>", "<call>[]</call> x <call")
