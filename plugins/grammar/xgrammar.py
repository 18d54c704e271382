"""The grammar backend xgrammar: pushdown automata with masks computed ahead, serialised between processes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from phloem.constraint import Constraint, Unenforced
from phloem.errors import RequestError
from phloem.interfaces import PluginContext

from . import _tags
from ._ahead import Ahead
from ._bits import Mask, bitmask
from ._ebnf import Ebnf
from ._ebnf_regex import matching
from ._schema_support import support
from ._schema_writer import written
from ._shortest import shortest
from ._width import LONGEST

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

if find_spec("xgrammar") is None:
    raise ImportError("xgrammar is not installed", name="xgrammar")


class XGrammarOptions(BaseModel):
    """`grammar: {use: xgrammar}` has no options of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class XGrammarMatcher:
    """The state of one request. End tokens are counted here: the library's matcher never sees one."""

    def __init__(self, matcher: GrammarMatcher, ends: frozenset[int], end_row: Mask, lengths: Sequence[int]) -> None:
        """`end_row`: bitmask of the end tokens; `lengths` [vocab]: bytes of each token, 0 where it is never text."""
        self._matcher, self._ends, self._end_row, self._lengths = matcher, ends, end_row, lengths
        self._ahead = Ahead(lengths)
        self._ended = 0

    def fill(self, row: Mask) -> None:
        """The library writes into `row`: some 5 us."""
        import torch

        if self._ended:
            row[:] = self._end_row
            return
        self._matcher.fill_next_token_bitmask(torch.from_numpy(row)[None], 0)

    def accept(self, token: int) -> bool:
        """Advance by one token; False, and nothing changed, where the mask has no bit for it."""
        if token in self._ends:
            if not self._ended and not self._matcher.is_completed():
                return False
            self._ended += 1
            return True
        if self._ended or not (0 <= token < len(self._lengths) and self._lengths[token]):
            return False
        if not self._matcher.accept_token(token):
            return False
        self._ahead.accept(token)
        return True

    def rollback(self, tokens: int) -> None:
        """As far back as the start. Raises ValueError beyond it."""
        ends = min(tokens, self._ended)
        if tokens - ends > len(self._ahead):
            raise ValueError(f"cannot take back {tokens} of {len(self._ahead) + self._ended} tokens")
        self._ended -= ends
        if tokens > ends:
            self._matcher.rollback(tokens - ends)
            self._ahead.rollback(tokens - ends)

    def is_complete(self) -> bool:
        """The grammar may end, and its mask allows nothing but an end token."""
        if self._ended:
            return True
        if not self._matcher.is_completed():
            return False
        row = np.empty_like(self._end_row)
        self.fill(row)
        return not (row & ~self._end_row).any()

    def forced(self) -> bytes:
        """The beginning of the library's jump-forward string; nothing where the grammar may end."""
        if self._ended:
            return b""
        if (known := self._ahead.known()) is not None:
            return known
        if self._matcher.is_completed():
            return b""
        return self._ahead.found(self._matcher.find_jump_forward_string().encode())

    def fork(self) -> XGrammarMatcher:
        """Shares the compiled grammar."""
        twin = XGrammarMatcher(self._matcher.fork(), self._ends, self._end_row, self._lengths)
        twin._ahead, twin._ended = self._ahead.fork(), self._ended
        return twin


