"""The grammar backend llguidance: an Earley parser over lazily built automata, cheap to compile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

from phloem.constraint import Constraint, Unenforced
from phloem.errors import PluginError, RequestError
from phloem.interfaces import PluginContext
from phloem.model_spec import ModelSpec

from . import _lark, _tags, _tags_lark
from ._ahead import Ahead
from ._bits import Mask, bitmask
from ._json_lark import SUPPORT

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from phloem.tokenizer import Tokenizer

if find_spec("llguidance") is None:
    raise ImportError("llguidance is not installed", name="llguidance")

_EXCERPT = re.compile(
    r"\n\s*\d+ \|.*|<non-verbose/>|\bat 2\(\d+\): |failed to compile JSON schema: |<backtrace>.*", re.S
)


class LLGuidanceOptions(BaseModel):
    """`grammar: {use: llguidance}` has no options of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LLGuidanceMatcher:
    """The state of one request. The library's matcher never sees an end token where the grammar may end."""

    def __init__(
        self, start: LLMatcher, ends: frozenset[int], end_row: Mask, lengths: Sequence[int], kind: str
    ) -> None:
        """`start` is shared by forks and never advanced; `end_row`: bitmask of the end tokens; `kind`: for errors.

        `lengths` [vocab]: bytes of each token, 0 of special ones.
        """
        self._start, self._ends, self._end_row, self._kind = start, ends, end_row, kind
        self._matcher = start.deep_copy()
        self._tokens: list[int] = []  # what the library's matcher took
        self._ahead = Ahead(lengths)  # over the same tokens
        self._ended = 0  # end tokens after them

    def fill(self, row: Mask) -> None:
        """The mask of the next token, written into `row` by the library: 20 us typically, milliseconds in free text."""
        if self._ended:
            row[:] = self._end_row
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error() and self._matcher.get_error().startswith("NoExtensionBias"):
            row[:] = 0  # no token of this vocabulary fits, which the library takes for an error that it never leaves
            self._matcher = self._start.deep_copy()
            self._matcher.consume_tokens(self._tokens)
        self._check()

    def accept(self, token: int) -> bool:
        """Advance by one token; False, and nothing changed, where the mask has no bit for it."""
        if token in self._ends and (self._ended or self._matcher.is_accepting()):
            self._ended += 1
            return True
        if self._ended or not 0 <= token < 32 * len(self._end_row):
            return False
        taken = self._matcher.try_consume_tokens([token])
        self._check()
        if taken:
            self._tokens.append(token)
            self._ahead.accept(token)
        return taken == 1

    def rollback(self, tokens: int) -> None:
        """As far back as the start. Raises ValueError beyond it."""
        ends = min(tokens, self._ended)
        kept = len(self._tokens) - (tokens - ends)
        if kept < 0:
            raise ValueError(f"cannot take back {tokens} of {len(self._tokens) + self._ended} tokens")
        self._ended -= ends
        if tokens > ends:
            self._matcher.rollback(tokens - ends)
            del self._tokens[kept:]
            self._ahead.rollback(tokens - ends)
        self._check()

    def is_complete(self) -> bool:
        """The parser can take no further byte; where that was so from the start, the library has not noticed."""
        if self._ended or self._matcher.is_stopped():
            return True
        if self._tokens or not self._matcher.is_accepting():
            return False
        row = np.empty_like(self._end_row)
        self.fill(row)
        return not (row & ~self._end_row).any()

    def forced(self) -> bytes:
        """Up to the first special token, which the library writes as 0xFF and a number."""
        if self._ended:
            return b""
        if (known := self._ahead.known()) is not None:
            return known
        if self.is_complete():
            return b""
        forced = self._matcher.compute_ff_bytes()
        self._check()
        return self._ahead.found(forced.partition(b"\xff")[0])

    def fork(self) -> LLGuidanceMatcher:
        """A copy of the parser's rows and of the automaton's states built so far."""
        twin = object.__new__(LLGuidanceMatcher)
        twin._start, twin._ends, twin._end_row, twin._kind = self._start, self._ends, self._end_row, self._kind
        twin._matcher, twin._tokens, twin._ended = self._matcher.deep_copy(), list(self._tokens), self._ended
        twin._ahead = self._ahead.fork()
        return twin

    def _check(self) -> None:
        """The library keeps errors to itself and then allows the end only."""
        if self._matcher.is_error():
            raise refusal(self._kind, self._matcher.get_error())


