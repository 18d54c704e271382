"""Request bodies of the OpenAI-compatible routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ._body import Body
from ._inert import CHAT, COMPLETIONS, Inert

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
        "guided_regex": "regex",
        "guided_json": "json_schema",
        "guided_choice": "choices",
        "guided_grammar": "grammar",
        "ebnf": "grammar",
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
    json_schema: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choices: list[str] | None = None
    logits_processors: dict[str, dict[str, Any]] | None = None
    priority: Int | None = Field(None, description="Higher runs earlier, under policies that look at it.")
    cache_salt: str | None = Field(None, description="Requests with different salts never share cached state.")


class CompletionBody(Sampling):
    """POST /v1/completions."""

    inert: ClassVar[Mapping[str, Inert]] = COMPLETIONS

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    best_of: Int | None = Field(None, description="Only equal to n.")
    logprobs: Int | None = None


class TextPart(Body):
    """One part of a message's content; only text can be served."""

    where: ClassVar[str] = "messages[].content[]."

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class Message(Body):
    """One chat message."""

    where: ClassVar[str] = "messages[]."
    inert: ClassVar[Mapping[str, Inert]] = {
        "name": Inert((None,), "not given"),
        "refusal": Inert((None,), "not given"),
        "audio": Inert((None,), "not given"),
        "annotations": Inert((None, []), "no annotations"),
        "tool_calls": Inert((None, []), "no tool calls"),
        "function_call": Inert((None,), "not given"),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None


class JsonSchemaFormat(Body):
    """`response_format.json_schema`."""

    where: ClassVar[str] = "response_format.json_schema."
    inert: ClassVar[Mapping[str, Inert]] = {
        "description": Inert(None, "a label for the caller's own records"),
        "strict": Inert((None, True, False), "the schema is always enforced"),
    }

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """`response_format`."""

    where: ClassVar[str] = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    inert: ClassVar[Mapping[str, Inert]] = CHAT

    messages: list[Message]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    response_format: ResponseFormat | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = Field(None, description="Only for a prompt; the template has its own.")


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