class XGrammar:
    """Kind `grammar`, and the default. Compiled grammars travel serialised."""

    api = 1
    Options = XGrammarOptions
    capabilities = frozenset({"json_schema", "json_object", "regex", "ebnf", "choices", "structural_tag"})

    def __init__(self, options: XGrammarOptions, context: PluginContext) -> None:
        """Imports nothing: the library takes seconds, and is wanted at the first constraint."""
        assert context.tokenizer is not None, "a grammar needs the tokenizer"
        assert context.model is not None, "a grammar needs the model's vocabulary size and end tokens"
        self._tokenizer, self._model = context.tokenizer, context.model
        self._ends = frozenset(context.model.eos_token_ids)

    def load(self) -> None:
        """Import the library and give it the vocabulary. Called in a compile process, before it forks."""
        assert self._info is not None

    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        """By the table above, of every schema in the constraint."""
        return _tags.report(constraint, support(Ebnf()))

    def compile(self, constraint: Constraint) -> bytes:
        """Serialised. Raises RequestError(param=constraint.kind) with the library's message."""
        try:
            compiled = self._compiled(constraint)
        except RecursionError:
            raise RequestError(f"{constraint.kind} is nested too deeply", param=constraint.kind) from None
        except UnicodeEncodeError:
            raise RequestError(f"{constraint.kind} has half of a surrogate pair", param=constraint.kind) from None
        except (RuntimeError, ValueError) as error:
            if "bad_alloc" in str(error):
                raise  # the process knows what that means
            text = re.sub(r"^\[[^\]]*\] \S+: ", "", str(error).strip())
            raise RequestError(f"{constraint.kind} is not valid: {text[:400]}", param=constraint.kind) from None
        if (least := max(shortest(str(compiled.grammar)).values())) > LONGEST:
            problem = "no text ever ends" if least == math.inf else f"the shortest text has {least:.0f} characters"
            raise RequestError(f"{constraint.kind}: {problem} under one of its rules", param=constraint.kind)
        data = compiled.serialize_json().encode()
        matcher, row = self.matcher(constraint, data), np.zeros_like(self._end_row)
        matcher.fill(row)
        if not row.any():
            raise RequestError(f"no text satisfies this {constraint.kind}", param=constraint.kind)
        return data

    def matcher(self, constraint: Constraint, compiled: bytes) -> XGrammarMatcher:
        """Deserialises: milliseconds."""
        from xgrammar import CompiledGrammar, GrammarMatcher

        grammar = CompiledGrammar.deserialize_json(compiled.decode(), self._info)
        return XGrammarMatcher(GrammarMatcher(grammar), self._ends, self._end_row, self._lengths)

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        """The bytes of each token; none for special ones and for rows without a token."""
        barred = self._tokenizer.special_ids | self._ends
        tokens = range(self._model.vocab_size)
        return [b"" if token in barred else self._tokenizer.token_bytes(token) for token in tokens]

    @cached_property
    def _lengths(self) -> list[int]:
        return [len(text) for text in self._vocabulary]

    @cached_property
    def _end_row(self) -> Mask:
        return bitmask(self._ends, self._model.vocab_size)

    @cached_property
    def _info(self) -> TokenizerInfo:
        from xgrammar import TokenizerInfo, VocabType

        size = self._model.vocab_size
        return TokenizerInfo(self._vocabulary, VocabType.RAW, vocab_size=size, stop_token_ids=list(self._ends))

    def _compiled(self, constraint: Constraint) -> CompiledGrammar:
        from xgrammar import GrammarCompiler

        compiler = GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        kind, value = constraint.kind, constraint.value
        if kind == "regex":
            return compiler.compile_grammar(Ebnf().source(matching(value, kind)))
        if kind == "ebnf":
            return compiler.compile_grammar(value)
        if kind == "choices":
            return compiler.compile_grammar(_choices(json.loads(value)))
        if kind == "structural_tag":
            tag = _with_grammars(*_tags.parse_at(value), constraint)
            return compiler.compile_structural_tag({"type": "structural_tag", "format": tag})
        schema = {"type": "object"} if kind == "json_object" else json.loads(value)
        return compiler.compile_grammar(_source(schema, constraint))


def _source(schema: Any, constraint: Constraint, pointer: str = "#") -> str:
    """A schema as a grammar."""
    notation = Ebnf()
    return notation.source(written(schema, constraint, notation, pointer))


def _choices(texts: list[str]) -> str:
    notation = Ebnf()
    return notation.source(" | ".join(notation.literal(text) or '""' for text in texts))


def _with_grammars(tree: Any, at: str, constraint: Constraint) -> Any:
    """A checked tree of formats whose schemas and patterns are grammars of our own.

    The library's schemas within tags take any whitespace, without end, whatever the setting.
    """
    if isinstance(tree, list):
        return [_with_grammars(item, f"{at}/{i}", constraint) for i, item in enumerate(tree)]
    if not isinstance(tree, Mapping):
        return tree
    if tree.get("type") == "json_schema":
        grammar = _source(tree["json_schema"], constraint, _tags.written(f"{at}/json_schema"))
    elif tree.get("type") == "regex":
        grammar = Ebnf().source(matching(tree["pattern"], constraint.kind, f"{at}/pattern: "))
    else:
        return {key: _with_grammars(item, f"{at}/{key}", constraint) for key, item in tree.items()}
    return {"type": "grammar", "grammar": grammar}
