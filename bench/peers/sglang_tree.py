"""SGLang's radix cache under the operations of `bench.tree`: one line of JSON. Runs in SGLang's own environment.

    python -m bench.peers.sglang_tree --nodes 10000

`request` is what its scheduler does for one that starts and ends: match, lock, insert, unlock. It keeps slot numbers
as torch tensors; its allocator here only counts.
"""

from __future__ import annotations

import argparse
import json
import tracemalloc
from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from bench.tree_texts import LONG, ROUNDS, RUN, Texts, rate


class Allocator:
    """Takes back slots."""

    device = "cpu"

    def __init__(self) -> None:
        self.freed = 0

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        """A leaf's."""
        self.freed += len(slots)


class Tree:
    """The operations."""

    def __init__(self) -> None:
        self.cache = RadixCache.create_simulated(mock_allocator=Allocator())
        self._next = 0

    def match(self, text: array[int], length: int | None = None) -> Any:
        """Longest cached prefix of the text's first `length` tokens."""
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(text, limit=length)))

    def start(self, text: array[int]) -> tuple[array[int], torch.Tensor, Any]:
        """Match, lock, and take slots for the rest."""
        found = self.match(text, len(text) - 1)
        self.cache.inc_lock_ref(found.last_device_node)
        known = self.cache.path_device_indices(found.last_device_node)
        begin, self._next = self._next, self._next + len(text) - len(known)
        return text, torch.cat([known, torch.arange(begin, self._next)]), found.last_device_node

    def insert(self, started: tuple[array[int], torch.Tensor, Any]) -> None:
        """Adds the new leaf."""
        text, slots, _ = started
        self.cache.insert(InsertParams(key=RadixKey(text), value=slots))

    def request(self, text: array[int]) -> None:
        """A request's life in the tree."""
        started = self.start(text)
        self.insert(started)
        self.cache.dec_lock_ref(started[2])


def measure(nodes: int, seed: int, traced: int) -> dict[str, float]:
    """All figures at one size."""
    texts, tree = Texts(nodes, seed, "q"), Tree()
    tracemalloc.start()
    for text in texts.all[:traced]:
        tree.request(text)
    row = {"nodes": nodes, "bytes_per_node": tracemalloc.get_traced_memory()[0] / len(texts.all[:traced])}
    tracemalloc.stop()
    for text in texts.all[traced:]:
        tree.request(text)
    row["match"] = rate(tree.match, [texts.sample() for _ in range(ROUNDS)])
    grown = texts.grown()
    best = 0.0
    for items in grown:
        started = [tree.start(text) for text in items]
        best = max(best, rate(tree.insert, [started]))
        for *_, node in started:
            tree.cache.dec_lock_ref(node)
    row["insert"] = best
    row["request"] = rate(tree.request, texts.grown())
    few = [items[:20] for items in grown]  # each call looks at every leaf
    row["evict"] = rate(lambda _: tree.cache.evict(EvictParams(num_tokens=RUN)), few)
    row["split"] = rate(lambda text: tree.match(text, len(text) - RUN // 2), grown)
    text = texts.long()
    tree.request(text)
    row["match_4k_us"] = 1e6 / rate(lambda one: tree.match(one, LONG), [[text] * 200] * ROUNDS)
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traced", type=int, default=20_000)
    given = parser.parse_args()
    print(json.dumps(measure(given.nodes, given.seed, given.traced)))
