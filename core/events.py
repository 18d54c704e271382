"""What is told of a cache to others: blocks of tokens, the hashes that name them, and numbered batches of events.

The messages have the names and fields of vLLM's KV events, as maps, so that a router that reads those can read these;
`namespace`, `seq` and `source` are additions. How a hash is made is part of the format: docs/events.md has the bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from .request import Namespace

HASH_BYTES = 16
DEFAULT_BLOCK = 64


class BlockStored(msgspec.Struct, kw_only=True, tag=True):
    """Consecutive blocks of one prefix are cached now."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None  # of the block before the first; None: the first begins the prefix
    token_ids: list[int]  # of all these blocks, or empty where the publisher sends none
    block_size: int
    lora_id: int | None = None  # never set: adapters have names
    medium: str | None
    lora_name: str | None  # the adapter
    namespace: bytes  # `namespace_hash`: what must agree besides the tokens; tells no salt


class BlockRemoved(msgspec.Struct, kw_only=True, tag=True):
    """Blocks of one prefix, last first, are cached no more."""

    block_hashes: list[bytes]
    medium: str | None
    namespace: bytes


class AllBlocksCleared(msgspec.Struct, kw_only=True, tag=True):
    """Nothing is cached but what the events after this one say. First in every snapshot."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, kw_only=True):
    """Events in order. Batches of one `source` are numbered 1, 2, ...; a snapshot has the number it is the state after.

    A batch that begins with `AllBlocksCleared` needs none before it, so a snapshot is such a batch.
    """

    ts: float  # time.time() at the making
    events: list[Event]
    seq: int
    source: str  # one life of one publisher: a restarted engine has another


def namespace_hash(namespace: Namespace, block_size: int) -> bytes:
    """The parent of a namespace's first blocks: 16 bytes. Each field that is not None counts, with its name."""
    text = b"phloem.blocks.1" + block_size.to_bytes(4, "little")
    for name, value in zip(namespace._fields, namespace, strict=True):
        if value is not None:
            for part in (name.encode(), value.encode("utf-8", "surrogatepass")):
                text += len(part).to_bytes(4, "little") + part
    return hashlib.sha256(text).digest()[:HASH_BYTES]


def block_hashes(tokens: Sequence[int], block_size: int, namespace: Namespace = Namespace()) -> list[bytes]:  # noqa: B008
    """The hashes of the whole blocks of a prefix, 16 bytes each; a rest shorter than a block has none."""
    return [key for key, _ in chain(tokens, block_size, namespace_hash(namespace, block_size))]


def chain(tokens: Sequence[int], block_size: int, parent: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(hash, bytes of its tokens) of each whole block. O(len(tokens)): about a microsecond a block.

    Tokens are little-endian int32; the keys of a `key` scheme, an array("q"), are int64.
    """
    width = 8 if isinstance(tokens, array) and tokens.typecode == "q" else 4
    data = np.asarray(tokens, dtype=f"<i{width}").tobytes()
    size = width * block_size
    for at in range(0, len(data) - size + 1, size):
        block = data[at : at + size]
        parent = hashlib.sha256(parent + block).digest()[:HASH_BYTES]
        yield parent, block
