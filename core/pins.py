"""Pins: named prefixes, such as a system prompt, that stay in the cache until they are unpinned.

A pin is a lease that no request owns, as a hold is, but it is never given up: not for want of slots, not at a flush,
not with time. So pins keep within a share of the pool that no request counts on, and one more is refused at arrival.
What is not cached yet is computed by the call that asks for the pin; its place is reserved meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import RequestError, StepError
from .interfaces import Lease
from .ledger import Ledger
from .prefix import common_prefix
from .request import Namespace, Request


@dataclass(slots=True)
class Pin:
    """One prefix of whole pages; without a lease while it is computed."""

    call_id: str
    namespace: Namespace
    tokens: array[int]
    lease: Lease | None = None


class Pins:
    """All pins of an engine, by name. Used on the loop's thread, a few times per pin."""

    def __init__(self, ledger: Ledger, limit: int) -> None:
        """`limit` is the most slots that pins may lock, each slot counted once, in every group."""
        self._ledger, self.limit = ledger, limit
        self._named: dict[str, Pin] = {}
        self._coming: dict[str, Pin] = {}  # being computed; they replace those of their names

    def reserve(self, request: Request) -> None:
        """A call that is to be pinned has arrived. Raises RequestError if it cannot be, and says why."""
        name = request.call.pin
        assert name is not None
        if not self._ledger.shares:
            raise RequestError("this cache shares no prefixes, so none can be pinned", param="name")
        if request.call.score is not None:
            raise RequestError("a call that scores computes no prompt to pin", hint="pin it first", param="name")
        if name in self._coming:
            raise RequestError(f"pin {name!r} is being computed", hint="wait for it, or unpin it", param="name")
        tokens = request.keys[: self._ledger.floor(request.prompt_len)]
        if not tokens:
            pages = f"a page of {self._ledger.page_size} tokens"
            raise RequestError(f"a prompt of {request.prompt_len} tokens is less than {pages}", param="prompt")
        made = Pin(request.call.call_id, request.namespace, tokens)
        others = {**self._named, **self._coming}
        total = self._distinct([*others.values(), made] if name not in others else {**others, name: made}.values())
        if total > self.limit:
            raise RequestError(
                f"pin {name!r} of {len(tokens)} tokens would make {total} pinned tokens, {self.limit} are allowed",
                hint=f"raise cache.pin_share, or unpin one of: {', '.join(self._named) or 'none'}",
                param="name",
            )
        states = self._ledger.states
        if states is not None and name not in others and len(others) >= states.pinnable:
            raise RequestError(
                f"{len(others)} prefixes are pinned, and each keeps a state: of {states.snapshots} {states.pinnable} "
                "may be pinned",
                hint=f"lower cache.snapshot_every, or unpin one of: {', '.join(self._named) or 'none'}",
                param="name",
            )
        self._coming[name] = made

    def close(self, request: Request) -> None:
        """The call ends, still holding its slots: what it computed is pinned, or its reservation withdrawn."""
        name = request.call.pin
        coming = self._coming.get(name or "")
        if name is None or coming is None or coming.call_id != request.call.call_id:
            return  # no pin, or unpinned meanwhile
        del self._coming[name]
        if request.finish_reason in ("stop", "length"):
            cache, length = self._ledger.cache, len(coming.tokens)
            coming.lease = cache.lease(cache.match(coming.tokens, length, coming.namespace))
            if self._ledger.states is not None and coming.lease.length < length:
                self._drop(coming)
                request.finish_reason = "error"
                request.error = StepError(f"pin {name!r} was not kept: all states that may be cached are in use")
                return
            assert coming.lease.length == length, f"{coming.lease.length} tokens of a pin of {length} are cached"
            self._drop(self._named.pop(name, None))
            self._named[name] = coming

    def drop(self, name: str) -> bool:
        """Unpin; False if there is none of that name."""
        pin = self._named.pop(name, None)
        self._drop(pin)
        return (self._coming.pop(name, None) or pin) is not None

    def stats(self) -> dict[str, Any]:
        """Numbers for `Engine.stats`."""
        named = {name: len(pin.tokens) for name, pin in self._named.items()}
        return {
            "count": len(named),
            "tokens": self._distinct(self._named.values()),
            "limit": self.limit,
            "named": named,
        }

    def check(self) -> None:
        """Verify that pins are locked and within their limit; raises AssertionError."""
        for name, pin in self._named.items():
            assert pin.lease is not None and pin.lease.length == len(pin.tokens), f"pin {name!r} is not locked"  # noqa: PT018
        total = self._distinct(self._named.values())
        assert total <= self.limit, f"{total} tokens are pinned, {self.limit} allowed"

    def _drop(self, pin: Pin | None) -> None:
        if pin is not None and pin.lease is not None:
            self._ledger.cache.release(pin.lease)

    def _distinct(self, pins: Iterable[Pin]) -> int:
        """Tokens of all these prefixes, shared ones once."""
        seen: list[Pin] = []
        total = 0
        for pin in pins:
            most = 0
            for other in seen:
                if other.namespace == pin.namespace:
                    length = min(len(pin.tokens), len(other.tokens))
                    most = max(most, self._ledger.floor(common_prefix(pin.tokens, other.tokens, 0, length)))
            total += len(pin.tokens) - most
            seen.append(pin)
        return total
