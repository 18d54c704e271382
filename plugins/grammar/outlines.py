"""The grammar backend outlines: everything is one regular expression, compiled ahead to an automaton over tokens."""

from __future__ import annotations

import json
from functools import cached_property
from importlib.util import find_spec

from pydantic import BaseModel, ConfigDict

from phloem.constraint import Constraint, Unenforced
from phloem.errors import PluginError, RequestError
from phloem.interfaces import PluginContext

from . import _tag_regex, _tags
from ._automaton import Automaton
from ._bits import Mask, bitmask
from ._index import Indexer
from ._notation import Layout, Notation
from ._regex import literal, translate
from ._schema_support import support
from ._schema_writer import written

if find_spec("outlines_core") is None:
    raise ImportError("outlines_core is not installed", name="outlines_core")

_ENDED = -1  # in place of a state: after an end token


class OutlinesOptions(BaseModel):
    """`grammar: {use: outlines}` has no options of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OutlinesMatcher:
    """The state of one request: a number per token, so that going back is dropping some, and a copy a short list."""

    def __init__(self, automaton: Automaton, ends: frozenset[int], end_row: Mask) -> None:
        """`end_row` [ceil(vocab / 32)]: bitmask of the end tokens. The automaton is shared by all forks."""
        self._automaton, self._ends, self._end_row = automaton, ends, end_row
        self._states = [0]

    def fill(self, row: Mask) -> None:
        """A copy of the remembered mask; a state's first one takes some 50 us."""
        state = self._states[-1]
        row[:] = self._end_row if state == _ENDED else self._automaton.row(state, len(row), self._end_row)

    def accept(self, token: int) -> bool:
        """One binary search."""
        state = self._states[-1]
        if token in self._ends:
            if state != _ENDED and not self._automaton.final[state]:
                return False
            self._states.append(_ENDED)
            return True
        following = None if state == _ENDED else self._automaton.next(state, token)
        if following is None:
            return False
        self._states.append(following)
        return True

    def rollback(self, tokens: int) -> None:
        """As far back as the start. Raises ValueError beyond it."""
        if tokens >= len(self._states):
            raise ValueError(f"cannot take back {tokens} of {len(self._states) - 1} tokens")
        del self._states[len(self._states) - tokens :]

    def is_complete(self) -> bool:
        """The text may end and no token may follow."""
        state = self._states[-1]
        return state == _ENDED or bool(self._automaton.final[state] and not self._automaton.count(state))

    def forced(self) -> bytes:
        """Known for every state since compiling: the automaton has the bytes beside the tokens."""
        state = self._states[-1]
        return b"" if state == _ENDED else self._automaton.forced(state)

    def fork(self) -> OutlinesMatcher:
        """Only the list of states is copied."""
        twin = OutlinesMatcher(self._automaton, self._ends, self._end_row)
        twin._states = list(self._states)
        return twin


class Outlines:
    """Kind `grammar`. Exact for what is regular; nesting without end, and what the report names, is not."""

    api = 1
    Options = OutlinesOptions
    capabilities = frozenset({"json_schema", "json_object", "regex", "choices", "structural_tag"})

    def __init__(self, options: OutlinesOptions, context: PluginContext) -> None:
        """Reads the vocabulary; raises PluginError for a model without an end token."""
        assert context.tokenizer is not None, "a grammar needs the tokenizer"
        assert context.model is not None, "a grammar needs the model's vocabulary size and end tokens"
        if not context.model.eos_token_ids:
            raise PluginError("outlines needs an end token, and this model names none", hint="use another backend")
        self._tokenizer, self._size = context.tokenizer, context.model.vocab_size
        self._ends = frozenset(context.model.eos_token_ids)
        self._end_row = bitmask(self._ends, self._size)

    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        """For schemas, those in structural tags too; see `docs/structured-outlines.md`."""
        return _tags.report(constraint, support(Notation()))

    def compile(self, constraint: Constraint) -> bytes:
        """The constraint's automaton. Raises RequestError (param=constraint.kind). Seconds, and gigabytes, at worst."""
        if constraint.kind not in self.capabilities:
            raise RequestError(f"outlines has no {constraint.kind}", param=constraint.kind)
        return self._indexer.build(self._pattern(constraint), constraint.kind).dump()

    def matcher(self, constraint: Constraint, compiled: bytes) -> OutlinesMatcher:
        """Over the compiled bytes as they are: microseconds."""
        return OutlinesMatcher(Automaton.load(compiled), self._ends, self._end_row)

    def _pattern(self, constraint: Constraint) -> str:
        """In the syntax of Rust's `regex` crate."""
        kind, value = constraint.kind, constraint.value
        if kind == "regex":
            return translate(value, kind).rust
        if kind == "choices":
            return "|".join(map(literal, json.loads(value)))
        if kind == "json_object":
            return Notation().any_object(Layout(constraint.whitespace, Notation()))
        if kind == "structural_tag":
            return _tag_regex.tag_regex(constraint, map(self._tokenizer.token_text, self._tokenizer.special_ids))
        return written(json.loads(value), constraint, Notation())

    @cached_property
    def _indexer(self) -> Indexer:
        """Special and end tokens are never text."""
        never = self._tokenizer.special_ids | self._ends
        texts = {token: self._tokenizer.token_bytes(token) for token in range(self._size) if token not in never}
        return Indexer({token: text for token, text in texts.items() if text}, self._size, min(self._ends))
