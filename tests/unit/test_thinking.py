"""A thought before a constrained answer, over any matcher and over none: masks, budgets, cuts, and ways back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from equivalence.harness import engine

from phloem import SamplingParams
from phloem.errors import RequestError
from phloem.interfaces import Matcher, TokenizerData
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.testing.toy_grammar import ToyMatcher
from phloem.thinking import Thinking, Thought
from phloem.tokenizer import Tokenizer

# "<e>" ends texts, "</t>" is one special token, and "</", "t>" and ">a" are cut across the end of a thought.
PIECES = ["<e>", "</t>", *"abct<>/ ", "<t", "</", "t>", ">a", "ab", "bc", " <", "\n", "é"]
ID = {piece: i for i, piece in enumerate(PIECES)}
SPEC = ModelSpec("toy", len(PIECES), 4096, (LayerSpec(1, 4, 4),), eos_token_ids=(0,))


def tokenizer() -> Tokenizer:
    special = [
        {"id": i, "content": PIECES[i], "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i in range(2)
    ]
    model = {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0 - i] for i, piece in enumerate(PIECES)]}
    data = {"version": "1.0", "added_tokens": special, "decoder": {"type": "Fuse"}, "model": model}
    data |= dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return Tokenizer(TokenizerData(json.dumps(data)))


SHARED = Thinking(tokenizer(), SPEC)


def body(pattern: str = "[ab]+c") -> ToyMatcher:
    return ToyMatcher(pattern, ["", "", *PIECES[2:]], [0])


def thought(
    inner: Matcher | None, prompt: Sequence[str] = (), start: str | None = "<t>", budget: int | None = None
) -> Thought:
    params = SamplingParams(think_start=start, think_end="</t>", think_tokens=budget)
    return Thought.begin(SHARED.automaton(start, "</t>"), inner, params, [ID[piece] for piece in prompt])


def allowed(matcher: Matcher) -> set[str]:
    row = np.full(1, 0x5A5A5A5A, dtype=np.int32)
    matcher.fill(row)
    return {piece for i, piece in enumerate(PIECES) if int(row[0]) >> i & 1}


def write(matcher: Matcher, *pieces: str) -> Matcher:
    for piece in pieces:
        assert matcher.accept(ID[piece]), piece
    return matcher


def test_an_opened_thought_is_free_and_its_end_starts_the_answer() -> None:
    matcher = thought(body(), prompt=["a", "<t", ">", "\n"])
    assert allowed(matcher) == set(PIECES) - {"<e>"}
    write(matcher, "c", "é", "<", "/", "t")
    assert ">a" not in allowed(matcher)  # it would run over the end
    assert not matcher.accept(ID[">a"])
    write(matcher, ">")
    assert allowed(matcher) == {"a", "b", "ab", "bc"}
    write(matcher, "ab", "c")
    assert matcher.is_complete()


@pytest.mark.parametrize("end", [["</t>"], ["</", "t>"], ["<", "/", "t>"], ["</", "t", ">"], ["<", "</", "t>"]])
def test_the_end_is_found_however_it_is_cut(end: list[str]) -> None:
    matcher = write(thought(body(), prompt=["<t", ">"]), *end)
    assert allowed(matcher) == {"a", "b", "ab", "bc"}


def test_a_marker_alone_inside_a_thought_does_not_end_it() -> None:
    matcher = write(thought(body(), prompt=["<t", ">"]), "</", "a", "t>", "<t", ">")
    assert "é" in allowed(matcher)


def test_a_thought_that_the_prompt_closed_is_not_opened_again() -> None:
    assert allowed(thought(body(), prompt=["<t", ">", "a", "</", "t>", "\n"])) == {"a", "b", "ab", "bc"}


def test_without_a_start_the_output_begins_inside() -> None:
    assert "é" in allowed(thought(body(), start=None))
    assert allowed(thought(body(), start=None, prompt=["</t>"])) == {"a", "b", "ab", "bc"}


def test_the_output_may_think_first_or_answer_at_once() -> None:
    first = {"a", "b", "ab", "bc", "<", "<t", " ", "\n", " <"}
    assert allowed(thought(body())) == first
    assert allowed(write(thought(body()), "ab")) == {"a", "b", "ab", "bc", "c"}
    assert write(thought(body()), "bc").is_complete()
    assert allowed(write(thought(body()), "<")) == {"t", "t>"}
    assert "é" in allowed(write(thought(body()), " <", "t", ">"))


def test_white_space_before_a_thought_is_bounded() -> None:
    matcher = write(thought(body()), "\n", " ", " ")
    assert allowed(matcher) == {"<", "<t", " ", "\n", " <"}  # the answer has no white space: a thought must follow
    assert allowed(write(matcher, " ")) == {"<", "<t"}
    assert not matcher.accept(ID[" <"])


def test_an_answer_that_begins_like_a_thought_stays_possible() -> None:
    matcher = write(thought(body("<(t>)?c|<")), "<")
    assert not matcher.is_complete()  # a thought may still open
    assert allowed(matcher) == {"<e>", "c", "t", "t>"}
    assert matcher.fork().accept(ID["<e>"])
    assert "é" in allowed(write(matcher.fork(), "t>"))
    assert write(matcher, "c").is_complete()


def test_a_spent_budget_forces_the_end() -> None:
    matcher = write(thought(body(), prompt=["<t", ">"], budget=3), "a", "b", "<")
    assert (allowed(matcher), matcher.forced()) == ({"/"}, b"/t>")
    assert allowed(write(matcher, "/")) == {"t", "t>"}
    write(matcher, "t>")
    assert allowed(matcher) == {"a", "b", "ab", "bc"}
    assert allowed(thought(body(), prompt=["<t", ">"], budget=0)) == {"<", "</", "</t>"}


def test_a_budget_needs_no_constraint() -> None:
    matcher = write(thought(None, prompt=["<t", ">"], budget=1), "c")
    assert allowed(matcher) == {"<", "</", "</t>"}
    write(matcher, "</t>", "é", "<e>", "<e>")
    assert not matcher.is_complete()
    direct = write(thought(None, budget=1), "é")
    assert (allowed(direct), direct.forced(), direct.is_complete()) == (set(PIECES), b"", False)


def test_what_the_answer_forces_is_told_with_and_without_a_thought() -> None:
    assert write(thought(body("abca")), "a").forced() == b"bca"
    assert write(thought(body("abca")), "<t", ">", "é", "</t>").forced() == b"abca"
    assert write(thought(body("abca")), "<t").forced() == b">"
    assert thought(body("abca")).forced() == b""


@pytest.mark.parametrize("seed", range(30))
def test_masks_copies_and_ways_back_agree_on_random_walks(seed: int) -> None:
    rng = random.Random(seed)
    prompt = rng.choice([[], ["<t", ">"], ["</t>"]])
    inner = rng.choice([body(), body("(<t>|ab)*c?"), body("<{1,3}"), None])
    matcher = thought(inner, prompt, budget=rng.choice([None, 0, 2, 5]))
    masks = [allowed(matcher)]
    for _ in range(25):
        assert masks[-1] == {piece for piece in PIECES if matcher.fork().accept(ID[piece])}
        if not masks[-1]:
            break
        follow = [p for p in sorted(masks[-1]) if p in "</t>" or rng.random() < 0.3] or sorted(masks[-1])
        forced, piece = matcher.forced(), rng.choice(follow)
        if piece != "<e>":
            text = piece.encode()
            assert forced.startswith(text[: len(forced)]) or text.startswith(forced)
        twin = matcher.fork()
        write(matcher, piece)
        assert allowed(twin) == masks[-1]
        masks.append(allowed(matcher))
        if rng.random() < 0.3:
            back = rng.randint(1, len(masks) - 1)
            matcher.rollback(back)
            del masks[-back:]
            assert allowed(matcher) == masks[-1]


def test_markers_are_bounded() -> None:
    with pytest.raises(RequestError, match="think_end has 200 characters, at most 128 are allowed"):
        SamplingParams(think_end="x" * 200)
    with pytest.raises(RequestError, match="think_start must not be empty"):
        SamplingParams(think_start=" ", think_end="x")
    for i in range(500):
        SHARED.automaton(None, f"</{i}>")
    assert len(SHARED._automata) <= 64


TOY = {"use": "phloem.testing.toy_grammar:ToyGrammar"}


@pytest.mark.parametrize("drafter", [None, "Wrong", "Tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_thinks_within_its_budget_and_then_answers(
    tiny_model: Callable[[str], Path], temperature: float, drafter: str | None
) -> None:
    given: dict[str, Any] = {"think_start": "<think>", "think_end": "</think>", "think_tokens": 7, "max_tokens": 60}
    params = SamplingParams(temperature=temperature, seed=4, regex="(yes|no), [0-9]{2}\\.", **given)
    free = SamplingParams(temperature=temperature, seed=4, ignore_eos=True, **given)
    sections: dict[str, Any] = {"drafter": drafter, "texts": [[]]} if drafter else {"spec": []}
    with engine(tiny_model("llama"), grammar=TOY, **sections) as running:
        prompt = running.tokenizer.encode("Say yes or no.<think>")
        bound, unbound = running.generate(prompt, params), running.generate(prompt, free)
        assert re.fullmatch("(?s).*</think>(yes|no), [0-9]{2}\\.", bound.text), bound.text
        assert bound.finish_reason == "stop"
        ids = bound.token_ids
        ended = next(n for n in range(60) if "</think>" in running.tokenizer.decode(ids[:n]))
        assert ended <= 7 + len("</think>")  # its end may take a token per character
        assert "</think>" in unbound.text
        assert len(unbound.token_ids) == 60
