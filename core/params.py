"""Sampling parameters of one request: names, defaults, ranges. Validated once, at construction."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from .errors import RequestError

GREEDY_TEMPERATURE = 1e-5  # below this the temperature is taken as zero: exact argmax


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to turn logits into tokens, and when to stop.

    Filters run in this order, with drafts and without: grammar mask, `min_tokens`, `logit_bias`, repetition,
    frequency and presence penalties, custom logits processors, temperature, `top_k`, `top_p`, `min_p`.

    Raises RequestError naming the parameter when a value is out of range.
    """

    max_tokens: int | None = None  # None: up to the context or pool limit
    min_tokens: int = 0  # end-of-sequence and stop tokens are masked until then, stop strings not looked for
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0  # applies to prompt and output, as in transformers
    logit_bias: dict[int, float] | None = None
    n: int = 1
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    include_stop: bool = False  # keep the matched stop string in the text
    ignore_eos: bool = False
    logprobs: int | None = None  # k: the chosen token's and the k best; 0: the chosen token's only
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"  # "raw": the model's own; "processed": after all filters
    skip_special_tokens: bool = True
    json_schema: dict[str, Any] | str | bool | None = None
    json_object: bool = False  # any JSON object
    regex: str | None = None  # the whole output matches it
    ebnf: str | None = None  # xgrammar's dialect of GBNF
    lark: str | None = None  # llguidance's dialect of Lark
    choices: list[str] | None = None
    structural_tag: dict[str, Any] | str | None = None  # {"structures": ..., "triggers": ...} or {"format": ...}
    strict: bool = True  # False: what a backend cannot enforce of a schema is reported in `notes`, not refused
    grammar_backend: str | None = None  # one of the configured backends; None: the first that can
    think_start: str | None = None  # text that opens a thought; constraints do not hold inside one
    think_end: str | None = None  # text that ends it; what follows obeys the constraint
    think_tokens: int | None = None  # most tokens of a thought; then think_end is forced
    logits_processors: dict[str, dict[str, Any]] | None = None  # name in `samplers:` -> arguments

    def __post_init__(self) -> None:
        _check_types(self)
        _check_ranges(self)
        _check_lists(self)
        given = self.constraints
        if len(given) > 1:
            raise RequestError(
                f"{' and '.join(given)} are given together", hint="give exactly one constraint", param=given[1]
            )

    @property
    def greedy(self) -> bool:
        """True when the highest score is taken without noise."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def constraints(self) -> list[str]:
        """Names of what the output must follow: one, or none."""
        absent = {"json_object": False}
        return [name for name in _CONSTRAINTS if getattr(self, name) is not absent.get(name)]

    @property
    def penalised(self) -> bool:
        """True when the scores depend on tokens already written."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


# Of these the declared type is checked; numbers and stops have checks, and words, of their own.
_CONSTRAINTS = ("json_schema", "json_object", "regex", "ebnf", "lark", "choices", "structural_tag")
_TYPED = ("stop_token_ids", "logit_bias", *_CONSTRAINTS, "grammar_backend", "think_start", "think_end")
_TYPES = {
    f.name: f.type
    for f in msgspec.structs.fields(SamplingParams)
    if f.type is bool or f.name in (*_TYPED, "logits_processors")
}
# name -> (lowest, highest, lowest is allowed, what to say)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 10.0, False),
}
MAX_LOGPROBS = 128
MAX_N = 128
MAX_STOPS = 64
MAX_MARKER = 128  # characters of think_start and think_end


def _check_types(p: SamplingParams) -> None:
    for name, declared in _TYPES.items():
        try:
            msgspec.convert(getattr(p, name), declared)
        except msgspec.ValidationError as error:
            raise RequestError(f"{name}: {error}", param=name) from None


def _check_ranges(p: SamplingParams) -> None:
    for name, (low, high, closed) in _RANGES.items():
        value = getattr(p, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
        if value > high or value < low or (value == low and not closed):
            raise RequestError(f"{name} must be in {'[' if closed else '('}{low:g}, {high:g}], got {value}", param=name)
    for name, low_int, high_int in (
        ("max_tokens", 1, None),
        ("min_tokens", 0, None),
        ("top_k", -1, None),
        ("n", 1, MAX_N),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
        ("think_tokens", 0, None),
        ("seed", None, None),
    ):
        value = getattr(p, name)
        if value is None and name not in ("min_tokens", "top_k", "n"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
        if (low_int is not None and value < low_int) or (high_int is not None and value > high_int):
            limit = f"at least {low_int}" if high_int is None else f"between {low_int} and {high_int}"
            raise RequestError(f"{name} must be {limit}, got {value}", param=name)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise RequestError(f"min_tokens {p.min_tokens} exceeds max_tokens {p.max_tokens}", param="min_tokens")
    if p.seed is not None and not -(2**63) <= p.seed < 2**64:
        raise RequestError("seed must fit in 64 bits", param="seed")
    if p.logprobs_mode not in ("raw", "processed"):
        raise RequestError(f"logprobs_mode must be raw or processed, got {p.logprobs_mode!r}", param="logprobs_mode")


def _check_lists(p: SamplingParams) -> None:
    for name in ("stop", "stop_regex"):
        values = getattr(p, name)
        if not isinstance(values, list) or not all(isinstance(s, str) for s in values):
            raise RequestError(f"{name} must be a list of strings", hint=f"{name}=[...]", param=name)
        if len(values) > MAX_STOPS:
            raise RequestError(f"{name} has {len(values)} entries, at most {MAX_STOPS} are allowed", param=name)
        if "" in values:
            raise RequestError(f"{name} must not contain an empty string", param=name)
    if not all(t >= 0 for t in p.stop_token_ids):
        raise RequestError("stop_token_ids must be non-negative integers", param="stop_token_ids")
    for token, bias in (p.logit_bias or {}).items():
        if token < 0:
            raise RequestError(f"logit_bias key {token!r} is not a token id", param="logit_bias")
        if not -100.0 <= bias <= 100.0:
            raise RequestError(f"logit_bias of token {token} must be in [-100, 100], got {bias}", param="logit_bias")
    for name in ("think_start", "think_end"):
        marker = getattr(p, name)
        if marker is not None and not marker.strip():
            raise RequestError(f"{name} must not be empty", param=name)
        if marker is not None and len(marker) > MAX_MARKER:
            raise RequestError(f"{name} has {len(marker)} characters, at most {MAX_MARKER} are allowed", param=name)
    if p.think_end is None and (p.think_start is not None or p.think_tokens is not None):
        raise RequestError("think_start and think_tokens need think_end", param="think_end")
    if p.choices is not None and not (p.choices and all(p.choices)):
        raise RequestError("choices must be a non-empty list of non-empty strings", param="choices")
