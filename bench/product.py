"""The packed float32 product beside torch's linear, on SmolLM2-135M's matrices: what a verify of n rows costs.

python -m bench.product [--rounds 15]. Both run on the same weights in turn; a figure is the median over rounds, each
of which goes through more weights than any cache holds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from phloem.interfaces import PluginContext
from phloem.linear import Linear
from phloem.plugins.quant.none import NoQuant

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # qkv, out, gate and up, down
LAYERS = 30
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)


def once(linears: Sequence[Linear], inputs: Sequence[torch.Tensor]) -> float:
    """Seconds to multiply through all matrices."""
    begin = time.perf_counter()
    for i, linear in enumerate(linears):
        linear(inputs[i % len(inputs)])
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Print a Markdown table: milliseconds per pass, and both relative to one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args(arguments).rounds
    plain = [Linear(torch.randn(shape)) for _ in range(LAYERS) for shape in SHAPES]
    quant = NoQuant(NoQuant.Options(product="packed"), PluginContext("quant", "none"))
    packed = [quant.linear(linear) for linear in plain]
    megabytes = sum(linear.floats().numel() for linear in plain) * 4 / 1e6
    show(f"{megabytes:.0f} MB of weights, {torch.get_num_threads()} threads\n")
    show("| rows | packed ms | x one row | torch ms | x one row | torch / packed | GB/s | GF/s |")
    show("|---|---|---|---|---|---|---|---|")
    first: tuple[float, float] | None = None
    for rows in ROWS:
        inputs = [torch.randn(rows, shape[1]) for shape in SHAPES]
        pairs = [(once(packed, inputs), once(plain, inputs)) for _ in range(rounds)]
        mine, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
        first = first or (mine, theirs)
        rate = megabytes / 4e3 * 2 * rows / mine
        show(
            f"| {rows} | {mine * 1e3:.1f} | {mine / first[0]:.2f} | {theirs * 1e3:.1f} | {theirs / first[1]:.2f} "
            f"| {theirs / mine:.2f} | {megabytes / mine / 1e3:.1f} | {rate:.0f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
