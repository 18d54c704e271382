"""Conformance of kind `spec`: drafts are trees within budget and vocabulary, and a drafter only looks.

class TestMine(SpecSuite):
    plugin = MyDrafter
"""

from __future__ import annotations

import random
from array import array

import pytest
from pydantic import BaseModel, ConfigDict

from ..drafts import Draft
from ..interfaces import DraftContext, Drafter, PluginContext
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


def draft_context(tokens: list[int], prompt: int, request_id: str = "call/0") -> DraftContext:
    """What a drafter is shown: `tokens`, of which the first `prompt` are the prompt."""
    return DraftContext(request_id, array("i", tokens), prompt, Namespace(), None, SamplingParams())


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
                if "drawn" in getattr(self.plugin, "capabilities", ()):
                    assert draft.probs is not None, "a drafter that declares `drawn` reports its probabilities"
            text.append(rng.randrange(alphabet))

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
