"""What the draft model has read of each request, and how it keeps up with what the target accepts."""

from __future__ import annotations

from dataclasses import dataclass

from phloem.batch import Segment
from phloem.interfaces import DraftContext
from phloem.ledger import Ledger
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.prefix import common_prefix
from phloem.request import Request

from ._vocabulary import Vocabulary

_WORTH_SHARING = 16  # tokens read in one step that are offered to other requests at once


@dataclass(slots=True, eq=False)
class Text:
    """One request as the draft model sees it: the text so far, and behind it what it has drafted."""

    request: Request  # its own: `tokens` are the draft model's, K and V lie in its slots
    verified: int = 0  # tokens that are the target's text
    used: int = 0  # the last time it was asked about

    @property
    def pending(self) -> int:
        """Tokens that are not read yet."""
        return len(self.request.tokens) - self.request.computed


class Texts:
    """All texts, by request. Those not asked about for longest give their slots up where others need them.

    Only what the target has verified is ever published in the draft model's cache (design §5); what was drafted and
    refused is dropped with the next question. Keeps nothing that cannot be read again.
    """

    def __init__(self, ledger: Ledger, vocabulary: Vocabulary, context_length: int) -> None:
        self._ledger, self._vocabulary, self._most = ledger, vocabulary, context_length
        self._texts: dict[str, Text] = {}
        self._clock = 0

    def tick(self) -> None:
        """A new question is asked: texts that were asked about before may be displaced."""
        self._clock += 1

    def follow(self, context: DraftContext) -> Text:
        """Take in what has been written, and drop what was drafted and is not in it."""
        text = self._texts.get(context.request_id)
        if text is None:
            salt, adapter = context.namespace
            call = GenerateCall(
                call_id=context.request_id, prompt=[], params=SamplingParams(), salt=salt, adapter=adapter
            )
            text = self._texts[context.request_id] = Text(Request(call, 0, seed=0, limit=self._most, arrival=0))
        request, text.used = text.request, self._clock
        new = self._vocabulary.read(context.tokens[text.verified :])
        old = request.tokens[text.verified :]
        same = common_prefix(old, new, 0, min(len(old), len(new)))
        del request.tokens[text.verified + same :]
        request.tokens.extend(new[same:])
        request.computed = min(request.computed, text.verified + same, len(request.tokens) - 1)
        if request.lease is not None and request.computed < request.lease.length:
            # It was leased with a leader's chain that the target refused, and those slots are the cache's.
            self._ledger.release(request, publish=False)
        elif request.lease is not None:
            self._ledger.trim(request, request.computed)
        text.verified = len(context.tokens) - context.chain
        return text

    def too_long(self, text: Text) -> bool:
        """The verified text fills the draft model's context: nothing will be drafted for it any more."""
        return text.verified >= self._most

    def segment(self, text: Text, most: int) -> Segment | None:
        """The next tokens to read, at most `most`; None if there is no room for them. The last is always read."""
        request = text.request
        if len(request.tokens) >= self._most or most < 1:
            return None
        if request.lease is None:
            if not self._ledger.table.free and not self._displace():
                return None
            self._ledger.admit(request)
        count = min(most, len(request.tokens) - request.computed)
        while not self._ledger.extend(request, request.computed + count):
            if not self._displace():
                return None
        return Segment(request, request.computed, count, request.computed + count == len(request.tokens))

    def share(self, text: Text, count: int) -> None:
        """Offer what `count` tokens have been read of, if they are many."""
        if count >= _WORTH_SHARING:
            self._ledger.publish(text.request, min(text.request.computed, text.verified - 1))

    def forget(self, request_id: str) -> None:
        """The request has ended; its text stays in the cache."""
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._give_up(text)

    def usage(self) -> dict[str, int]:
        """Slots, by who has them."""
        return self._ledger.usage(self._running())[0]

    def check(self) -> None:
        """Every slot has one owner. Raises AssertionError."""
        self._ledger.check(self._running())

    def _running(self) -> list[Request]:
        return [text.request for text in self._texts.values() if text.request.lease is not None]

    def _displace(self) -> bool:
        """Take the slots of the text not asked about for longest, and of none that is being asked about."""
        idle = [t for t in self._texts.values() if t.request.lease is not None and t.used < self._clock]
        if idle:
            self._give_up(min(idle, key=lambda text: text.used))
        return bool(idle)

    def _give_up(self, text: Text) -> None:
        request = text.request
        del request.tokens[text.verified :]
        request.computed = min(request.computed, text.verified)
        self._ledger.release(request, publish=True)
