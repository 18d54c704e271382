"""Default verification (design §6): follow the target's own samples down a draft tree. Exact for any draft."""

from __future__ import annotations

from collections.abc import Sequence

from .drafts import Draft


def walk(
    draft: Draft | None, samples: Sequence[int], stop_ids: frozenset[int] = frozenset()
) -> tuple[list[int], list[int]]:
    """Tokens emitted and draft nodes accepted by one segment; called once per segment and step, O(nodes).

    `samples[0]` is the target's sample after the committed text, `samples[i + 1]` the one after draft node i. The
    child that equals a node's sample is accepted and followed; the last sample has no such child, so there is one
    more token than nodes. Nothing follows a token of `stop_ids`. A negative sample marks a row that could not be
    sampled: if the walk comes to it, it ends there with as many tokens as nodes.

    Why this is exact: every sample was drawn from the target's distribution after its own path, with noise that no
    draft has seen, so the path followed is the one plain decoding would have taken.
    """
    edges = zip(draft.parents, draft.tokens, strict=True) if draft else ()
    children = {edge: node for node, edge in enumerate(edges)}
    tokens: list[int] = []
    nodes: list[int] = []
    node = -1
    while (token := samples[node + 1]) >= 0:
        tokens.append(token)
        child = children.get((node, token))
        if child is None or token in stop_ids:
            break
        nodes.append(child)
        node = child
    return tokens, nodes
