"""The drafters `ngram` and `suffix`, and what they remember: matches, trees, what others learn, what is forgotten."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from phloem.drafts import Draft
from phloem.interfaces import DraftContext, PluginContext
from phloem.params import SamplingParams
from phloem.plugins.spec._automaton import ROOT, Automaton
from phloem.plugins.spec._contexts import Contexts
from phloem.plugins.spec._lookup import occurrences
from phloem.plugins.spec._shared import Generations, Shared
from phloem.plugins.spec.ngram import NgramDrafter
from phloem.plugins.spec.suffix import SuffixDrafter
from phloem.request import Namespace
from phloem.testing.plugin import TOY_SPEC

BOTH = pytest.mark.parametrize("kind", [NgramDrafter, SuffixDrafter])


def made(kind: Any, **options: Any) -> Any:
    return kind(kind.Options(**options), PluginContext("spec", "text", model=TOY_SPEC))


def ask(
    drafter: Any, text: Sequence[int], budget: int = 16, *, call: str = "a/0", salt: str | None = None, chain: int = 0
) -> Draft | None:
    context = DraftContext(call, array("i", text), 1, Namespace(salt), None, SamplingParams(), chain)
    draft: Draft | None = drafter.propose(context, budget)
    return draft


def chain_of(draft: Draft | None) -> list[int]:
    """The tokens of a draft's likeliest path."""
    path, at = list[int](), -1
    for node, parent in enumerate(draft.parents if draft else ()):
        if draft is not None and parent == at:
            path.append(draft.tokens[node])
            at = node
    return path


# --- what both do


@BOTH
def test_what_followed_before_follows_again(kind: Any) -> None:
    assert chain_of(ask(made(kind), [1, 2, 3, 4, 5, 6, 7, 2, 3]))[:2] == [4, 5]


@BOTH
def test_the_longest_match_counts_before_the_latest(kind: Any) -> None:
    text = [1, 2, 3, 10, 11, 12, 7, 2, 3, 20, 21, 22, 1, 2, 3]
    assert chain_of(ask(made(kind), text))[:3] == [10, 11, 12]


@BOTH
@pytest.mark.parametrize("text", [[1], [1, 2], [1, 2, 3, 4, 5]])
def test_new_text_has_no_draft(kind: Any, text: list[int]) -> None:
    assert ask(made(kind), text) is None


@BOTH
def test_where_continuations_differ_the_tree_branches_and_the_commoner_comes_first(kind: Any) -> None:
    text = [1, 2, 8, 20, 1, 2, 9, 21, 1, 2, 9, 22, 1, 2]
    draft = ask(made(kind, breadth=2), text)
    assert draft is not None
    roots = [token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent < 0]
    assert roots == [9, 8]
    assert draft.confidence is not None
    assert draft.confidence[0] > draft.confidence[draft.tokens.index(8)]
    alone = ask(made(kind, breadth=1), text)
    assert alone is not None
    assert alone.is_chain


@BOTH
def test_longer_matches_are_surer(kind: Any) -> None:
    def sure(length: int) -> float:
        draft = ask(made(kind), [*range(1, length + 1), 30, 31, *range(1, length + 1)])
        assert draft is not None
        assert draft.confidence is not None
        return draft.confidence[0]

    assert sure(2) < sure(4) < sure(8)


@BOTH
def test_text_of_other_requests_is_learned_in_a_namespace_and_never_beyond(kind: Any) -> None:
    drafter = made(kind)
    other = [1, 5, 6, 7, 8, 9, 10, 11, 12]
    for end in range(1, len(other) + 1):
        ask(drafter, other[:end], call="b/0", salt="x")
    drafter.forget("b/0")
    assert chain_of(ask(drafter, [2, 5, 6, 7], salt="x"))[:2] == [8, 9]
    assert ask(drafter, [2, 5, 6, 7], call="c/0", salt="y") is None
    assert ask(drafter, [2, 5, 6, 7], call="d/0") is None


@BOTH
def test_no_request_learns_of_another_without_a_memory(kind: Any) -> None:
    drafter = made(kind, memory=0)
    ask(drafter, [1, 5, 6, 7, 8, 9], call="b/0")
    drafter.forget("b/0")
    assert ask(drafter, [2, 5, 6, 7]) is None


@BOTH
def test_what_a_leader_proposes_is_not_taken_for_written(kind: Any) -> None:
    drafter = made(kind)
    text = [1, 2, 3, 4, 5, 2]
    assert chain_of(ask(drafter, [*text, 3], chain=1))[:2] == [4, 5]  # continued all the same
    ask(drafter, [*text, 9, 9, 9], chain=3)
    assert chain_of(ask(drafter, [*text, 3, 4, 5, 2, 3]))[:2] == [4, 5]
    drafter.forget("a/0")
    assert 9 not in chain_of(ask(drafter, [6, 5, 2], call="b/0"))


@BOTH
def test_budget_and_options_bound_a_draft(kind: Any) -> None:
    text = [*range(1, 20), *range(1, 10)]
    for budget, most, size in ((3, 16, 3), (16, 5, 5)):
        draft = ask(made(kind, max_tokens=most), text, budget)
        assert draft is not None
        assert len(draft) == size


