"""From the body of a chat request to its call: tools, constraint, prompt, and the readers of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phloem.errors import RequestError
from phloem.interfaces import Parser, Service

from ._chat import ChatAnswer
from ._constraint import Given, as_format, given_constraints, single
from ._params import chat_params, generate_calls, new_id, thinking, usage_wanted
from ._parsers import Formats
from ._prompt import chat_prompt
from ._reader import Reader
from ._schema import ChatBody, TokenizeBody
from ._tools import Toolset, toolset

if TYPE_CHECKING:
    from phloem.tokenizer import Tokenizer

_PROMPT_END = 64  # tokens of a prompt's end, in which a template may open a thought


async def chat_answer(body: ChatBody, service: Service, formats: Formats) -> tuple[ChatAnswer, Given | None]:
    """An answer that can be asked for, and what it must follow. Raises RequestError for what cannot be honoured."""
    tokenizer, request_id = service.tokenizer, new_id("chatcmpl")
    offered = toolset(body.tools, body.tool_choice, body.parallel_tool_calls)
    given = _must_follow(body, offered, formats)
    thoughts, calls = formats.reads(offered, separate=body.separate_reasoning is not False)
    raw = formats.raw(thoughts, calls)
    more: dict[str, Any] = thinking(body, given, formats.think) | ({"skip_special_tokens": False} if raw else {})
    params = chat_params(body, given, **more)
    prompt = await template_prompt(body, offered, formats, tokenizer)
    ending = tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
    shown, strip = body.include_reasoning is not False, raw and body.skip_special_tokens is not False

    def reader() -> Reader:
        return formats.reader(thoughts, calls, offered, ending, reasoning=shown, strip=strip)

    (call,) = generate_calls([request_id], [prompt], params, body, service.info)
    answer = ChatAnswer(
        id=request_id,
        service=service,
        call=call,
        reader=reader,
        reasoning=shown and thoughts is not None,
        tools=bool(offered.tools),
        include_usage=usage_wanted(body),
        noted=list if given is None else given.said,
    )
    return answer, given


def _must_follow(body: ChatBody, offered: Toolset, formats: Formats) -> Given | None:
    """The one thing that an answer must follow: what the body says, or the form of tool calls."""
    given = single(given_constraints(body))
    if not offered.tools:
        return given
    if formats.tools is None:
        raise _no_parser()
    if given is not None and offered.choice == "auto":
        return _content_or_calls(given, offered, formats.tools, body.strict)
    if given is not None and given.name != "response_format":  # which speaks of content, and calls have none
        raise RequestError(
            f"{given.name} and tools are given together, and tool_choice asks for a call",
            hint="leave one out, or give tool_choice auto (content follows it, or tools are called) or none",
            param=given.name,
        )
    tag = formats.tools.constraint(offered.tools, offered.choice, offered.parallel)
    if tag is None and not offered.parallel:  # of free text only a constraint makes sure that one call ends it
        exact = [replace(tool, strict=True) for tool in offered.tools]
        tag = formats.tools.constraint(exact, offered.choice, offered.parallel)
    if tag is None:
        return None
    # of tools that are not strict, what a backend cannot enforce is noted and not refused
    strict = True if offered.strict else bool(body.strict)
    return Given("tools", "structural_tag", tag, strict, tools=offered.tools)


def _content_or_calls(given: Given, offered: Toolset, parser: Parser, strict: bool | None) -> Given:
    """Content that follows what is given, or calls and nothing else, with arguments that follow their schemas."""
    calls = parser.constraint(offered.tools, "required", offered.parallel)
    content = as_format(given)
    if calls is None or content is None:
        raise RequestError(
            f"{given.name} and tools are given together, and {given.field} cannot stand beside calls",
            hint="give json_schema, json_object, regex, choices or a structural_tag with format; or tool_choice none",
            param=given.name,
        )
    wanted = {choice for choice in (given.strict, True if offered.strict else None) if choice is not None}
    if len(wanted) > 1:
        raise RequestError(f"strict is false in {given.name}, and a tool is strict", hint="give one", param=given.name)
    chosen = next(iter(wanted), strict)
    place, tree = content
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": [tree, calls["format"]]}}
    return Given(given.name, "structural_tag", tag, chosen, f"#/format/elements/0{place}", offered.tools)


def _no_parser() -> RequestError:
    return RequestError(
        "tools cannot be honoured: this server runs without a tool parser",
        hint="set server.tool_parser, or give tool_choice none",
        param="tools",
    )


async def template_prompt(
    body: ChatBody | TokenizeBody, offered: Toolset, formats: Formats, tokenizer: Tokenizer
) -> list[int]:
    """The prompt of a conversation, as token ids. Raises RequestError."""
    if offered.tools and formats.tools is None and not formats.takes_tools:
        raise _no_parser()
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is not None:
        if "reasoning_effort" not in tokenizer.chat_variables:
            raise RequestError(
                "reasoning_effort cannot be honoured: the model's chat template does not read it",
                param="reasoning_effort",
            )
        variables.setdefault("reasoning_effort", effort)
    return await chat_prompt(body.messages or [], offered, variables, formats, tokenizer)
