"""What a quant is given while a model loads: each matrix once, whole, as soon as it is read; floats are let go of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import convert

from phloem import Engine
from phloem.errors import ConfigError, ModelError
from phloem.interfaces import PluginContext
from phloem.linear import Blocks, Linear
from phloem.plugins.model.native import NativeModel
from phloem.plugins.model.native.weights import Weights
from phloem.plugins.quant.none import NoQuant

Tiny = Callable[[str], Path]


class Recorder:
    """A quant that notes what it is given, and keeps halves."""

    def __init__(self, *blocks: str) -> None:
        self.blocks = frozenset(blocks)
        self.given: list[Linear] = []
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def linear(self, linear: Linear) -> Linear:
        weight = linear.floats()
        self.alive = [ref for ref in self.alive if ref() is not None]
        if isinstance(linear.weight, torch.Tensor):
            self.alive.append(weakref.ref(linear.weight))
        self.most = max(self.most, len(self.alive))
        made = Linear(weight.half().float(), linear.bias, before=linear.before, gate=linear.gate, after=linear.after)
        self.given.append(Linear(linear.weight) if isinstance(linear.weight, Blocks) else made)
        return made


def load(path: Path, quant: Any) -> NativeModel:
    extras = {"path": str(path), "quant": quant}
    return NativeModel(NativeModel.Options(), PluginContext("model", "native", extras=extras))


@pytest.mark.parametrize(("arch", "layer", "others"), [("qwen2", 4, 2), ("gemma3", 4, 1), ("mamba2", 2, 1)])
def test_every_matrix_once_and_one_at_a_time(tiny_model: Tiny, arch: str, layer: int, others: int) -> None:
    """Fused where they read the same; embedding and head are two, or one where they are tied."""
    recorder = Recorder()
    model = load(tiny_model(arch), recorder)
    others = 1 if model.arch.tied else 2
    assert len(recorder.given) == layer * model.spec.depth + others
    assert recorder.most == 1
    made = {id(linear) for linear in recorder.given}
    assert {id(model._head), id(model._words)} <= made
    for block in model._layers:
        assert sum(id(value) in made for value in vars(block).values()) == layer


def test_a_matrix_is_made_before_the_next_tensor_is_read() -> None:
    recorder, read = Recorder(), list[str]()
    weights = Weights(torch.float32, torch.device("cpu"), recorder)
    holder: Any = type("Holder", (), {})()
    for name in ("first", "second"):
        weights.linear((holder, name), {f"{name}.a": 2, f"{name}.b": 3}, 4)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("second.b", "first.a", "second.a", "first.b"):
            read.append(f"{name} after {len(recorder.given)}")
            rows = 2 if name.endswith("a") else 3
            yield name, torch.full((rows, 4), float(len(read)), dtype=torch.bfloat16)

    weights.fill(tensors(), ())
    assert read == ["second.b after 0", "first.a after 0", "second.a after 0", "first.b after 1"]
    assert holder.first.weight[:, 0].tolist() == [2, 2, 4, 4, 4]
    assert holder.second.weight[:, 0].tolist() == [3, 3, 1, 1, 1]


def test_blocks_arrive_as_they_are_stored(tiny_model: Tiny, tmp_path: Path) -> None:
    """Parts may differ in kind; where one is stored otherwise the whole comes as floats; the numbers are the file's."""

    def stored(name: str) -> str:
        if "ffn_up" in name or "attn_v" in name:
            return "Q4_1"
        return "F16" if "attn_output" in name or "ffn_gate" in name else "Q8_0"

    file = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama", stored=stored)
    recorder = Recorder("Q8_0", "Q4_1")
    model = load(file, recorder)
    kinds = [
        tuple(kind for kind, _ in given.weight.parts) for given in recorder.given if isinstance(given.weight, Blocks)
    ]
    layers = model.spec.depth
    assert sorted(set(kinds)) == [("Q8_0",), ("Q8_0", "Q8_0", "Q4_1")]
    assert kinds.count(("Q8_0", "Q8_0", "Q4_1")) == layers
    plain = load(file, Recorder())
    for ours, theirs in zip(model._layers, plain._layers, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            assert torch.equal(getattr(ours, name).weight, getattr(theirs, name).weight)
    tokens = torch.arange(40)
    assert torch.equal(model.embed(tokens), plain.embed(tokens))


def test_blocks_that_do_not_fit_are_named(tiny_model: Tiny) -> None:
    weights = Weights(torch.float32, torch.device("cpu"), Recorder("Q8_0"))
    holder: Any = type("Holder", (), {})()
    weights.linear((holder, "it"), {"it": 2}, 64)
    bias = weights.vector({"bias": 32})
    form = gguf.GGMLQuantizationType.Q8_0

    def read(kind: str, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))

    def blocks(rows: int) -> Blocks:
        values = torch.ones(rows, 32)
        return Blocks((("Q8_0", torch.from_numpy(gguf.quantize(values.numpy(), form))),), 32, read)

    with pytest.raises(ModelError, match=r"it is \[2, 32\], expected \[2, 64\]; missing tensor bias"):
        weights.fill([("it", blocks(2))], ())
    assert len(bias) == 32


def test_a_quant_is_named_where_it_cannot_be_used(tiny_model: Tiny) -> None:
    with pytest.raises(ConfigError, match="no quant plugin is named 'int9'"):
        Engine(str(tiny_model("llama")), quant="int9", grammar="none")
    with pytest.raises(ConfigError, match=r"quant.produkt: unknown key \(did you mean 'product'\?\)"):
        Engine(str(tiny_model("llama")), quant={"use": "none", "produkt": "torch"}, grammar="none")


def test_the_packed_product_is_for_float32_on_cpus() -> None:
    for device, dtype in (("cuda", "auto"), ("cpu", "bfloat16")):
        context = PluginContext("quant", "none", device=device, dtype=dtype)
        with pytest.raises(Exception, match=f"packed is for float32 on a CPU, not {dtype} on {device}"):
            NoQuant(NoQuant.Options(product="packed"), context)
        linear = Linear(torch.ones(2, 2))
        assert NoQuant(NoQuant.Options(), context).linear(linear) is linear
