"""Windows: how many slots of layers that see only the last tokens are needed, and when older ones go back.

A group with a window of w keeps the last w - 1 tokens of a running request, those of the present step, and, in the
cache, the last w - 1 tokens before each place from which somebody may go on.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_STRIDE = 16


def stride(window: int, page: int) -> int:
    """Tokens by which a request falls behind before it gives slots back: each time costs a call or two."""
    return -(-max(MIN_STRIDE, window // 8) // page) * page


def needed_from(computed: int, window: int, page: int) -> int:
    """First token, page-floored, whose slot the next one needs, and so does whoever continues the published pages."""
    return max(0, computed // page * page - (window - 1)) // page * page


def span(window: int, page: int) -> int:
    """Most slots that a request holds or locks in such a group, besides those of tokens not computed yet."""
    return window - 1 + stride(window, page) + 3 * page


def guide(windows: Sequence[int | None]) -> int:
    """The group that the others follow: one without a window, else the widest."""
    return max(range(len(windows)), key=lambda g: float("inf") if (w := windows[g]) is None else w)


def sizes(
    windows: Sequence[int | None], tokens: int, page: int, *, running: int, step: int, every: int, pinned: int
) -> tuple[int, ...]:
    """Slots per group, where the guiding one has `tokens`: whole pages, and never more than it.

    `running` requests with `step` tokens a step, two steps under way, never lack window slots beside full ones, nor do
    `pinned` tokens; on top of that one window is kept for `every` tokens in the cache.
    """
    made = []
    for group, window in enumerate(windows):
        size = tokens
        if group != guide(windows) and window is not None:
            kept = -(-(window - 1) // page) * page * -(-tokens // every)
            size = min(tokens, running * span(window, page) + 2 * step + kept + pinned)
        made.append(-(-size // page) * page)
    return tuple(made)
