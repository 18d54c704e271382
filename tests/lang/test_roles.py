"""Messages as text: rendered piece by piece, they are what the template makes of the whole conversation."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.chat import ChatTemplate
from phloem.errors import RequestError
from phloem.lang.roles import Roles

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trims contents, and begins with bos.
LLAMA3 = (
    "{% for m in messages %}{{ (bos_token if loop.first else '') }}<|start|>{{ m['role'] }}<|end|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
# Roles must alternate, a system message is shown with the user's first, and the model has a name of its own.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ (first if loop.first else '') + m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Knows no generation prompt, and refuses a system message that stands alone.
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% if messages | length < 2 %}"
    "{{ raise_exception('a user message must follow') }}{% endif %}{% set s = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}[INST] {{ (s if loop.first else '') + m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
# Drops the thoughts of earlier answers, and the generation prompt opens one.
THINKER = (
    "{% for m in messages %}{% set c = m['content'] %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}<{{ m['role'] }}>{{ c }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
TALK = [("system", "Be brief."), ("user", "Hi"), ("assistant", " Hello. "), ("user", "Bye"), ("assistant", "So long")]


def rendered(roles: Roles, talk: list[tuple[str, str]], *, open_last: bool = False) -> str:
    """The text of a conversation, marker by marker."""
    done: list[dict[str, str]] = []
    text = ""
    for number, (role, content) in enumerate(talk):
        text += roles.begin(done, role)
        if open_last and number == len(talk) - 1:
            return text
        text += content + roles.end(done, role)
        done.append({"role": role, "content": content})
    return text


def whole(template: str, talk: list[tuple[str, str]], **more: Any) -> str:
    """What the template makes of it at once."""
    messages = [{"role": role, "content": content} for role, content in talk]
    return ChatTemplate(template, SPECIAL).render(messages, **more)


@pytest.mark.parametrize("talk", [TALK, TALK[1:], TALK[:2], TALK[1:2], TALK[:3]], ids=len)
@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, MISTRAL], ids=["chatml", "llama3", "gemma", "mistral"])
def test_pieces_are_the_whole(template: str, talk: list[tuple[str, str]]) -> None:
    roles = Roles(ChatTemplate(template, SPECIAL))
    stripped = [(role, content.strip()) for role, content in talk]
    assert rendered(roles, stripped) == whole(template, stripped)
    if talk[-1][0] == "user":
        asked = [*stripped, ("assistant", "")]
        generation = whole(template, stripped, add_generation_prompt=True)
        opened = rendered(roles, asked, open_last=True)
        assert opened.startswith(generation)
        assert opened == generation or template == MISTRAL


def test_a_content_that_the_template_trims_stays_as_the_program_wrote_it() -> None:
    roles = Roles(ChatTemplate(LLAMA3, SPECIAL))
    text = rendered(roles, [("user", " Hi "), ("assistant", "\n"), ("user", "x")])
    assert text == (
        "<s><|start|>user<|end|>\n\n Hi <|eot|><|start|>assistant<|end|>\n\n\n<|eot|><|start|>user<|end|>\n\nx<|eot|>"
    )


def test_a_template_that_rewrites_earlier_answers() -> None:
    """The state keeps what was written; the markers are the template's all the same."""
    roles = Roles(ChatTemplate(THINKER, SPECIAL))
    talk = [("user", "a"), ("assistant", "hm</think>b"), ("user", "c")]
    assert rendered(roles, talk) == "<user>a<end><assistant><think>\nhm</think>b<end><user>c<end>"


def test_a_refused_role_is_an_error_with_the_templates_words() -> None:
    roles = Roles(ChatTemplate(GEMMA, SPECIAL))
    with pytest.raises(RequestError, match="roles must alternate"):
        rendered(roles, [("user", "a"), ("user", "b")])


def test_without_a_template_a_plain_dialogue() -> None:
    text = rendered(Roles(None), [("system", "Be brief."), ("user", "Hi"), ("assistant", " Hello")])
    assert text == "Be brief.\n\nUser: Hi\nAssistant: Hello\n"
    with pytest.raises(RequestError, match="unknown role 'tool'"):
        Roles(None).begin([], "tool")


def test_only_a_start_has_a_beginning_of_text() -> None:
    """Behind text a first message opens without it, unless the same token marks every turn, as SmolLM2's does."""
    assert Roles(ChatTemplate(LLAMA3, SPECIAL)).begin_after_text("user", "<s>") == "<|start|>user<|end|>\n\n"
    opening = Roles(ChatTemplate(CHATML, SPECIAL)).begin_after_text("user", "<|im_start|>")
    assert opening == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert Roles(None).begin_after_text("user", "") == "User: "
