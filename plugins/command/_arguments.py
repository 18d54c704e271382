"""Numbers on a command line."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """An integer above zero."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """An integer, zero allowed."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def positives(text: str) -> list[int]:
    """A comma-separated list of integers above zero."""
    return [positive(part) for part in text.split(",")]


def above_zero(text: str) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value
