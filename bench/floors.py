"""What the machine allows: read bandwidth, matrix-product rates, and the two floors of a model (design §9).

python -m bench.floors [--layers 30 --hidden 576 ...]; defaults are SmolLM2-135M's shapes. Takes about half a minute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BUFFER_BYTES = 512 * 2**20  # beyond any cache
SIDE = 1024
ROWS = (1, 8, 32, 64, 128)
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Shapes:
    """The weights a step reads and multiplies; embeddings tied to the head count once."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def weights(self) -> int:
        """Elements read per step."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab


def best(work: Callable[[], object], seconds: float = 1.0) -> float:
    """Shortest time of one call, in seconds, over at least three calls and `seconds`."""
    work()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def bandwidth() -> float:
    """Bytes per second of reading: a sum over a buffer, all threads."""
    buffer = torch.ones(BUFFER_BYTES // 4)
    return BUFFER_BYTES / best(lambda: buffer.sum())


def square_rate(dtype: str) -> float:
    """Operations per second of a square product of side 1024, weights and activations in `dtype`."""
    if dtype == "int8":
        a = torch.randint(-8, 8, (SIDE, SIDE), dtype=torch.int8)
        return 2 * SIDE**3 / best(lambda: torch._int_mm(a, a))
    a = torch.randn(SIDE, SIDE).to(getattr(torch, dtype))
    return 2 * SIDE**3 / best(lambda: a @ a)


def decode_rate(rows: int, shapes: Shapes) -> float:
    """Operations per second of `torch.nn.functional.linear` in float32 on the model's shape, weights out of cache."""
    copies = max(2, BUFFER_BYTES // (4 * shapes.hidden * shapes.intermediate))
    weights = [torch.randn(shapes.intermediate, shapes.hidden) for _ in range(copies)]
    x = torch.randn(rows, shapes.hidden)

    def work() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return 2 * rows * shapes.hidden * shapes.intermediate * copies / best(work)


def main(argv: list[str] | None = None) -> int:
    """Measure and print one Markdown table per question."""
    parser = argparse.ArgumentParser(prog="bench.floors", description=(__doc__ or "").split("\n", 1)[0])
    defaults = {"layers": 30, "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64}
    for name, value in {**defaults, "vocab": 49152}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = vars(parser.parse_args(sys.argv[1:] if argv is None else argv))
    torch.set_num_threads(options.pop("threads"))
    shapes = Shapes(**options)
    with torch.inference_mode():
        read = bandwidth()
        rates = {dtype: square_rate(dtype) for dtype in BYTES}
        print(f"| threads | {torch.get_num_threads()} |\n|---|---|\n| read bandwidth | {read / 1e9:.1f} GB/s |")
        for dtype, rate in rates.items():
            print(f"| {dtype} product, {SIDE} cubed | {rate / 1e9:.0f} GOP/s |")
        for rows in ROWS:
            rate = decode_rate(rows, shapes)
            print(f"| float32 linear, {shapes.hidden} x {shapes.intermediate}, {rows} rows | {rate / 1e9:.0f} GOP/s |")
    print(f"\n{shapes.weights / 1e6:.0f} M weights read per step\n")
    print("| precision | one stream, by bandwidth, tokens/s | many, at the rates above, tokens/s |\n|---|---|---|")
    for dtype, size in BYTES.items():
        print(f"| {dtype} | {read / (shapes.weights * size):.1f} | {rates[dtype] / (2 * shapes.weights):.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
