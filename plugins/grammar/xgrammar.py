"""The grammar backend xgrammar: pushdown automata with masks computed ahead, serialised between processes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from phloem.constraint import Constraint, Unenforced
from phloem.errors import RequestError
from phloem.interfaces import PluginContext

from . import _tags
from ._bits import Mask, bitmask
from ._plain_regex import plain
from ._report import Node, Support

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

if find_spec("xgrammar") is None:
    raise ImportError("xgrammar is not installed", name="xgrammar")

_WHITESPACE = 4  # most characters of whitespace at one place under `flexible`
_DEPTH = 200  # nesting beyond which a schema is refused: the library recurses
_MANY = 10_000  # of items or characters that a bound may name: rules grow with it
_MONTHS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
_YEAR = "[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3}"
_DATE = f"({_YEAR})-({_MONTHS})"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# The library takes 31 February for a date, and 01.2.3.4 for an address.
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {"ipv4": rf"({_BYTE}\.){{3}}{_BYTE}", "date": _DATE, "date-time": f"({_DATE})T{_TIME}", "time": _TIME}
_LENGTHS = frozenset({"minLength", "maxLength"})


def _more(node: Node) -> Iterator[tuple[str, str]]:
    """What the table cannot say: names that are required but nowhere declared, references by name."""
    if str(node.active.get("$ref", "#"))[:2] not in ("#", "#/"):
        yield "$ref", "xgrammar follows references by JSON pointer only"
    names = node.active.get("required") or ()
    for name in names:
        if "object" in node.types and name not in (node.schema.get("properties") or {}):
            yield "required", f"xgrammar does not require {name!r}, which `properties` does not declare"


SUPPORT = Support(
    backend="xgrammar",
    keywords=frozenset({"type", "enum", "const", "anyOf", "oneOf", "$ref", "minLength", "maxLength", "pattern"})
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "items", "prefixItems", "minItems", "maxItems"}
    | {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    formats=frozenset({*_FORMATS, "email", "uuid", "ipv6"}),
    typed=frozenset({"minLength", "maxLength", "pattern", "format", "minimum", "maximum", "minItems", "maxItems"})
    | {"exclusiveMinimum", "exclusiveMaximum", "minProperties", "maxProperties"},
    beside={
        **dict.fromkeys(("minLength", "maxLength"), frozenset({"pattern", "format"})),
        **{"pattern": _LENGTHS | {"format"}, "format": _LENGTHS | {"pattern"}},
    },
    check=_more,
)


class XGrammarOptions(BaseModel):
    """`grammar: {use: xgrammar}` has no options of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class XGrammarMatcher:
    """The state of one request. End tokens are counted here: the library's matcher never sees one."""

    def __init__(
        self, matcher: GrammarMatcher, ends: frozenset[int], end_row: Mask, text: npt.NDArray[np.bool_]
    ) -> None:
        """`end_row`: bitmask of the end tokens; `text` [vocab] bool: tokens that may be text at all."""
        self._matcher, self._ends, self._end_row, self._text = matcher, ends, end_row, text
        self._tokens = 0
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
        if self._ended or not (0 <= token < len(self._text) and self._text[token]):
            return False
        taken: bool = self._matcher.accept_token(token)
        self._tokens += taken
        return taken

    def rollback(self, tokens: int) -> None:
        """As far back as the start. Raises ValueError beyond it."""
        ends = min(tokens, self._ended)
        if tokens - ends > self._tokens:
            raise ValueError(f"cannot take back {tokens} of {self._tokens + self._ended} tokens")
        self._ended -= ends
        if tokens > ends:
            self._matcher.rollback(tokens - ends)
            self._tokens -= tokens - ends

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
        """The library's jump-forward string; nothing where the grammar may end."""
        if self._ended or self._matcher.is_completed():
            return b""
        return self._matcher.find_jump_forward_string().encode()

    def fork(self) -> XGrammarMatcher:
        """Shares the compiled grammar."""
        twin = XGrammarMatcher(self._matcher.fork(), self._ends, self._end_row, self._text)
        twin._tokens, twin._ended = self._tokens, self._ended
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
        return _tags.report(constraint, SUPPORT)

    def compile(self, constraint: Constraint) -> bytes:
        """Serialised. Raises RequestError(param=constraint.kind) with the library's message."""
        try:
            compiled = self._compiled(constraint)
        except (RuntimeError, ValueError) as error:
            text = re.sub(r"^\[[^\]]*\] \S+: ", "", str(error).strip())
            raise RequestError(f"{constraint.kind} is not valid: {text[:400]}", param=constraint.kind) from None
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
        return XGrammarMatcher(GrammarMatcher(grammar), self._ends, self._end_row, self._text)

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        """The bytes of each token; none for special ones and for rows without a token."""
        barred = self._tokenizer.special_ids | self._ends
        tokens = range(self._model.vocab_size)
        return [b"" if token in barred else self._tokenizer.token_bytes(token) for token in tokens]

    @cached_property
    def _text(self) -> npt.NDArray[np.bool_]:
        return np.array([bool(text) for text in self._vocabulary])

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
            return compiler.compile_regex(plain(value, kind))
        if kind == "ebnf":
            return compiler.compile_grammar(value)
        if kind == "choices":
            return compiler.compile_grammar("root ::= " + " | ".join(map(json.dumps, json.loads(value))))
        if kind == "structural_tag":
            tag = _with_lowered(_tags.parse(value))
            return compiler.compile_structural_tag({"type": "structural_tag", "format": tag})
        schema = {"type": "object"} if kind == "json_object" else _lowered(json.loads(value))
        layout: dict[str, Any] = {"any_whitespace": False, "separators": (", ", ": ")}
        if constraint.whitespace == "flexible":
            layout = {"any_whitespace": True, "max_whitespace_cnt": _WHITESPACE}
        return compiler.compile_json_schema(json.dumps(schema), strict_mode=kind == "json_schema", **layout)


def _with_lowered(tag: Any) -> Any:
    if isinstance(tag, list):
        return [_with_lowered(item) for item in tag]
    if not isinstance(tag, Mapping):
        return tag
    return {key: _lowered(item) if key == "json_schema" else _with_lowered(item) for key, item in tag.items()}


def _lowered(schema: Any, depth: int = 0) -> Any:
    """The schema in words that the library reads as they are meant: patterns rewritten, dates with months' lengths.

    Raises RequestError for bounds and nesting that would cost more than one request may.
    """
    if depth > _DEPTH:
        raise RequestError(f"json_schema is nested deeper than {_DEPTH}", param="json_schema")
    if isinstance(schema, list):
        return [_lowered(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    for bound in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"):
        if isinstance(schema.get(bound), int) and schema[bound] > _MANY:
            raise RequestError(f"{bound} {schema[bound]} exceeds {_MANY}", param="json_schema")
    kept = {
        key: value if key in ("enum", "const", "default") else _lowered(value, depth + 1)
        for key, value in schema.items()
    }
    if isinstance(kept.get("pattern"), str):
        kept["pattern"] = f"^{plain(kept['pattern'], 'json_schema', 'pattern: ', in_json=True)}$"
    elif kept.get("format") in _FORMATS:
        pattern = f"^(?:{_FORMATS[kept.pop('format')]})$"
        kept["pattern"] = f"^{plain(pattern, 'json_schema', in_json=True)}$"
    if isinstance(kept.get("enum"), list) and "type" in kept:
        del kept["type"]  # the walk has judged it
    return kept
