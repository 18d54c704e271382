"""Where a decode step's CPU time goes, by part and rows: `python -m bench.step [--model smollm2-135m] [--json PATH]`.

One thread, and the time that this thread has computed, so other programs disturb little (they still take bandwidth and
cache). No engine: the model's forward pass and output head over `rows` requests of `--context` tokens each, with the
compiled operators and with torch's (`quant: {use: none, product: torch}`), a step of each in turn; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from phloem.interfaces import PluginContext
from phloem.plugins.attention.cpu_paged import CpuAttention
from phloem.plugins.model.native import NativeModel
from phloem.plugins.model.native.rotation import rotate
from phloem.plugins.quant.none import NoQuant
from phloem.testing.ragged import Part, Ragged

ROWS = (1, 8, 64)
PARTS = ("matrices", "rotation", "attention", "head", "rest")
MATRICES = ("project", "qkv", "out", "gate_up", "down")  # of the kinds of layers, with the norms that go along


class Timed:
    """A callable of the model, and its `add_to`, with the seconds that they take."""

    def __init__(self, inner: Any, part: str, spent: dict[str, float]) -> None:
        self._inner, self._part, self._spent = inner, part, spent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called as the inner one is."""
        return self._time(self._inner, *args, **kwargs)

    def add_to(self, *args: Any) -> Any:
        """As `Linear.add_to`."""
        return self._time(self._inner.add_to, *args)

    def _time(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        result = function(*args, **kwargs)
        self._spent[self._part] += time.thread_time() - begin
        return result


class Stepper:
    """A model and its texts, which become a token longer with each step."""

    def __init__(self, path: str, product: Literal["packed", "torch"], rows: int, context: int, rounds: int) -> None:
        quant = NoQuant(NoQuant.Options(product=product), PluginContext("quant", "none", dtype="float32"))
        about = PluginContext("model", "native", dtype="float32", extras={"path": path, "quant": quant})
        self.model = NativeModel(NativeModel.Options(), about)
        self.spent: dict[str, float] = defaultdict(float)
        for layer in self.model._layers:
            for name in MATRICES:
                if hasattr(layer, name):
                    setattr(layer, name, Timed(getattr(layer, name), "matrices", self.spent))
            if hasattr(layer, "rotate"):
                layer.rotate = Timed(layer.rotate if product == "packed" else rotate, "rotation", self.spent)
        self._attention = CpuAttention(CpuAttention.Options(), PluginContext("attention", "cpu"))
        self._rows = rows
        self._ragged = Ragged(self.model.spec, slots=rows * (context + rounds + 2))
        for row in range(rows):
            self._pass([Part(row, range(4, 4 + context))])

    def step(self) -> dict[str, float]:
        """Milliseconds of one step by part."""
        self.spent.clear()
        begin = time.thread_time()
        self._pass([Part(row, [5]) for row in range(self._rows)])
        whole = time.thread_time() - begin
        self.spent["rest"] = whole - sum(self.spent.values())
        return {part: 1e3 * self.spent[part] for part in PARTS} | {"whole": 1e3 * whole}

    def _pass(self, parts: Sequence[Part]) -> None:
        batch = self._ragged.step(parts)
        attend = Timed(self._attention.prepare(batch, self._ragged.kv), "attention", self.spent)
        hidden = self.model.forward(batch, attend)
        Timed(self.model.logits, "head", self.spent)(hidden[-self._rows :])


def measure(path: str, rows: int, context: int, rounds: int) -> list[dict[str, Any]]:
    """A row for the compiled operators and one for torch's."""
    steppers = {name: Stepper(path, name, rows, context, rounds) for name in ("packed", "torch")}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in steppers}
    for _ in range(rounds):
        for name, stepper in steppers.items():
            taken[name].append(stepper.step())
    return [
        {"rows": rows, "product": name}
        | {part: statistics.median(each[part] for each in steps) for part in (*PARTS, "whole")}
        for name, steps in taken.items()
    ]


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Print a Markdown table of milliseconds, and keep it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        table = [row for rows in options.rows for row in measure(options.model, rows, options.context, options.rounds)]
    finally:
        torch.set_num_threads(threads)
    show("| rows | product | " + " | ".join((*PARTS, "whole")) + " |")
    show("|" + "---|" * (len(PARTS) + 3))
    for row in table:
        figures = " | ".join(f"{row[part]:.2f}" for part in (*PARTS, "whole"))
        show(f"| {row['rows']} | {row['product']} | {figures} |")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
