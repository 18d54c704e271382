"""What trees over tokens share: common prefixes by galloping C-level compares, and what a child is found by."""

from __future__ import annotations

from array import array

PageKey = int | bytes  # a token at page size 1, else the raw bytes of one page of tokens
FIRST_WINDOW = 32  # tokens of the first compare; below this a slice costs more to make than to compare


def common_prefix(key: array[int], tokens: array[int], at: int, length: int) -> int:
    """How many of key[:length] equal tokens[at : at + length], from the start.

    Galloping search (Bentley and Yao, 1976): compare windows of doubling size, each one C-level slice compare, then
    bisect the window that differs. O(log length) compares; copies stay within twice what agrees, so an early
    difference under a long key is cheap. A shared run of 4,000 tokens takes 7 compares.
    """
    low, high, width = 0, 0, FIRST_WINDOW
    while True:
        if low == length:
            return length
        high = min(low + width, length)
        if key[low:high] != tokens[at + low : at + high]:
            break
        low, width = high, 2 * width
    while high - low > 1:  # the first difference lies in [low, high)
        middle = (low + high) // 2
        if key[low:middle] == tokens[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low


def page_key(tokens: array[int], at: int, page_size: int) -> PageKey:
    """What a node's `children` calls the child that starts with tokens[at : at + page_size]."""
    return tokens[at] if page_size == 1 else tokens[at : at + page_size].tobytes()