class LLGuidance:
    """Kind `grammar`. Enforces what it takes and refuses the rest, but for the cases in `unenforced`."""

    api = 1
    Options = LLGuidanceOptions
    capabilities = frozenset({"json_schema", "json_object", "regex", "lark", "choices", "structural_tag"})

    def __init__(self, options: LLGuidanceOptions, context: PluginContext) -> None:
        """Builds the library's tokenizer: a trie of the vocabulary, 0.2 s for 50,000 tokens."""
        assert context.tokenizer is not None, "a grammar needs the tokenizer"
        assert context.model is not None, "a grammar needs the model's vocabulary size and end tokens"
        self._ends = frozenset(context.model.eos_token_ids)
        self._special = {context.tokenizer.token_text(token): token for token in context.tokenizer.special_ids}
        self._tokenizer = make_tokenizer(context.tokenizer, context.model)
        self._limits = parser_limits()
        self._vocabulary = context.model.vocab_size
        self._end_row = bitmask(self._ends, self._vocabulary)
        never = context.tokenizer.special_ids | self._ends
        texts = map(context.tokenizer.token_bytes, range(self._vocabulary))
        self._lengths = [0 if token in never else len(text) for token, text in enumerate(texts)]

    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        """By a table found by experiment; of schemas in a Lark grammar the library refuses what it ignores."""
        return _tags.report(constraint, SUPPORT)

    def compile(self, constraint: Constraint) -> bytes:
        """The constraint as a grammar in Lark, tried out. Raises RequestError (param=constraint.kind)."""
        if constraint.kind not in self.capabilities:
            raise RequestError(f"llguidance has no {constraint.kind}", param=constraint.kind)
        try:
            grammar = self._source(constraint).encode()
        except UnicodeEncodeError:
            raise RequestError(f"{constraint.kind} has half of a surrogate pair", param=constraint.kind) from None
        except RecursionError:
            raise RequestError(f"{constraint.kind} is nested too deeply", param=constraint.kind) from None
        matcher = self.matcher(constraint, grammar)
        row = np.zeros_like(self._end_row)
        matcher.fill(row)
        if not row.any():
            raise RequestError(f"no text satisfies this {constraint.kind}", param=constraint.kind)
        return grammar

    def matcher(self, constraint: Constraint, compiled: bytes) -> LLGuidanceMatcher:
        """Parses the grammar again, without the lock of the interpreter: a millisecond, a second for huge schemas."""
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_lark(compiled.decode())
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise refusal(constraint.kind, matcher.get_error())
        return LLGuidanceMatcher(matcher, self._ends, self._end_row, self._lengths, constraint.kind)

    def _source(self, constraint: Constraint) -> str:
        if constraint.kind == "structural_tag":
            return _tags_lark.tag_source(constraint, self._special, self._vocabulary)
        return _lark.source(constraint)


class _Vocabulary:
    """What the library's `TokenizerWrapper` reads: attributes by these names, and a call that encodes."""

    def __init__(self, tokenizer: Tokenizer, model: ModelSpec) -> None:
        self.eos_token_id, self.bos_token_id = model.eos_token_ids[0], None
        self.tokens = [tokenizer.token_bytes(token) for token in range(model.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids.union(model.eos_token_ids))
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


def make_tokenizer(tokenizer: Tokenizer, model: ModelSpec) -> LLTokenizer:
    """The library's tokenizer with exactly our bytes; special tokens and ids without a token are never text."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not model.eos_token_ids:
        raise PluginError("llguidance needs an end token, and this model names none", hint="use another backend")
    return LLTokenizer(
        TokenizerWrapper(_Vocabulary(tokenizer, model)),
        n_vocab=model.vocab_size,
        eos_token=list(model.eos_token_ids),
        slices=LLTokenizer.json_slices(),
    )


def parser_limits() -> LLParserLimits:
    """What one constraint may cost: 20 ms to build its automata, 20 ms a mask, some 100 MB of states."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=4000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def refusal(kind: str, message: str) -> RequestError:
    """The library's message without the excerpt of a source that the user may never have seen."""
    text = " ".join(_EXCERPT.sub("", message).split())
    return RequestError(f"{kind}: {text}", hint="simplify it, or use another grammar backend", param=kind)
