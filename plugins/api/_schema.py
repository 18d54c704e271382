"""Request bodies of the OpenAI-compatible routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ._body import Body
from ._format_schema import ResponseFormat, StructuredOutputs
from ._inert import CHAT, COMPLETIONS, Inert
from ._message_schema import Message, ToolBody, ToolChoice

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(Body):
    """`stream_options`."""

    where: ClassVar[str] = "stream_options."
    inert: ClassVar[Mapping[str, Inert]] = {
        "include_obfuscation": Inert((None, False), "no obfuscation is added to chunks"),
    }

    include_usage: bool | None = None


class Sampling(Body):
    """What both generation routes take: OpenAI's sampling parameters and phloem's own. null means the default."""

    renamed: ClassVar[Mapping[str, str]] = {
        "grammar": "ebnf or lark",
        "guided_decoding_backend": "grammar_backend",
        "guided_whitespace_pattern": "the server's option grammar.whitespace",
        "include_stop_str_in_output": "include_stop",
        "max_new_tokens": "max_tokens",
    }

    model: str | None = Field(None, description="The served model's name; may be left out.")
    max_tokens: Int | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id, as a string, to bias in [-100, 100].")
    seed: Seed | None = None
    stop: str | list[str] | None = None
    # beyond OpenAI's
    top_k: Int | None = None
    min_p: float | None = None
    min_tokens: Int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    stop_regex: str | list[str] | None = None
    include_stop: bool | None = None
    prompt_logprobs: Int | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    lark: str | None = None
    choices: list[str] | None = None
    structural_tag: dict[str, Any] | str | None = None
    strict: bool | None = None
    grammar_backend: str | None = None
    think_start: str | None = None
    think_end: str | None = None
    think_tokens: Int | None = None
    thinking_budget: Int | None = Field(None, description="Another name of think_tokens.")
    guided_json: dict[str, Any] | str | bool | None = Field(None, description="vLLM's name of json_schema.")
    guided_regex: str | None = Field(None, description="vLLM's name of regex.")
    guided_choice: list[str] | None = Field(None, description="vLLM's name of choices.")
    guided_grammar: str | None = Field(None, description="vLLM's name of ebnf.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's form of all constraints.")
    logits_processors: dict[str, dict[str, Any]] | None = None
    priority: Int | None = Field(None, description="Higher runs earlier, under policies that look at it.")
    cache_salt: str | None = Field(None, description="Requests with different salts never share cached state.")
    session: str | None = Field(None, description="A conversation whose path stays cached between its turns.")
    session_idle_s: float | None = Field(None, description="Seconds without a turn after which it is let go.")


class CompletionBody(Sampling):
    """POST /v1/completions."""

    inert: ClassVar[Mapping[str, Inert]] = COMPLETIONS

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    best_of: Int | None = Field(None, description="Only equal to n.")
    logprobs: Int | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    inert: ClassVar[Mapping[str, Inert]] = CHAT

    messages: list[Message]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="Where the chat template reads it.")
    include_reasoning: bool | None = Field(None, description="false: thoughts are left out of the answer.")
    separate_reasoning: bool | None = Field(None, description="false: thoughts stay in the content, as written.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolBody] | None = Field(None, description="Only with messages, as in a chat request.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Only with messages.")
    add_special_tokens: bool | None = Field(None, description="Only for a prompt; the template has its own.")


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
