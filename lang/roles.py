"""Messages as text: what a role's opening and end add, by the model's own chat template.

A template is a program that renders a whole conversation; a state grows piece by piece. So the text that an opening
adds is what the conversation with one more message renders to, minus what was rendered before it; a word that no
template knows stands for the open message's content. The opening of an answer is the template's generation prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from phloem.chat import ChatTemplate
from phloem.errors import RequestError
from phloem.tokenizer import Tokenizer

Message = Mapping[str, str]
_WORD = "phloemplaceholder{}x"  # stands for a content: no white space at its ends, which templates may strip
_OPEN, _NEXT = _WORD.format("open"), _WORD.format("next")
_PLAIN = {"system": ("", "\n\n"), "user": ("User: ", "\n"), "assistant": ("Assistant:", "\n")}


class Roles:
    """The texts of one chat template; without one, a plain `User: ...` / `Assistant:...` dialogue."""

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    @property
    def plain(self) -> bool:
        """The model has no chat template."""
        return self._template is None

    def begin(self, done: Sequence[Message], role: str) -> str:
        """The text that opens a message after the messages `done`. Raises RequestError if the template refuses it."""
        if self._template is None:
            return self._plain(role)[0]
        for chat in (done, _masked(done)):  # a template may rewrite earlier messages when a new one comes
            opening = self._opening(chat, role)
            if opening is not None:
                return opening
        raise self._refusal(done, role)

    def begin_after_text(self, role: str, bos: str) -> str:
        """The text that opens a first message behind text: without the beginning-of-text token, which only a start has.

        A token that opens later messages too marks turns, and stays: SmolLM2's `<|im_start|>` is both.
        """
        text = self.begin([], role)
        if self._template is None or not bos:
            return text
        talk = [_message("user", _OPEN), _message("assistant", _NEXT), _message("user", _OPEN)]
        rendered = self._render(talk)
        later = rendered.partition(_OPEN)[2] if rendered is not None else ""
        return text if bos in later else text.removeprefix(bos)

    def end(self, done: Sequence[Message], role: str) -> str:
        """The text that ends a message; "" where the template says it with the next one's opening."""
        if self._template is None:
            return self._plain(role)[1]
        for chat in (done, _masked(done)):
            text = self._render([*chat, _message(role, _OPEN)])
            if text is not None and _OPEN in text:
                return text.partition(_OPEN)[2]
        return ""

    def _plain(self, role: str) -> tuple[str, str]:
        if role not in _PLAIN:
            raise RequestError(f"unknown role {role!r}", hint=f"one of {', '.join(_PLAIN)}", param="role")
        return _PLAIN[role]

    def _opening(self, chat: Sequence[Message], role: str) -> str | None:
        before = self._before(chat)
        if before is None:
            return None
        if role == "assistant" and chat:
            opened = self._render(chat, add_generation_prompt=True)
            if opened is not None and opened.startswith(before) and len(opened) > len(before):
                return opened[len(before) :]
        for following in ([], [_message("user", _NEXT)]):  # some show a system message with the user's first only
            text = self._render([*chat, _message(role, _OPEN), *following])
            if text is not None and _OPEN in text:
                head = text.partition(_OPEN)[0]
                return head[len(before) :] if head.startswith(before) else None
        return None

    def _before(self, chat: Sequence[Message]) -> str | None:
        """What the openings and ends of these messages have made. None if their contents cannot be found in it."""
        if not chat:
            return ""
        *earlier, last = chat
        alone = self._render([*earlier, _message(last["role"], _OPEN)])
        if alone is not None and _OPEN in alone:
            return self._render(chat)
        content = last["content"].strip()
        text = self._render([*chat, _message("user", _NEXT)])
        if text is None or not content or content not in text:
            return None
        return text[: text.rindex(content) + len(content)]

    def _render(self, chat: Sequence[Message], add_generation_prompt: bool = False) -> str | None:
        assert self._template is not None
        try:
            return self._template.render(chat, add_generation_prompt=add_generation_prompt)
        except RequestError:
            return None

    def _refusal(self, done: Sequence[Message], role: str) -> RequestError:
        assert self._template is not None
        try:
            self._template.render([*done, _message(role, _OPEN)], add_generation_prompt=False)
        except RequestError as error:
            return RequestError(f"a {role} message cannot come here: {error.message}", hint=error.hint, param="role")
        return RequestError(f"the model's chat template leaves out a {role} message here", param="role")


@lru_cache(maxsize=8)
def _compiled(source: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special))


def roles_of(tokenizer: Tokenizer) -> Roles:
    """The roles of a tokenizer's model. Raises ModelError for a template with a syntax error."""
    source = tokenizer.chat_template
    if source is None:
        return Roles(None)
    return Roles(_compiled(source, tuple(tokenizer.special_tokens.items())))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _masked(chat: Sequence[Message]) -> list[Message]:
    return [_message(message["role"], _WORD.format(number)) for number, message in enumerate(chat)]
