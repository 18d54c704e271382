"""What the machine allows: read bandwidth, matrix-product rates, and the two floors of a model (design §9).

python -m bench.floors [MODEL] [--quant none,bf16,int8,int4,gguf] [--threads 2]; takes about half a minute.

One stream cannot be faster than the weights can be read, a full batch no faster than they can be multiplied.
`bench.run` puts together from both what a workload must take at least: attention, sampling and the host are not in it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch

from phloem.plugins.model._source import open_source, resolve
from phloem.plugins.model._source.gguf_file import GgufFile

BUFFER_BYTES = 512 * 2**20  # beyond any cache
SIDE = 1024
ROWS = (1, 8, 32, 64, 128)
RATES = ("float32", "bfloat16", "int8")
# By `quant.use`: bits that a weight takes at least, with the scales of groups of 32, and what is multiplied. Where it
# is 0 the file says.
QUANTS: Mapping[str, tuple[float, str]] = {
    "none": (32, "float32"),
    "bf16": (16, "bfloat16"),
    "int8": (8, "int8"),
    "int4": (4.5, "int8"),
    "gguf": (0, "int8"),
    "stored": (0, "int8"),
}


class Machine(NamedTuple):
    """Bytes per second of reading, and operations per second of large products by what is multiplied."""

    bandwidth: float
    rates: dict[str, float]


class Weights(NamedTuple):
    """What a step reads and multiplies: elements of the layers' matrices and of the head's, bytes of both, as what."""

    body: int
    head: int
    bytes: float
    product: str

    def seconds(self, rows: int, sampled: int, machine: Machine) -> float:
        """The least time of a pass over so many tokens, of which so many need logits."""
        operations = 2 * (self.body * rows + self.head * sampled)
        return max(self.bytes / machine.bandwidth, operations / machine.rates[self.product])


def floor(passes: Sequence[Sequence[int]], weights: Weights, machine: Machine) -> float:
    """The least seconds of a run, its passes as `bench.workloads.passes` gives them."""
    return sum(times * weights.seconds(rows, sampled, machine) for rows, sampled, times in passes)


def weights_of(model: str, quant: str) -> Weights:
    """The weights of a model (name, folder or file) at a precision. Raises ModelError, ValueError."""
    path = resolve(model)
    if quant not in QUANTS:
        raise ValueError(f"how much {quant!r} reads is not known; floors are known for {', '.join(QUANTS)}")
    body, head = matrices(open_source(path).config)
    bits, product = QUANTS[quant]
    if bits:
        return Weights(body, head, (body + head) * bits / 8, product)
    if not Path(path).is_file():
        raise ValueError(f"{path} is no GGUF file")
    return Weights(body, head, stored(GgufFile(Path(path))), product)


def matrices(config: Mapping[str, Any]) -> tuple[int, int]:
    """Elements of the layers' matrices, and of the output head's; the embedding is only looked up."""
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * 2 * (heads + config.get("num_key_value_heads", heads))
        layer = attention + 3 * hidden * config["intermediate_size"]
        return config["num_hidden_layers"] * layer, hidden * config["vocab_size"]
    except KeyError as error:
        raise ValueError(f"floors are known for Llama-like models; this one's config has no {error}") from error


def stored(file: GgufFile) -> float:
    """Bytes of a file's matrices as they are stored; a tied embedding is the head."""
    shown = {name: info for name, info in file.tensors.items() if len(info.shape) == 2}
    if "output.weight" in shown:
        del shown["token_embd.weight"]
    sizes = [(math.prod(info.shape), gguf.GGML_QUANT_SIZES[info.kind]) for info in shown.values()]
    return float(sum(elements // block * size for elements, (block, size) in sizes))


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


def decode_rate(rows: int, width: int, outputs: int) -> float:
    """Operations per second of `torch.nn.functional.linear` in float32 at the model's sizes, weights out of cache."""
    copies = max(2, BUFFER_BYTES // (4 * width * outputs))
    weights = [torch.randn(outputs, width) for _ in range(copies)]
    x = torch.randn(rows, width)

    def work() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return 2 * rows * width * outputs * copies / best(work)


def measure() -> Machine:
    """This machine, with as many threads as torch has now. Takes about four seconds."""
    with torch.inference_mode():
        return Machine(bandwidth(), {dtype: square_rate(dtype) for dtype in RATES})


def main(argv: list[str] | None = None) -> int:
    """Measure and print one Markdown table per question."""
    parser = argparse.ArgumentParser(prog="bench.floors", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--quant", default=",".join(QUANTS), help="precisions; gguf for GGUF files only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(options.threads)
    config = open_source(resolve(options.model)).config
    machine = measure()
    print(f"| threads | {torch.get_num_threads()} |\n|---|---|")
    print(f"| read bandwidth | {machine.bandwidth / 1e9:.1f} GB/s |")
    for dtype, rate in machine.rates.items():
        print(f"| {dtype} product, {SIDE} cubed | {rate / 1e9:.0f} GOP/s |")
    with torch.inference_mode():
        width, outputs = config["hidden_size"], config["intermediate_size"]
        for rows in ROWS:
            rate = decode_rate(rows, width, outputs)
            print(f"| float32 linear, {width} x {outputs}, {rows} rows | {rate / 1e9:.0f} GOP/s |")
    print("\n| quant | weights a step, MB | one stream, by bandwidth, tokens/s | many, by operations, tokens/s |")
    print("|---|---|---|---|")
    for quant in options.quant.split(","):
        try:
            found = weights_of(options.model, quant)
        except ValueError as error:
            print(f"| {quant} | {error} | | |")
            continue
        many = machine.rates[found.product] / (2 * (found.body + found.head))
        print(f"| {quant} | {found.bytes / 1e6:.0f} | {machine.bandwidth / found.bytes:.1f} | {many:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
