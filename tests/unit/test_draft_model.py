"""The drafter `draft`: two vocabularies, what it reads and forgets, how many passes it takes, and what it refuses."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from phloem import Engine, SamplingParams
from phloem.drafts import Draft
from phloem.draws import Dice, Draws
from phloem.errors import ConfigError, ModelError
from phloem.interfaces import DraftContext, PluginContext, TokenizerData
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.plugins.model._source import open_source
from phloem.plugins.spec._vocabulary import Vocabulary
from phloem.plugins.spec.draft import DraftDrafter
from phloem.testing.spec import draft_context
from phloem.tokenizer import Tokenizer

torch.set_num_threads(1)


# --- vocabularies


def tokenizer_of(*pieces: str) -> Tokenizer:
    made: dict[str, Any] = dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "normalizer"))
    made |= {"version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"}}
    made["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0] for piece in pieces]}
    return Tokenizer(TokenizerData(json.dumps(made)))


def test_the_same_vocabulary_is_read_as_it_is_whatever_pads_the_heads() -> None:
    from array import array

    tokens = tokenizer_of("a", "b", "c")
    text = array("i", [2, 0])
    for size in (3, 4):
        assert Vocabulary(tokens, size, tokens, 4, "small").read(text) is text
    wider = Vocabulary(tokens, 5, tokens, 4, "small")
    assert wider.read(array("i", [2, 4])).tolist() == [2, 0]  # the draft model has no row for the last
    logits = torch.arange(8.0).view(2, 4)
    assert wider.logits(logits).tolist() == [[0, 1, 2, -torch.inf, -torch.inf], [4, 5, 6, -torch.inf, -torch.inf]]
    alike = logits[:, :3].contiguous()
    assert Vocabulary(tokens, 3, tokens, 3, "small").logits(alike) is alike


def test_another_order_and_a_gap_are_mapped_by_what_tokens_spell() -> None:
    from array import array

    vocabulary = Vocabulary(tokenizer_of("a", "b", "c", "d"), 4, tokenizer_of("x", "c", "a", "b"), 4, "small")
    assert vocabulary.read(array("i", [0, 1, 2, 3])).tolist() == [2, 3, 1, 0]  # `d` is unknown: read as the first
    assert vocabulary.read(array("i")).tolist() == []
    assert vocabulary.logits(torch.tensor([[9.0, 1.0, 2.0, 3.0]])).tolist() == [[2.0, 3.0, 1.0, -torch.inf]]


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match=r"small knows 1 of the 4 tokens of the model it is to draft for") as caught:
        Vocabulary(tokenizer_of("a", "b", "c", "d"), 4, tokenizer_of("x", "y", "a", "z"), 4, "small")
    assert caught.value.hint == "choose a smaller model of the same family"


# --- what it reads


class Watched:
    """A drafter on a tiny model, with the rows of each of its passes."""

    def __init__(self, folder: Path, *, slots: int = 1024, texts: int = 8, **options: Any) -> None:
        source = open_source(str(folder))
        spec = ModelSpec("target", 512, 1024, (LayerSpec(1, 4, 4),), eos_token_ids=source.eos_token_ids)
        context = PluginContext("spec", "draft", model=spec, tokenizer=Tokenizer(source.tokenizer()))
        self.drafter = DraftDrafter(DraftDrafter.Options(model=str(folder), **options), context)
        self.drafter.allocate(slots, texts)
        self.passes: list[list[int]] = []
        run = self.drafter._model.run

        def watched(segments: Any) -> torch.Tensor:
            segments = list(segments)
            self.passes.append([segment.count for segment in segments])
            logits = run(segments)
            return logits

        self.drafter._model.run = watched  # type: ignore[method-assign]

    def ask(self, *contexts: DraftContext, budget: int = 4) -> tuple[list[Draft | None], list[list[int]]]:
        """The drafts, and the passes they took."""
        self.passes.clear()
        drafts = self.drafter.propose_all(contexts, [budget] * len(contexts))
        self.drafter.texts.check()
        return drafts, list(self.passes)

    @property
    def usage(self) -> dict[str, int]:
        return self.drafter._model.ledger.usage([])[0]


@pytest.fixture
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


TEXT = [int(i * 7919 % 500 + 4) for i in range(40)]


def text(count: int, request_id: str = "a/0", **more: Any) -> DraftContext:
    return draft_context(TEXT[:count], 1, request_id, **more)


def drafted(draft: Draft | None) -> list[int]:
    assert draft is not None
    return list(draft.tokens)


def test_a_refused_chain_that_was_found_in_the_cache_is_let_go(folder: Path) -> None:
    watched = Watched(folder)
    watched.ask(text(40, "a/0"))
    watched.drafter.forget("a/0")  # all of it lies in the cache now
    watched.ask(text(30, "b/0", chain=10))  # a leader proposes ten tokens, which are found there
    other = [*TEXT[:20], *(500 - token for token in TEXT[20:30])]
    watched.ask(draft_context(other, 1, "b/0"))  # the target wrote something else
    request = watched.drafter.texts._texts["b/0"].request
    assert request.lease is not None
    assert request.lease.length <= 20, "it writes to slots that are the cache's"
    (alone,), _ = Watched(folder).ask(draft_context(other, 1, "c/0"))
    (again,), _ = watched.ask(draft_context(other, 1, "b/0"))
    assert drafted(again) == drafted(alone)
    (whole,), _ = watched.ask(text(39, "d/0"))
    (fresh,), _ = Watched(folder).ask(text(39, "d/0"))
    assert drafted(whole) == drafted(fresh), "what another has cached was written over"


def test_a_text_that_fills_its_context_is_given_up_for_good(folder: Path) -> None:
    """It says so, and is asked about no more; while a long prompt is read nothing comes either, and that is no end."""
    watched = Watched(folder, catch_up=64)
    watched.drafter.texts._most = 100
    long = draft_context([*TEXT, *TEXT], 1, "a/0")
    assert watched.ask(long)[0] == [None]
    assert not long.over
    assert watched.ask(long)[0] != [None]
    full = draft_context([*TEXT, *TEXT, *TEXT[:20]], 1, "a/0")
    assert watched.ask(full) == ([None], [])
    assert full.over


def test_all_requests_of_a_step_share_its_passes(folder: Path) -> None:
    """One pass a level, not one a request; what two have in common is read twice only if they come together."""
    watched = Watched(folder)
    drafts, passes = watched.ask(text(20), text(30, "b/0"), text(5, "c/0"))
    assert passes == [[5, 20, 30], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert [len(drafted(draft)) for draft in drafts] == [4, 4, 4]
    alone = [drafted(Watched(folder).ask(text(n))[0][0]) for n in (20, 30, 5)]
    assert [drafted(draft) for draft in drafts] == alone


def test_what_was_accepted_is_not_read_again_and_what_was_refused_is(folder: Path) -> None:
    watched = Watched(folder, max_tokens=3)
    (first,), _ = watched.ask(text(20))
    chain = drafted(first)
    whole = draft_context([*TEXT[:20], *chain, 9], 1, "a/0")
    assert watched.ask(whole)[1][0] == [2]  # the last drafted one was never read
    part = draft_context([*TEXT[:20], *chain, 9, 8], 1, "a/0")
    assert watched.ask(part)[1][0] == [1]
    again = Watched(folder, max_tokens=3)
    again.ask(text(20))
    assert again.ask(draft_context([*TEXT[:20], chain[0], (chain[1] + 1) % 500, 7], 1, "a/0"))[1][0] == [2]
    expected = Watched(folder, max_tokens=3).ask(whole)[0][0]
    assert drafted(watched.ask(draft_context([*TEXT[:20], *chain, 9], 1, "other/0"))[0][0]) == drafted(expected)


def test_a_leader_s_chain_is_read_and_dropped_again(folder: Path) -> None:
    watched = Watched(folder, max_tokens=1)
    watched.ask(draft_context([*TEXT[:20], 5, 6], 1, "a/0", chain=2))
    (draft,), passes = watched.ask(text(21))
    assert passes == [[1]]
    assert drafted(draft) == drafted(Watched(folder, max_tokens=1).ask(text(21))[0][0])
    watched.ask(draft_context([*TEXT[:21], 5, 6], 1, "a/0", chain=2))
    watched.drafter.forget("a/0")
    assert watched.usage["evictable"] == 21  # nothing that was not written


def test_a_long_prompt_is_read_over_several_steps_and_delays_no_other_text(folder: Path) -> None:
    watched = Watched(folder, catch_up=64)
    long = [*TEXT, *TEXT, *TEXT, *TEXT]
    seen = [watched.ask(draft_context(long, 1, "a/0"), text(3, "b/0", salt="b")) for _ in range(3)]
    assert [passes[0] for _, passes in seen] == [[3, 61], [1, 63], [1, 36]]
    assert [draft is None for (draft, _), _ in seen] == [True, True, False]
    assert all(draft is not None for (_, draft), _ in seen)


def test_other_requests_find_what_was_read_in_their_namespace_only(folder: Path) -> None:
    watched = Watched(folder, max_tokens=2)
    watched.ask(text(30))
    assert watched.ask(text(30, "b/0"))[1][0] == [1]
    assert watched.ask(text(35, "c/0"))[1][0] == [6]
    assert watched.ask(text(30, "d/0", salt="other"))[1][0] == [30]
    watched.drafter.forget("a/0")
    assert watched.ask(text(30, "e/0"))[1][0] == [1]


def test_nothing_drafted_is_published(folder: Path) -> None:
    """What was refused must not be found by others."""
    watched = Watched(folder, max_tokens=4)
    (draft,), _ = watched.ask(text(30))
    watched.drafter.forget("a/0")
    assert watched.usage["evictable"] == 30
    assert watched.usage["leased"] == watched.usage["protected"] == 0
    guess = draft_context([*TEXT[:30], *drafted(draft)], 1, "b/0")
    assert watched.ask(guess)[1][0] == [4]


def test_texts_that_are_not_asked_about_give_way(folder: Path) -> None:
    watched = Watched(folder, slots=64, max_tokens=2)
    for name in ("a/0", "b/0", "c/0"):
        (draft,), _ = watched.ask(text(30, name, salt=name))
        assert len(drafted(draft)) == 2
    assert watched.ask(text(31, "c/0", salt="c/0"))[1][0] == [1]
    assert watched.ask(text(31, "a/0", salt="a/0"))[1][0] >= [28]  # of its cached text all but the first tokens went
    few = Watched(folder, texts=1, max_tokens=2)
    few.ask(text(30))
    both = few.ask(text(30), text(30, "b/0"))[0]
    assert [draft is None for draft in both] == [False, True]
    assert few.ask(text(30, "b/0"))[1][0] == [1]


def test_too_long_texts_get_no_drafts(folder: Path) -> None:
    watched = Watched(folder)
    assert watched.ask(draft_context([5] * 1024, 1))[0] == [None]
    (draft,), _ = watched.ask(draft_context([5] * 1021, 1, "b/0"))
    assert len(drafted(draft)) == 3
    small = Watched(folder, slots=20)
    assert small.ask(text(30))[0] == [None]
    (draft,), _ = small.ask(text(18, "b/0"))
    assert len(drafted(draft)) == 3


# --- what it proposes


def test_leaves_beside_a_chain(folder: Path) -> None:
    (chain,), _ = Watched(folder, max_tokens=3).ask(text(20), budget=9)
    (tree,), passes = Watched(folder, max_tokens=3, breadth=3).ask(text(20), budget=8)
    assert tree is not None
    assert chain is not None
    assert tree.parents == (-1, -1, -1, 0, 0, 0, 3, 3)
    assert tuple(tree.tokens[node] for node in (0, 3, 6)) == chain.tokens
    assert passes == [[20], [1], [1]]
    assert tree.confidence is not None
    assert list(tree.confidence[:3]) == sorted(tree.confidence[:3], reverse=True)
    assert tree.problem(512, 8) is None


def test_it_draws_from_the_distribution_it_reports(folder: Path) -> None:
    """Under the request's temperature, cut-offs and bias."""
    params = SamplingParams(temperature=0.7, top_k=3, logit_bias={9: 2.0})
    watched, seen = Watched(folder, max_tokens=1), list[int]()
    for i in range(100):
        context = text(20, draws=Draws(Dice(i), 512, 2))
        context.params = params
        draft = watched.drafter.propose(context, 2)
        assert draft is not None
        assert draft.drawn is not None
        assert [int((row > 0).sum()) for row in draft.drawn] == [3]
        assert draft.drawn[0].sum() == pytest.approx(1.0, abs=1e-5)
        seen.append(draft.tokens[0])
        likely = draft.drawn[0]
    for token in set(seen):
        assert seen.count(token) / 100 == pytest.approx(float(likely[token]), abs=0.2)


