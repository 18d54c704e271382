"""Forced text is collected once, however long it is, and what is told of it stays true through drafts and forks."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from phloem.constraint import Constraint
from phloem.errors import RequestError
from phloem.interfaces import PluginContext
from phloem.plugins.grammar.llguidance import LLGuidance
from phloem.plugins.grammar.xgrammar import XGrammar
from phloem.testing.grammar import toy_tokenizer
from phloem.testing.plugin import TOY_SPEC

END = min(TOY_SPEC.eos_token_ids)
BACKENDS = [(XGrammar, "find_jump_forward_string"), (LLGuidance, "compute_ff_bytes")]


class Counted:
    """A library's matcher whose calls are counted."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.inner, name)


def plugin_context() -> PluginContext:
    return PluginContext("grammar", "", model=TOY_SPEC, tokenizer=toy_tokenizer())


def matcher(backend: Any, pattern: str) -> Any:
    plugin = backend(backend.Options(), plugin_context())
    constraint = Constraint(kind="regex", value=pattern)
    return plugin.matcher(constraint, plugin.compile(constraint))


def token(text: bytes) -> int:
    tokenizer = toy_tokenizer()
    return next(one for one in range(TOY_SPEC.vocab_size) if tokenizer.token_bytes(one) == text)


@pytest.mark.parametrize(("backend", "call"), BACKENDS)
def test_the_library_is_asked_once_for_a_long_text(backend: Any, call: str) -> None:
    """As a drafter goes: ask, go some tokens along, go back, and then the engine goes fewer."""
    made, a, c = matcher(backend, "(c{20}){300}[ab]a{9}"), token(b"a"), token(b"c")
    counted = made._matcher = Counted(made._matcher)
    for at in range(0, 5900, 100):
        assert made.forced() == b"c" * min(6000 - at, 4096)
        assert all(made.accept(c) for _ in range(16))
        assert made.forced()[:9] == b"c" * 9
        made.rollback(16)
        assert all(made.accept(c) for _ in range(100))
    assert counted.calls[call] == 1
    assert all(made.accept(c) for _ in range(100))
    assert made.forced() == b""
    for _ in range(2):
        assert made.accept(a)
        assert made.forced() == b"a" * 9
        made.rollback(1)


@pytest.mark.parametrize(("backend", "call"), BACKENDS)
def test_on_random_walks_it_tells_what_a_new_matcher_tells(backend: Any, call: str) -> None:
    """Accepted, taken back and forked at random; the other one has only gone where this one stands."""
    rng, pattern = random.Random(1), r"(ab|ac)(123){2}(b|cc)?(aaaa|abab)cba"
    start = matcher(backend, pattern)
    letters = [token(bytes([byte])) for byte in sorted(set(b"abc123"))]
    one, path = start.fork(), []
    for _ in range(600):
        fresh = start.fork()
        assert all(fresh.accept(one_token) for one_token in path)
        assert one.forced() == fresh.forced(), path
        if path and rng.random() < 0.35:
            back = rng.randint(1, len(path))
            one.rollback(back)
            del path[len(path) - back :]
        elif (step := next((t for t in rng.sample(letters, len(letters)) if one.accept(t)), None)) is not None:
            path.append(step)
        elif one.accept(END):
            assert one.forced() == b""
            one.rollback(1)
        if rng.random() < 0.2:
            one = one.fork()


@pytest.mark.parametrize("pattern", ["(c{1000}){1000}", "b|(c{1000}){1000}", "b(a|(c{1000}d){1000})?"])
def test_text_that_would_be_huge_is_refused_wherever_it_stands(pattern: str) -> None:
    """The first walk over it would hold up the engine for seconds, in the middle of an answer."""
    schema = Constraint(kind="json_schema", value=json.dumps({"type": "string", "pattern": f"^({pattern})$"}))
    backends: list[tuple[Any, tuple[Any, ...]]] = [(XGrammar, ("regex",)), (LLGuidance, ("regex", "json_schema"))]
    for backend, refused in backends:
        plugin = backend(backend.Options(), plugin_context())
        for kind in refused:
            constraint = schema if kind == "json_schema" else Constraint(kind="regex", value=pattern)
            with pytest.raises(RequestError, match="the shortest text") as caught:
                plugin.compile(constraint)
            assert caught.value.param == kind
    ((_, why),) = XGrammar(XGrammar.Options(), plugin_context()).unenforced(schema)
    assert "the shortest text" in why
