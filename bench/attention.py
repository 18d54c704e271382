"""Attention kernels beside each other: a layer's call on SmolLM2-135M's shapes, and what a step costs the host before.

python -m bench.attention [--rounds 9 --layers 8 --dtype float32 --cases 'decode 64 at 500']. Both kernels run through
all layers' KV in turn, the rounds interleaved; a figure is the median over rounds. The floor is the time to read the
distinct K and V once, at the bandwidth that `bench.floors` measures; contexts that several requests share count once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.floors import bandwidth
from phloem.batch import Batch, GroupSlots
from phloem.interfaces import PluginContext
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.plugins.attention.cpu_paged import CpuAttention
from phloem.plugins.attention.torch_paged import TorchAttention
from phloem.pool import KVStore

HEADS, KV_HEADS, DIM = 9, 3, 64


class Case(NamedTuple):
    """So many segments of so many queries, each over so many entries before, of which all share the first."""

    segments: int
    queries: int
    past: int
    shared: int = 0

    @property
    def entries(self) -> int:
        """Distinct entries of context, the step's own tokens included."""
        return self.shared + self.segments * (self.past - self.shared + self.queries)

    @property
    def products(self) -> int:
        """Pairs of a query and an entry that it sees."""
        return self.segments * self.queries * (2 * self.past + self.queries + 1) // 2


CASES = {f"decode {n} at {past}": Case(n, 1, past) for n in (1, 16, 64) for past in (128, 500, 2000)}
CASES |= {f"decode {n} at {past}, 1000 shared": Case(n, 1, past, 1000) for n in (16, 64) for past in (1032, 1500)}
CASES |= {"verify 8 at 500": Case(1, 8, 500), "verify 16 x 8 at 500": Case(16, 8, 500)}
CASES |= {"64 prompts of 32 at 1024, shared": Case(64, 32, 1024, 1024)}
CASES |= {f"chunk 512 at {past}": Case(1, 512, past) for past in (0, 2000)}


def step_of(case: Case) -> Batch:
    """The step; slots are consecutive, the shared ones first."""
    own = case.past - case.shared + case.queries
    table = np.empty((case.segments, case.past + case.queries), dtype=np.int32)
    table[:, : case.shared] = np.arange(case.shared)
    table[:, case.shared :] = case.shared + np.arange(case.segments * own).reshape(case.segments, own)
    out = torch.from_numpy(table[:, case.past :].astype(np.int64).reshape(-1))
    rows = case.segments * case.queries
    positions = torch.arange(case.past, case.past + case.queries).repeat(case.segments)
    group = GroupSlots(out, torch.from_numpy(table))
    lens = [case.queries] * case.segments, [case.past + case.queries] * case.segments
    return Batch(torch.zeros(rows, dtype=torch.int64), positions, (group,), torch.arange(rows), *lens)


def measure(case: Case, kernels: Sequence[Any], layers: int, dtype: torch.dtype, rounds: int) -> list[list[float]]:
    """Per kernel: median seconds of a layer's call, and of what a step needs besides (its first call less another)."""
    spec = ModelSpec("bench", 1, 1 << 20, (LayerSpec(KV_HEADS, DIM, DIM),) * layers)
    kv = KVStore(spec, [case.entries], [0] * layers, dtype, torch.device("cpu"))
    for tensor in (*kv.keys, *kv.values):
        torch.nn.init.normal_(tensor)
    batch = step_of(case)
    q, k, v = (torch.randn(len(batch.tokens), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    times: list[list[list[float]]] = [[] for _ in kernels]
    for _ in range(rounds + 1):
        for kernel, taken in zip(kernels, times, strict=True):
            marks = [time.perf_counter()]
            attend = kernel.prepare(batch, kv)
            for layer in range(layers):
                attend(layer, q, k, v, scale=DIM**-0.5)
                marks.append(time.perf_counter())
            call = (marks[-1] - marks[1]) / (layers - 1)
            taken.append([call, marks[1] - marks[0] - call])
    return [[statistics.median(column) for column in zip(*taken[1:], strict=True)] for taken in times]


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Print a Markdown table: microseconds, their ratio, and both floors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8, help="each with KV of its own, at least 2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the KV")
    parser.add_argument("--cases", type=lambda text: text.split(","), help="names, as they are printed without commas")
    options = parser.parse_args(arguments)
    dtype: torch.dtype = getattr(torch, options.dtype)
    context = PluginContext("attention", "bench")
    kernels = (CpuAttention(CpuAttention.Options(), context), TorchAttention(TorchAttention.Options(), context))
    chosen = {name.replace(",", ""): case for name, case in CASES.items()}
    with torch.inference_mode():
        read = bandwidth()
        show(f"{torch.get_num_threads()} threads, {read / 1e9:.1f} GB/s, KV in {options.dtype}\n")
        show(
            "| a layer's call | cpu us | torch us | torch / cpu | floor us | cpu / floor | GF/s "
            "| step: cpu us | torch us |"
        )
        show("|---|---|---|---|---|---|---|---|---|")
        for name in options.cases or chosen:
            case = chosen[name]
            (mine, before), (theirs, before_theirs) = measure(case, kernels, options.layers, dtype, options.rounds)
            floor = case.entries * KV_HEADS * DIM * 2 * dtype.itemsize / read
            rate = case.products * HEADS * DIM * 4 / mine / 1e9
            show(
                f"| {name} | {mine * 1e6:.0f} | {theirs * 1e6:.0f} | {theirs / mine:.2f} | {floor * 1e6:.0f} "
                f"| {mine / floor:.1f} | {rate:.0f} | {before * 1e6:.0f} | {before_theirs * 1e6:.0f} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
