"""Conformance of kind `spec`: drafts are trees within budget and vocabulary, and a drafter only looks.

class TestMine(SpecSuite):
    plugin = MyDrafter
"""

from __future__ import annotations

import random
import time
from array import array
from typing import cast

import pytest
from pydantic import BaseModel, ConfigDict

from ..drafts import Draft
from ..draws import Dice, Draws
from ..interfaces import BatchedDrafter, DraftContext, Drafter, PluginContext
from ..params import SamplingParams
from ..request import Namespace
from .plugin import TOY_SPEC, PluginSuite


class FakeDrafter:
    """Proposes what its `script` says for a text length; for tests of the verifier, right and wrong drafts alike."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """What to propose."""

        model_config = ConfigDict(frozen=True, extra="forbid")

        script: dict[int, tuple[int, ...]] = {}

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.script = options.script
        self.forgotten: list[str] = []

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """The chain scripted for the present length."""
        tokens = self.script.get(len(context.tokens), ())[:budget]
        return Draft.chain(tokens) if tokens else None

    def forget(self, request_id: str) -> None:
        """Noted in `forgotten`."""
        self.forgotten.append(request_id)


def draft_context(
    tokens: list[int],
    prompt: int,
    request_id: str = "call/0",
    *,
    salt: str | None = None,
    chain: int = 0,
    draws: Draws | None = None,
) -> DraftContext:
    """What a drafter is shown: `tokens`, of which the first `prompt` are the prompt, the last `chain` a leader's."""
    return DraftContext(request_id, array("i", tokens), prompt, Namespace(salt), None, SamplingParams(), chain, draws)


