"""Common prefixes of token arrays by galloping C-level compares (as the seed article describes for radix keys)."""

from __future__ import annotations

from array import array


def common_prefix(a: array[int], b: array[int], limit: int, start: int = 0) -> int:
    """Length of the common prefix of a[:limit] and b[:limit], given that the first `start` tokens agree.

    Doubling windows, one slice compare each, then bisection of the window that holds the difference: about a dozen
    compares for thousands of tokens, no Python step per token.
    """
    limit = min(limit, len(a), len(b))
    at, width = start, 16
    while at < limit:
        end = min(at + width, limit)
        if a[at:end] != b[at:end]:
            break
        at, width = end, width * 2
    else:
        return limit
    low, high = at, end  # tokens below `low` agree; a difference lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low if a[low] != b[low] else low + 1
