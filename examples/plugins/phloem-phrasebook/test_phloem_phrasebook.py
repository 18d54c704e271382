"""phrasebook keeps the promises of every drafter, and its own."""

from __future__ import annotations

from phloem_phrasebook import Phrasebook

from phloem.testing import SpecSuite
from phloem.testing.spec import draft_context


class TestPhrasebook(SpecSuite):
    plugin = Phrasebook

    def make(self) -> Phrasebook:
        """With phrases in tokens: the suite has no tokenizer."""
        made: Phrasebook = super().make()
        made.learn([1, 2, 3, 4, 5])
        made.learn([7, 2, 3, 9])
        return made

    def test_the_rest_of_a_phrase(self) -> None:
        """Of the first phrase that goes on from there, within the budget."""
        drafter = self.make()
        for text, budget, rest in (
            ([9, 1, 2], 8, (3, 4, 5)),
            ([1, 2], 2, (3, 4)),
            ([7, 2], 8, (3, 9)),
            ([2, 3], 8, (4, 5)),
        ):
            draft = drafter.propose(draft_context(text, 1), budget)
            assert draft is not None
            assert draft.tokens == rest
        assert drafter.propose(draft_context([2, 1], 1), 8) is None
