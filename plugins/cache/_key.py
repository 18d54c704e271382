"""Token keys: the page a child is found by."""

from __future__ import annotations

from array import array

PageKey = int | bytes  # a token at page size 1, else the raw bytes of one page of tokens


def page_key(tokens: array[int], at: int, page_size: int) -> PageKey:
    """What a node's `children` calls the child that starts with tokens[at : at + page_size]."""
    return tokens[at] if page_size == 1 else tokens[at : at + page_size].tobytes()
