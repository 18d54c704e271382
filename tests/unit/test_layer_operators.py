"""The compiled operators of a layer against torch's: rotations, and what goes along with products."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_tiny_model

from bench import step
from phloem.interfaces import PluginContext
from phloem.linear import GATES, Linear, Norm
from phloem.plugins.attention.torch_paged import TorchAttention
from phloem.plugins.model.native import NativeModel
from phloem.plugins.model.native.rotation import compiled, rotate
from phloem.plugins.quant._compiled import Kernel
from phloem.plugins.quant._packed import SOURCE, PackedLinear
from phloem.plugins.quant.none import NoQuant
from phloem.testing.ragged import Part, Ragged

SHAPES = [(1, 1), (3, 5), (16, 8), (33, 7), (100, 129), (576, 192)]  # outputs, inputs
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel(SOURCE)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def exact(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """What torch makes of it in float64."""
    doubled = [None if norm is None else Norm(norm.weight.double(), norm.eps) for norm in (linear.before, linear.after)]
    bias = None if linear.bias is None else linear.bias.double()
    return Linear(linear.floats().double(), bias, before=doubled[0], gate=linear.gate, after=doubled[1])(x.double())


@pytest.mark.parametrize("gate", [None, *GATES])
@pytest.mark.parametrize(("before", "after", "biased"), [(1, 0, 0), (0, 1, 1), (1, 1, 0), (0, 0, 1)])
def test_all_that_goes_along_with_a_product(
    kernel: Kernel, gate: str | None, before: int, after: int, biased: int
) -> None:
    for outputs, inputs in SHAPES:
        n = outputs if gate is None else 2 * outputs
        linear = Linear(
            drawn(n, inputs) / inputs**0.5,
            drawn(n) if biased else None,
            before=Norm(drawn(inputs), 1e-5) if before else None,
            gate=gate,
            after=Norm(drawn(outputs), 1e-2) if after else None,
        )
        packed = PackedLinear(kernel, linear)
        for rows in (1, 2, 7, 13, 40):
            x, total = drawn(rows, 2 * inputs)[:, :inputs], drawn(rows, outputs)  # rows that lie further apart
            expected = exact(linear, x)
            torch.testing.assert_close(packed(x).double(), expected, **CLOSE)
            assert packed.add_to(total, x) is total
            torch.testing.assert_close(total.double(), drawn(rows, outputs) + expected, **CLOSE)


def test_a_residual_between_other_columns(kernel: Kernel) -> None:
    """Nothing beside the output is written, gated and normed neither."""
    for outputs in (5, 16, 37):
        linear = Linear(drawn(2 * outputs, 20), gate="silu", after=Norm(drawn(outputs), 1e-6))
        wide = torch.full((3, 50), 7.0)
        PackedLinear(kernel, linear).add_to(wide[:, :outputs], drawn(3, 20))
        torch.testing.assert_close(wide[:, :outputs].double(), exact(linear, drawn(3, 20)) + 7, **CLOSE)
        assert (wide[:, outputs:] == 7.0).all()


def test_rows_do_not_depend_on_company_or_threads(kernel: Kernel) -> None:
    norms = {"before": Norm(drawn(90), 1e-6), "after": Norm(drawn(150), 1e-6)}
    packed = PackedLinear(kernel, Linear(drawn(300, 90), gate="silu", **norms))
    x = drawn(40, 90)
    together = packed(x)
    for rows in (1, 3, 8, 39):
        assert torch.equal(packed(x[:rows]), together[:rows])
    torch.set_num_threads(3 - torch.get_num_threads())
    assert torch.equal(packed(x), together)


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_exact_over_their_range(kernel: Kernel, gate: str) -> None:
    """Each gate alone: the other half of the outputs is 1. Also values that are large, tiny or no number."""
    values = torch.cat([torch.linspace(-20, 20, 4001), torch.logspace(-30, 4, 400), -torch.logspace(-30, 4, 400)])
    linear = Linear(torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 1.0]), gate=gate)
    got = PackedLinear(kernel, linear)(values[:, None])[:, 0].double()
    x = values.double()
    t = x if gate == "silu" else 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    near = t.abs() < 16
    torch.testing.assert_close(got[near], (x * t.sigmoid())[near], rtol=1e-6 if gate == "silu" else 2e-6, atol=0)
    torch.testing.assert_close(got, x * t.sigmoid(), rtol=1e-6, atol=1e-6)
    odd = PackedLinear(kernel, linear)(torch.tensor([[float("nan")], [1.0]]))
    assert odd[0].isnan()
    assert odd[1].isfinite()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 2), (4, 2, 6), (9, 3, 64), (2, 1, 80), (4, 1, 256)])
def test_rotation(heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    norm = Norm(drawn(heads + kv_heads, dim), 1e-6) if normed else None
    for tokens in (1, 2, 40, 130):
        qkv = drawn(tokens, heads + 2 * kv_heads + 1, dim)[:, :-1]  # tokens that lie further apart
        cos, sin = drawn(tokens, 1, dim), drawn(tokens + 1, 1, dim)[:tokens]
        expected = rotate(qkv, heads, kv_heads, cos, sin, norm)
        got = compiled()(qkv.clone(memory_format=torch.preserve_format), heads, kv_heads, cos, sin, norm)
        for ours, torchs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, torchs, **CLOSE)


def logits(path: Path, product: Any) -> torch.Tensor:
    """Of two texts, a chunk of many rows and then steps of few."""
    quant = NoQuant(NoQuant.Options(product=product), PluginContext("quant", "none"))
    about = PluginContext("model", "native", dtype="float32", extras={"path": str(path), "quant": quant})
    model = NativeModel(NativeModel.Options(), about)
    attention = TorchAttention(TorchAttention.Options(), PluginContext("attention", "torch"))
    ragged = Ragged(model.spec)
    rows = []
    for first, second in ((range(4, 60), range(300, 305)), ([7, 8, 9], [10]), ([60], [61])):
        batch = ragged.step([Part(0, list(first)), Part(1, list(second))])
        rows.append(model.logits(model.forward(batch, attention.prepare(batch, ragged.kv))))
    return torch.cat(rows)


@pytest.mark.parametrize("arch", ["llama3-rope", "qwen2", "qwen3", "gemma3", "lfm2", "mamba2"])
def test_models_say_the_same(arch: str, tmp_path: Path) -> None:
    folder = make_tiny_model(arch, tmp_path)
    torch.testing.assert_close(logits(folder, "packed"), logits(folder, "torch"), rtol=1e-4, atol=1e-4)


def test_the_bench_says_where_time_goes(tmp_path: Path) -> None:
    lines: list[str] = []
    arguments = ["--model", str(make_tiny_model("gemma3", tmp_path)), "--rows", "1", "3", "--rounds", "1"]
    assert step.main([*arguments, "--context", "4"], lines.append) == 0
    assert [line.split("|")[1:3] for line in lines[2:]] == [
        [f" {rows} ", f" {product} "] for rows in (1, 3) for product in ("packed", "torch")
    ]
    assert all(float(line.split("|")[3]) > 0 for line in lines[2:])