def test_an_end_is_the_end_of_a_draft(folder: Path) -> None:
    watched = Watched(folder)
    (draft,), _ = watched.ask(text(20))
    first = drafted(draft)[0]
    context = text(20, "b/0")
    context.params = SamplingParams(temperature=0.0, stop_token_ids=[first])
    assert drafted(watched.ask(context)[0][0]) == [first]


# --- what is refused, and what memory it takes


def sections(folder: Path, **options: Any) -> dict[str, Any]:
    return {"grammar": "none", "cache": {"tokens": 256}, "spec": [{"use": "draft", "model": str(folder), **options}]}


def test_a_missing_model_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"spec.draft: model: there is no model 'smolm2-135m'.*did you mean"):
        Engine(str(folder), **sections(Path("smolm2-135m")))
    with pytest.raises(ConfigError, match=r"spec\[0\].model: is required"):
        Engine(str(folder), grammar="none", spec=[{"use": "draft"}])


def test_memory_is_counted_and_refused_with_the_arithmetic(folder: Path) -> None:
    with Engine(str(folder), **sections(folder)) as engine:
        assert "256 tokens x 768 bytes + 256 tokens x 768 bytes for spec.draft" in engine.core.parts.memory
    with Engine(str(folder), **sections(folder, tokens=64)) as engine:
        assert "+ 64 tokens x 768 bytes for spec.draft" in engine.core.parts.memory
    words = r"256 tokens x 768 bytes \+ 1,099,511,627,776 tokens x 768 bytes for spec.draft = .* GiB are free"
    with pytest.raises(ConfigError, match=words):
        Engine(str(folder), **sections(folder, tokens="1024G"))


def test_a_larger_model_is_warned_of(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    larger = tmp_path / "larger"
    shutil.copytree(folder, larger)
    (larger / "unused.bin").write_bytes(bytes(1000))
    with caplog.at_level(logging.WARNING), Engine(str(folder), **sections(larger)):
        pass
    assert "is larger than the model it drafts for" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), Engine(str(larger), **sections(folder)):
        pass
    assert "larger" not in caplog.text


def accepted(engine: Engine, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Greedy runs; what became of the drafts."""
    engine.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    return dict(engine.stats())


def test_adaptation_counts_what_drafting_takes(folder: Path) -> None:
    """A level that takes as long as a step of the target's own does not pay, however good it is."""
    with Engine(str(folder), **sections(folder)) as engine:
        sizer = engine.core.parts.drafting.sizer
        assert sizer is not None
        price = sizer._price("draft")
        price.level_s = price.seconds = 1e3
        assert accepted(engine, [TEXT])["draft_tokens"] <= 2  # what it was asked for to learn
