"""What a program writes: `gen`, `select`, roles, media. Names, order and defaults of arguments are SGLang's.

Every call makes a description and runs nothing; `state += description` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from phloem.choosing import METHODS
from phloem.errors import RequestError
from phloem.params import SamplingParams

from .ir import Appendable, Expr, ExprList, Gen, Media, RoleBegin, RoleEnd, Select, SeparateReasoning, lift, message
from .program import Program
from .sampling import dtype_name, given, typed
from .session import as_backend, session

# Arguments of `gen` that are no sampling parameters.
_OF_GEN = frozenset({"name", "dtype", "choices", "choices_method", "more"})

token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized = METHODS


@overload
def function(func: Callable[..., Any], /) -> Program: ...
@overload
def function(
    func: None = None, /, *, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Program]: ...
def function(func: Callable[..., Any] | None = None, /, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first argument is its state; plain or `async def`.

    Raises RequestError for `num_api_spec_tokens`, SGLang's guessing ahead on paid APIs.
    """
    if num_api_spec_tokens is not None:
        raise RequestError(
            "num_api_spec_tokens is not supported",
            hint="leave it out: one request per gen is made, and prefixes are shared",
            param="num_api_spec_tokens",
        )
    return Program(func) if func is not None else Program


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | type | None = None,
    **more: Any,
) -> Expr:
    """Generate text into the variable `name`; without a name the text only joins the state.

    With `choices` it is a `select`. `more` takes every other field of SamplingParams (seed, ebnf, lark, json_object,
    structural_tag, think_end, logprobs, ...). With `n` above 1 the variable is a list and the first joins the state.
    `json_schema` is a JSON text, a mapping, or a pydantic model. `dtype` (int, float, bool, str) holds the output to
    what such a value looks like; the variable stays text.
    Raises RequestError naming what is wrong, when it is called.
    """
    arguments = dict(locals())
    if choices is not None:
        _nothing_else(more, regex=regex, json_schema=json_schema, dtype=dtype)
        return select(name, choices, temperature or 0.0, choices_method or token_length_normalized)
    if choices_method is not None:
        raise RequestError("choices_method needs choices", param="choices_method")
    set_ = given(**{key: value for key, value in arguments.items() if key not in _OF_GEN}, **more)
    made = Gen(name=_name(name), given=set_, dtype=dtype_name(dtype), logprob_start=logprob_start_len)
    SamplingParams(**typed(set_, made.dtype))  # what is wrong in itself is told here, at the line that wrote it
    return made


def gen_int(
    name: str | None = None, max_tokens: int | None = None, n: int | None = None, *rest: Any, **more: Any
) -> Expr:
    """`gen` of a whole number. Further positions are SGLang's: stop, stop_token_ids, stop_regex, temperature, ..."""
    return gen(name, max_tokens, n=n, **_positions(rest), **more, dtype=int)


def gen_string(
    name: str | None = None, max_tokens: int | None = None, n: int | None = None, *rest: Any, **more: Any
) -> Expr:
    """`gen` of a text in double quotes; positions as in `gen_int`."""
    return gen(name, max_tokens, n=n, **_positions(rest), **more, dtype=str)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: str = token_length_normalized,
) -> Expr:
    """Choose one of `choices` by the model's own probabilities, all scored in one pass over the shared prefix.

    `temperature` 0 takes the best; above it one is drawn with probabilities softmax(score / temperature).
    Raises RequestError for no choices, an empty one, or an unknown method.
    """
    method = choices_method if isinstance(choices_method, str) else getattr(choices_method, "__name__", "")
    if method not in METHODS:
        raise RequestError(
            f"choices_method {choices_method!r} is unknown", hint=f"one of {', '.join(METHODS)}", param="choices_method"
        )
    if isinstance(choices, str) or not choices:
        raise RequestError("choices must be a list of texts with at least one", param="choices")
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise RequestError(
                f"choices[{i}] is {choice!r}",
                hint="a choice is a text of at least one character: an empty one has no probability of its own",
                param="choices",
            )
    if not temperature >= 0.0:
        raise RequestError(f"temperature must not be negative, got {temperature!r}", param="temperature")
    return Select(name=_name(name), choices=tuple(choices), method=method, temperature=float(temperature))


def image(expr: Any) -> Expr:
    """An image, by path. Refused when it is appended, unless the backend's model has vision."""
    return Media(what="image", source=expr)


def video(path: str, num_frames: int) -> Expr:
    """A video, by path. Refused when it is appended, unless the backend's model has vision."""
    return Media(what="video", source=path, options={"num_frames": num_frames})


def system(expr: Appendable | None = None) -> ExprList:
    """A system message."""
    return message("system", expr)


def user(expr: Appendable | None = None) -> ExprList:
    """A user's message."""
    return message("user", expr)


def assistant(expr: Appendable | None = None) -> ExprList:
    """The model's message, usually of one `gen`."""
    return message("assistant", expr)


def system_begin() -> Expr:
    """The opening of a system message."""
    return RoleBegin(role="system")


def system_end() -> Expr:
    """The end of a system message."""
    return RoleEnd(role="system")


def user_begin() -> Expr:
    """The opening of a user's message."""
    return RoleBegin(role="user")


def user_end() -> Expr:
    """The end of a user's message."""
    return RoleEnd(role="user")


def assistant_begin() -> Expr:
    """The opening of the model's message."""
    return RoleBegin(role="assistant")


def assistant_end() -> Expr:
    """The end of the model's message."""
    return RoleEnd(role="assistant")


def separate_reasoning(expr: Appendable | None = None, model_type: str | None = None) -> Expr:
    """Of what `expr` generates, the thought goes to `<name>_reasoning_content`; the answer stays.

    `model_type` is the name of a reasoning parser, or of a model family that SGLang knows; None is the `<think>`
    convention. The thought leaves the state: what follows does not see it, as chat templates have it.
    """
    inner = () if expr is None else lift(expr).parts()
    return SeparateReasoning(inner=tuple(inner), parser=model_type or "auto")


# --- where programs run


def set_default_backend(backend: Any) -> None:
    """The backend of every run that names none: one of this module's, or a phloem.Engine. None takes it back."""
    session.default_backend = None if backend is None else as_backend(backend)


def flush_cache(backend: Any = None, empty_cache: bool = True) -> bool:
    """Drop what the backend caches and does not use. False without a backend."""
    if backend is None and session.default_backend is None:
        return False
    session.wait(session.backend(backend).flush_cache())
    return True


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """What the backend tells of itself. None without a backend."""
    if backend is None and session.default_backend is None:
        return None
    return session.wait(session.backend(backend).info())


def _name(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise RequestError(f"a variable's name is a text, got {name!r}", param="name")
    return name


def _positions(rest: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of `gen` by name, from its `stop` on."""
    names = list(inspect.signature(gen).parameters)
    return dict(zip(names[names.index("stop") :], rest, strict=False))


def _nothing_else(more: Mapping[str, Any], **others: Any) -> None:
    for name, value in {**others, **more}.items():
        if value is not None:
            raise RequestError(f"{name} and choices are given together", hint="leave one out", param=name)
