"""Contracts of tiers: kind `storage`, for blocks of KV that outlive memory, and what a cache has to offer them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .batch import IntArray
from .request import Namespace

if TYPE_CHECKING:
    from .interfaces import Lease


class Storage(Protocol):
    """Kind `storage`. Bytes by name; the least recently used go where all would exceed a budget of the storage's own.

    The constructor opens it and raises PluginError where that cannot be done. `context.extras["identity"]` is plain
    data that says what the bytes were made by: what was stored under another identity must not be found again, and
    must not be deleted. `context.extras["block_bytes"]` is the most that one name will hold.

    The core checks what it reads: it notices wrong bytes, and takes them for an absent name. It calls `holds` on the
    loop's thread, and `read`, `write` and `touch` on two threads of its own, one for reading and one for the rest; all
    at the same time. Capability `durable`: the next process that opens it finds what this one wrote.
    """

    capabilities: frozenset[str]

    def holds(self, name: bytes) -> bool:
        """Whether `read` would find it. Quick, from memory: called for waiting requests, for each block."""

    def read(self, name: bytes) -> bytes | None:
        """What was written under a name of 16 bytes, and a use of it; None where it is gone, torn or corrupt.

        Raises OSError where the device fails. May take long; a hanging one costs the requests that wait for it a
        computation.
        """

    def write(self, name: bytes, data: bytes) -> None:
        """Keep it, in whole or not at all, also if the process dies in the middle; in place of what has that name.

        Raises OSError where it cannot: then what was there may stay.
        """

    def touch(self, names: Sequence[bytes]) -> None:
        """These are in use: a use of each, in this order. Unknown ones are ignored."""

    def reject(self, name: bytes) -> None:
        """What `read` gave is not what was written: it must not be found again."""

    def stats(self) -> dict[str, int]:
        """At least `blocks` and `bytes`. Called on the loop's thread; quick."""

    def close(self) -> None:
        """Called once, after the last of the others has returned, or when one of them hangs."""


class Leaving(Protocol):
    """Who is told what a cache is about to lose."""

    def __call__(self, namespace: Namespace, tokens: array[int], base: int, slots: Sequence[IntArray]) -> None:
        """Some of the state of tokens[base:] leaves; `slots` are all that is there of it, as in `Spills.kept`.

        `base` is where a block begins.
        """


class Spills(Protocol):
    """What a cache with the capability `tiers` has besides. What it publishes may be kept elsewhere and come back."""

    def spill(self, taker: Leaving, block: int) -> None:
        """Call `taker` before state leaves a whole block (`block` tokens, at a multiple of it), but by `Cache.reset`.

        So too before a prefix that ends with one loses the state after it; then of all that cannot be gone on from any
        more. It copies what it wants of the slots, which nobody has overwritten yet, and must not use the cache.
        """

    def kept(self, lease: Lease) -> tuple[IntArray, ...]:
        """Per group the slots of the leased tokens, as in `Cache.slots`, but all that are there, needed or not.

        A state's is in the place of the last token before it.
        """
