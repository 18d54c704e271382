"""A step's attention as arrays of jobs for a compiled kernel: made once for all layers alike, no Python per token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from phloem.batch import Batch, IntArray

from ._sharing import Shared, find_shared, shareable

ROWS = 120  # of a job's matrices: enough to make good use of the K and V that it packs, few enough for the cache
Int = npt.NDArray[np.int64]


class Jobs(NamedTuple):
    """What the kernel works through. T query tokens, S segments; all arrays are int32 but for the masks."""

    queries: IntArray  # [T, 4] first, plain, last, mask: what each query sees of its segment's context, see `sight`
    masks: npt.NDArray[np.uint8]  # what draft nodes see of each other
    members: IntArray  # queries by job, as rows of q
    jobs: IntArray  # [J, 6] begin and end in `members`, segment whose slots are read, low and high entry, part or -1
    merged: IntArray  # [M] queries whose results come in parts
    begins: IntArray  # [M + 1] where those of each begin in `parts`
    parts: IntArray  # in the order of their entries

    @property
    def most(self) -> int:
        """Queries of the largest job."""
        return int((self.jobs[:, 1] - self.jobs[:, 0]).max())


class _Tiles(NamedTuple):
    """Queries [begin, end) of `members` over entries [low, high) of a segment's context; of as many, one each."""

    begin: Int
    end: Int
    segment: Int
    low: Int
    high: Int
    cut: npt.NDArray[np.bool_]  # at every span: there would be few jobs, or something else is merged before
    partial: npt.NDArray[np.bool_]  # its queries see more than that


