"""Chat templates render as transformers renders them, sandboxed, and complain in terms of the request."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from phloem.chat import ChatTemplate
from phloem.errors import ModelError, RequestError

CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hi ünï 🙂\n"},
    {"role": "assistant", "content": "Hello", "name": None},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if m.role != 'system' %}\n{{ m['content'] | trim }}|\n"
    "  {% endif %}\n{% endfor %}\n",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}",
    "opening": "{{ messages[-1].content }}{% if add_generation_prompt %}<assistant>{% endif %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools | tojson(sort_keys=true) }}",
    "loops": "{% for m in messages %}{% if loop.index0 == 0 %}{% continue %}{% endif %}"
    "{{ m.role }}{% break %}{% endfor %}",
    "generation": "a{% generation %}{{ messages[1].content }}{% endgeneration %}b",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "absent": "{{ messages[2].name is defined }}{{ tools is none }}{{ documents is none }}{{ other is defined }}",
    "variables": "{{ enable_thinking }}{{ bos_token }}",
    "macro": "{%- macro say(x) -%}[{{ x }}]{%- endmacro -%}{{ say(messages[0].role) }}",
    "date": "{{ strftime_now('%Y') }}",
}
VARIABLES: dict[str, dict[str, Any]] = {
    "tojson": {"tools": TOOLS},
    "variables": {"enable_thinking": False, "bos_token": "mine"},
}


@pytest.mark.parametrize("opening", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers(name: str, opening: bool) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    variables = {"add_generation_prompt": opening} | VARIABLES.get(name, {})
    plain = [{key: value for key, value in message.items() if value is not None} for message in CHAT]
    expected, _ = render_jinja_template([plain], chat_template=TEMPLATES[name], **(special | variables))
    assert ChatTemplate(TEMPLATES[name], special).render(CHAT, **variables) == expected[0]


def test_date_is_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(CHAT) == str(datetime.now().year)


def test_the_template_refuses() -> None:
    template = ChatTemplate("{{ raise_exception('Only user and assistant roles!') }}", {})
    with pytest.raises(RequestError, match="refuses the messages: Only user and assistant roles!") as caught:
        template.render(CHAT)
    assert (caught.value.param, caught.value.status) == ("messages", 400)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' + messages[0].content }}", "cannot render the messages: TypeError"),
        ("{{ messages[9].content.strip() }}", "refuses the messages"),
        ("{{ 1 / 0 }}", "cannot render the messages: ZeroDivisionError"),
    ],
)
def test_messages_of_the_wrong_form(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": ["parts"]}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_templates_are_sandboxed(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source + "{{ none.x.y }}", {}).render(CHAT)


def test_sandbox_leaks_nothing_through_attributes() -> None:
    assert ChatTemplate("{{ raise_exception.__globals__ is defined }}", {}).render(CHAT) in ("False", "")


def test_empty_messages() -> None:
    with pytest.raises(RequestError, match="messages is empty"):
        ChatTemplate("x", {}).render([])


def test_syntax_error_is_the_models() -> None:
    with pytest.raises(ModelError, match="syntax error in line 2"):
        ChatTemplate("ok\n{% if %}", {})
