"""Matrix products of each quant beside torch's float32 linear, on SmolLM2-135M's matrices: what a verify of rows costs.

python -m bench.product [--quant none,bf16,int8] [--rows 1,8,32] [--rounds 15]. All run on the same weights in turn; a
figure is the median over rounds, each of which goes through all layers' weights once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from phloem.errors import PhloemError
from phloem.interfaces import PluginContext
from phloem.linear import Linear
from phloem.registry import build

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # qkv, out, gate and up, down
LAYERS = 30
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)


def once(linears: Sequence[Linear], inputs: Sequence[torch.Tensor]) -> float:
    """Seconds to multiply through all matrices."""
    begin = time.perf_counter()
    for i, linear in enumerate(linears):
        linear(inputs[i % len(inputs)])
    return time.perf_counter() - begin


def listed(text: str) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in text.split(",")]


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Print a Markdown table: milliseconds per pass, relative to one row and to torch's, and the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", type=listed, default=["none"], help="names of quants, with commas between")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in listed(text)], default=ROWS)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args(arguments)
    plain = [Linear(torch.randn(shape)) for _ in range(LAYERS) for shape in SHAPES]
    made = {"torch": plain}
    for name in asked.quant:
        try:
            quant = build("quant", name, PluginContext("quant", name, device="cpu", dtype="float32"))
        except PhloemError as error:
            parser.error(str(error))
        made[name] = [quant.linear(linear) for linear in plain]
    weights = LAYERS * sum(rows * columns for rows, columns in SHAPES)
    show(f"{weights / 1e6:.0f} million weights, {torch.get_num_threads()} threads\n")
    show("| rows | product | ms | x one row | torch / this | GB/s | GOP/s |")
    show("|---|---|---|---|---|---|---|")
    first: dict[str, float] = {}
    for rows in asked.rows:
        inputs = [torch.randn(rows, shape[1]) for shape in SHAPES]
        times = [[once(linears, inputs) for linears in made.values()] for _ in range(asked.rounds)]
        medians = dict(zip(made, map(statistics.median, zip(*times, strict=True)), strict=True))
        for name, taken in medians.items():
            gigabytes = sum(size(linear) for linear in made[name]) / 1e9
            show(
                f"| {rows} | {name} | {taken * 1e3:.1f} | {taken / first.setdefault(name, taken):.2f} "
                f"| {medians['torch'] / taken:.2f} | {gigabytes / taken:.1f} | {2 * weights * rows / taken / 1e9:.0f} |"
            )
    return 0


def size(linear: Linear) -> int:
    """Bytes of a weight as it is kept."""
    assert isinstance(linear.weight, torch.Tensor), "quants keep tensors"
    return linear.weight.nbytes


if __name__ == "__main__":
    sys.exit(main())
