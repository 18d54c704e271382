"""Verification of draft trees (design §6): by the target's own samples, or by rejection sampling of what was drawn."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from .drafts import Draft
from .draws import Chance, Floats

Walked = tuple[list[int], list[int]]  # tokens emitted, draft nodes accepted


def walk(draft: Draft | None, samples: Sequence[int], stop_ids: frozenset[int] = frozenset()) -> Walked:
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


def walk_drawn(
    draft: Draft,
    samples: Sequence[int],
    likely: Sequence[float],
    chance: Chance,
    stop_ids: frozenset[int] = frozenset(),
) -> Generator[int, Floats, Walked]:
    """`walk` for a draft whose nodes were drawn (`draft.drawn`), by rejection sampling.

    `likely[node]` is the target's probability of a node's token after its parent, filters applied; of nodes that are
    not reached it may be anything. Where it refuses a node's first child, the walk yields that node (-1: the text's
    end) and is sent the target's probabilities after it, [vocab]: so of most nodes one number is all that is needed.
    Where a node has no children its own sample is taken. After Leviathan et al. (2023) and Chen et al. (2023) for one
    child, Miao et al. (SpecInfer, 2024) for several.
    """
    assert draft.drawn is not None, "rejection sampling divides by the probabilities drawn from"
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(node)
    tokens: list[int] = []
    nodes: list[int] = []
    node = -1
    while (token := samples[node + 1]) >= 0:
        child: int | None = None
        if node in children:
            child = first = children[node][0]
            token, drawn = draft.tokens[first], draft.drawn[first]
            if not chance.happens(likely[first] * float(drawn.sum(dtype=np.float64)) / float(drawn[token])):
                token, child = _after_refusal(draft, children[node], (yield node), chance)
        tokens.append(token)
        if child is None or token in stop_ids:
            break
        nodes.append(child)
        node = child
    return tokens, nodes


def _after_refusal(draft: Draft, siblings: Sequence[int], target: Floats, chance: Chance) -> tuple[int, int | None]:
    """The next token where the first sibling was refused, and the one that it is, if any.

    Each in turn is taken with probability p(x) / q(x). If it is not, what is left of p beyond q is the new p, and q
    loses x, which is not drawn again. So whatever q is, the token is distributed as p.
    """
    assert draft.drawn is not None, "checked by the caller"
    p = np.array(target, dtype=np.float64)
    q = np.array(draft.drawn[siblings[0]], dtype=np.float64)
    p /= p.sum()
    for place, node in enumerate(siblings):
        token = draft.tokens[node]
        q /= q.sum()
        if place and chance.happens(p[token] / q[token]):
            return token, node
        rest = np.maximum(p - q, 0.0)
        total = rest.sum()
        if total > 0:  # else p and q are equal, and only rounding has refused
            p = rest / total
        q[token] = 0.0
    return chance.pick(p), None