def make_jobs(batch: Batch, table: IntArray, window: int | None, share: int, span: int) -> Jobs:
    """The jobs of a step's layers with this slot table [S, max_kv] and window; `share` query heads have one KV head.

    Entries that several segments have in common are jobs of all their queries. `span` entries are the kernel's unit of
    merging: a range may be cut at its multiples without a change in any bit, if all but the first piece are one each.
    """
    q, kv = np.array(batch.q_lens), np.array(batch.kv_lens)
    starts = np.cumsum(q) - q
    queries, masks = sight(batch, q, kv, starts, window)
    shared, begins = _shared(table, q, kv, window, span)
    most = max(1, ROWS // share)
    tiles = _own_tiles(q, starts, queries, begins, most)
    members = np.arange(len(queries), dtype=np.int32)
    if shared:
        members, common = _shared_tiles(shared, members, q, starts, most)
        tiles = _Tiles(*(np.concatenate(pair) for pair in zip(tiles, common, strict=True)))
    tiles = _cut(tiles, span)
    begin, end, segment, low, high, _, partial = tiles
    sizes = (end - begin) * partial
    part = np.where(partial, np.cumsum(sizes) - sizes, -1)
    jobs = np.stack((begin, end, segment, low, high, part), axis=1, dtype=np.int32, casting="unsafe")
    order = np.argsort((begin - end) * (high - low), kind="stable")  # the longest first
    return Jobs(queries, masks, members, jobs[order], *_merging(jobs[partial], members))


def sight(batch: Batch, q: Int, kv: Int, starts: Int, window: int | None) -> tuple[IntArray, npt.NDArray[np.uint8]]:
    """Per query [T, 4]: it sees entries [first, plain), and of [plain, last) those whose byte of the masks is 1.

    The fourth number is where these bytes begin.
    """
    last = np.arange(int(q.sum())) + np.repeat(kv - q - starts + 1, q)
    queries = np.zeros((len(last), 4), dtype=np.int32)
    queries[:, 0] = 0 if window is None else np.maximum(0, last - window)
    queries[:, 1] = queries[:, 2] = last
    masks: list[npt.NDArray[np.bool_]] = []
    taken = 0
    for segment, tree in batch.tree_masks.items():
        nodes = len(tree)
        committed = int(kv[segment]) - nodes
        end = int(starts[segment] + q[segment])
        rows = queries[end - nodes : end]
        position = committed - 1 + tree.sum(1)
        if window is not None:
            tree = tree & (position[:, None] - position < window)
            rows[:, 0] = np.clip(position - window + 1, 0, committed)
        rows[:, 1], rows[:, 2] = committed, kv[segment]
        rows[:, 3] = taken + nodes * np.arange(nodes)
        masks.append(tree.ravel())
        taken += nodes * nodes
    return queries, np.concatenate(masks).view(np.uint8) if masks else np.zeros(0, dtype=np.uint8)


def _shared(table: IntArray, q: Int, kv: Int, window: int | None, span: int) -> tuple[list[Shared], Int]:
    """What segments have in common, and where the rest of each begins. With a window nothing is: little is read."""
    if window is not None:
        return [], np.zeros(len(q), dtype=np.int64)
    shared, begins = find_shared(table, shareable((kv - q).tolist(), q.tolist()), span)
    return shared, np.array(begins)


def _own_tiles(q: Int, starts: Int, queries: IntArray, begins: Int, most: int) -> _Tiles:
    """Of each segment, over what it does not share, tiles of nearly equal numbers of queries, at most `most`."""
    tiles = -(-q // most)
    segment = np.repeat(np.arange(len(q)), tiles)
    count, index = tiles[segment], _within(tiles)
    begin = starts[segment] + index * q[segment] // count
    end = starts[segment] + (index + 1) * q[segment] // count
    low = np.maximum(begins[segment], np.minimum.reduceat(queries[:, 0], begin))
    high = np.maximum.reduceat(queries[:, 2], begin).astype(np.int64)
    behind = begins[segment] > 0
    return _Tiles(begin, end, segment, low, high, (count == 1) | behind, behind)


def _shared_tiles(shared: list[Shared], members: IntArray, q: Int, starts: Int, most: int) -> tuple[IntArray, _Tiles]:
    """`members` and behind them those of each shared range, and the ranges' tiles."""
    every = [members]
    made: list[tuple[int, int, int, int, int, bool, bool]] = []
    taken = len(members)
    for group, low, high in shared:
        rows = np.concatenate([np.arange(starts[m], starts[m] + q[m], dtype=np.int32) for m in group])
        tiles = -(-len(rows) // most)
        bounds = [taken + len(rows) * i // tiles for i in range(tiles + 1)]
        made += [(a, b, group[0], low, high, tiles == 1 or low > 0, True) for a, b in pairwise(bounds)]
        every.append(rows)
        taken += len(rows)
    columns: list[Any] = [np.array(column) for column in zip(*made, strict=True)]
    return np.concatenate(every), _Tiles(*columns)


def _cut(tiles: _Tiles, span: int) -> _Tiles:
    """Tiles over long ranges become one for each span, where they are to be cut."""
    long = tiles.cut & (tiles.high - tiles.low > span)
    if not long.any():
        return tiles
    spans = np.where(long, (tiles.high - 1) // span - tiles.low // span + 1, 1)
    of, index = np.repeat(np.arange(len(spans)), spans), _within(spans)
    columns: list[Any] = [column[of] for column in tiles]
    cut = _Tiles(*columns)
    first = cut.low // span + index
    low = np.where(index == 0, cut.low, first * span)
    high = np.where(index == spans[of] - 1, cut.high, (first + 1) * span)
    return cut._replace(low=low, high=high, partial=cut.partial | long[of])


def _merging(jobs: IntArray, members: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Of jobs that give parts, in the order of these: what `Jobs` says of merging."""
    if not len(jobs):
        none = np.zeros(0, dtype=np.int32)
        return none, none, none
    begin, sizes = jobs[:, 0].astype(np.int64), (jobs[:, 1] - jobs[:, 0]).astype(np.int64)
    rows = members[np.repeat(begin, sizes) + _within(sizes)]
    parts = np.lexsort((np.repeat(jobs[:, 3], sizes), rows))
    merged, begins = np.unique(rows[parts], return_index=True)
    begins = np.append(begins, len(parts))
    return merged, begins.astype(np.int32), parts.astype(np.int32)


def _within(counts: Int) -> Int:
    """0, 1, ... up to each count, one after the other."""
    made: Int = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return made