class SpecSuite(PluginSuite):
    """Feeds growing texts, repetitive and random ones, and checks each proposal."""

    kind = "spec"

    def drafter(self) -> Drafter:
        """`make`, typed."""
        drafter: Drafter = self.make()
        return drafter

    @pytest.mark.parametrize("budget", [1, 3, 16])
    @pytest.mark.parametrize("alphabet", [1, 3, TOY_SPEC.vocab_size])
    def test_drafts_are_trees_within_budget(self, budget: int, alphabet: int) -> None:
        """Every proposal is None or a tree that the engine would take."""
        drafter, rng = self.drafter(), random.Random(budget * 100 + alphabet)
        text = [rng.randrange(alphabet) for _ in range(5)]
        for _ in range(60):
            draft = drafter.propose(draft_context(text, 5), budget)
            if draft is not None:
                assert len(draft), "an empty draft: return None instead"
                problem = draft.problem(TOY_SPEC.vocab_size, budget)
                assert problem is None, problem
                if "chain" in getattr(self.plugin, "capabilities", ()):
                    assert draft.is_chain, "a drafter that declares `chain` proposes no siblings"
            text.append(rng.randrange(alphabet))

    def test_draws_what_it_proposes(self) -> None:
        """Where it is given `draws`, a drafter that declares `drawn` proposes just what it has drawn there."""
        if "drawn" not in getattr(self.plugin, "capabilities", ()):
            pytest.skip("the drafter does not declare `drawn`")
        drafter, text, drawn = self.drafter(), [1, 2, 3] * 4, 0
        for budget in (1, 2, 5, 16):
            draws = Draws(Dice(budget), TOY_SPEC.vocab_size, budget)
            draft = drafter.propose(draft_context(text, 4, draws=draws), budget)
            problem = draws.problem(draft)
            assert problem is None, problem
            drawn += len(draws)
            text.append(draft.tokens[0] if draft is not None else budget)
        assert drawn, "it never drew anything"

    def test_many_at_once_as_one_by_one(self) -> None:
        """`propose_all` of a drafter that declares `batched` gives each request what `propose` would."""
        if "batched" not in getattr(self.plugin, "capabilities", ()):
            pytest.skip("the drafter does not declare `batched`")
        texts = [[1, 2, 3] * 5, [7], [4, 4, 5] * 6]
        budgets = [5, 1, 3]
        contexts = [draft_context(text, 1, f"call/{i}") for i, text in enumerate(texts)]
        together = cast(BatchedDrafter, self.drafter()).propose_all(contexts, budgets)
        assert len(together) == len(texts)
        for context, budget, draft in zip(contexts, budgets, together, strict=True):
            alone = self.drafter().propose(context, budget)
            assert (draft and (draft.tokens, draft.parents)) == (alone and (alone.tokens, alone.parents))
            assert draft is None or draft.problem(TOY_SPEC.vocab_size, budget) is None

    def test_only_looks(self) -> None:
        """The text is the engine's and stays as it was."""
        context = draft_context([1, 2, 3] * 10, 12)
        before = context.tokens.tobytes()
        self.drafter().propose(context, 8)
        assert context.tokens.tobytes() == before

    def test_shortest_prompt(self) -> None:
        """A prompt of one token is a text too."""
        draft = self.drafter().propose(draft_context([1], 1), 4)
        assert draft is None or draft.problem(TOY_SPEC.vocab_size, 4) is None

    def test_forgets(self) -> None:
        """Requests end in any order, unknown ones too, and an id may come again with another text."""
        drafter = self.drafter()
        drafter.forget("never seen")
        for text in ([1, 2] * 8, [3] * 4):
            draft = drafter.propose(draft_context(text, 2), 4)
            assert draft is None or draft.problem(TOY_SPEC.vocab_size, 4) is None
            drafter.forget("call/0")

    def test_requests_do_not_mix(self) -> None:
        """What one request is proposed does not depend on another's presence, unless the drafter says `learns`."""
        if "learns" in getattr(self.plugin, "capabilities", ()):
            pytest.skip("the drafter learns from all requests")
        text = [1, 2, 3, 4] * 4
        alone = self.drafter().propose(draft_context(text, 4, "a/0"), 6)
        drafter = self.drafter()
        drafter.propose(draft_context([1, 2, 9, 9] * 4, 4, "b/0"), 6)
        assert drafter.propose(draft_context(text, 4, "a/0"), 6) == alone

    def test_namespaces_do_not_mix(self) -> None:
        """Requests of different namespaces learn nothing of each other, whatever the drafter remembers."""
        secret = [5, 6, 7, 8, 9, 10, 11, 12] * 2
        text = [4, 3, 5, 6, 7]
        drafter = self.drafter()
        for end in range(4, len(secret)):
            drafter.propose(draft_context(secret[:end], 4, "a/0", salt="a"), 8)
        drafter.forget("a/0")
        for salt in ("b", None):
            alone = self.drafter().propose(draft_context(text, 2, "b/0", salt=salt), 8)
            assert drafter.propose(draft_context(text, 2, "b/0", salt=salt), 8) == alone, f"namespace {salt} knows of a"
            drafter.forget("b/0")

    def test_a_leader_s_chain_is_not_the_text(self) -> None:
        """What another drafter proposes may never be written: the next text goes on without it, or with a part."""
        drafter, rng = self.drafter(), random.Random(4)
        text = [rng.randrange(6) for _ in range(8)]
        for _ in range(40):
            ahead = [rng.randrange(6) for _ in range(rng.randrange(4))]
            draft = drafter.propose(draft_context(text + ahead, 8, chain=len(ahead)), 6)
            assert draft is None or draft.problem(TOY_SPEC.vocab_size, 6) is None
            text += [*ahead[: rng.randint(0, len(ahead))], rng.randrange(6)]

    def test_long_texts_take_no_longer_than_a_step(self) -> None:
        """A proposal is on the path of every token. The bound is generous: it finds what reads a text with each."""
        drafter, rng = self.drafter(), random.Random(5)
        text = [rng.randrange(TOY_SPEC.vocab_size) for _ in range(4000)]
        begin = time.process_time()
        for _ in range(100):
            drafter.propose(draft_context(text, 3000), 16)
            text.append(rng.randrange(TOY_SPEC.vocab_size))
        took = (time.process_time() - begin) / 100
        assert took < 0.02, f"{1e3 * took:.1f} ms a proposal behind 4,000 tokens"