@BOTH
def test_a_text_may_be_dropped_and_come_again(kind: Any) -> None:
    """A retracted request keeps its text; an id of an ended one may stand for another text."""
    drafter = made(kind)
    ask(drafter, [1, 2, 3] * 4)
    drafter.forget("a/0")
    assert chain_of(ask(drafter, [7, 8, 9, 7, 8]))[:1] == [9]


def test_options_that_cannot_be_meant() -> None:
    with pytest.raises(ValidationError, match="max_match 3 is less than min_match 4"):
        NgramDrafter.Options(min_match=4, max_match=3)
    for wrong in ({"depth": 1}, {"depth": 19}, {"breadth": 0}, {"memory": -1}):
        with pytest.raises(ValidationError):
            NgramDrafter.Options(**wrong)
    for wrong in ({"factor": 0.0}, {"factor": float("inf")}, {"own": 1}):
        with pytest.raises(ValidationError):
            SuffixDrafter.Options(**wrong)


def test_a_suffix_draft_is_as_deep_as_its_match_allows() -> None:
    text = [*range(1, 25), 30, 1, 2, 3]
    for factor, depth in ((1.0, 3), (2.0, 6), (4.0, 12)):
        draft = ask(made(SuffixDrafter, factor=factor), text)
        assert draft is not None
        assert max(draft.depths()) == depth


def test_a_long_prompt_is_read_over_several_steps() -> None:
    rng = random.Random(3)
    text = [rng.randrange(500) for _ in range(1200)]
    text += text[100:110]
    drafter = made(SuffixDrafter)
    assert [ask(drafter, text) is None for _ in range(4)] == [True, True, False, False]
    assert chain_of(ask(drafter, text))[:3] == text[110:113]


# --- what they remember


@pytest.mark.parametrize("seed", range(30))
def test_the_automaton_knows_every_string_of_its_texts_and_no_other(seed: int) -> None:
    rng, automaton = random.Random(seed), Automaton()
    texts = [[rng.randrange(3) for _ in range(rng.randint(0, 25))] for _ in range(3)]
    for number, text in enumerate(texts):
        last = ROOT
        for token in text:
            last = automaton.extend(last, token)
        if number == 0 and text:
            assert automaton.suffix(last)[1] == longest_repeat(text)
    parts = {tuple(part) for text in texts for part in slices(text)}
    for _ in range(40):
        asked = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        state = ROOT
        for token in asked:
            state = automaton.step(state, token) if state >= 0 else -1
        assert (state >= 0) == (tuple(asked) in parts)
        longest = max(n for n in range(len(asked) + 1) if tuple(asked[len(asked) - n :]) in parts)
        assert automaton.match(asked)[1] == longest
    assert len(automaton) == sum(map(len, texts))


def slices(text: list[int]) -> Iterator[list[int]]:
    return (text[i:j] for i in range(len(text) + 1) for j in range(i, len(text) + 1))


def longest_repeat(text: list[int]) -> int:
    """The longest suffix that begins somewhere else too, by trying."""
    n = len(text)
    return max(k for k in range(n) if any(text[i : i + k] == text[n - k :] for i in range(n - k)))


@pytest.mark.parametrize("seed", range(20))
def test_lookup_finds_what_trying_finds(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(4) for _ in range(rng.randint(2, 60))]
    found = occurrences(array("i", text), 1, 8)
    longest = min(8, longest_repeat(text))
    assert (found.match if found else 0) == longest
    if found:
        for at in found.at:
            assert text[at - longest : at] == text[len(text) - longest :]


def test_a_text_that_was_looked_at_can_grow() -> None:
    text = array("i", [1, 2, 1, 2])
    occurrences(text, 1, 4)
    text.append(3)


def test_contexts_follow_a_text_and_count() -> None:
    contexts, state = Contexts(4), 0
    for token in [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]:
        state = contexts.learn(state, token)
    assert contexts.find([9, 3, 1, 2]) == contexts.find([3, 1, 2])
    known = contexts.known(contexts.find([1, 2]), 2)
    assert known is not None
    assert [token for token, *_ in known.next(3)] == [3, 4]
    assert contexts.known(contexts.find([7]), 1) is None


def test_memory_is_bounded_and_what_is_in_use_stays() -> None:
    memory = Generations(lambda: Contexts(3), 400)
    for i in range(3000):
        memory.age()
        memory.young.learn(0, i)
        memory.young.learn(memory.young.learn(0, 1), 2)
        assert len(memory.young) + len(memory.old or ()) <= 410
    assert memory.number > 5
    assert memory.young.known(memory.young.find([1]), 1) is not None


def test_the_namespaces_not_used_for_longest_are_forgotten() -> None:
    shared = Shared(lambda: Contexts(3), 100)
    first = shared.of(Namespace("0"))
    second = shared.of(Namespace("1"))
    for i in range(2, 65):
        shared.of(Namespace(str(i)))
        assert shared.of(Namespace("1")) is second
    assert shared.of(Namespace("0")) is not first
    assert shared.of(Namespace("1")) is second
