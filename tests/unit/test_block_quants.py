"""Products over blocks of few bits: against the gguf library's weights, and exactly against integers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from phloem.errors import PluginError
from phloem.interfaces import PluginContext
from phloem.linear import GATES, Blocks, Linear, Norm
from phloem.plugins.quant._blocks import BlockLinear
from phloem.plugins.quant._blocks_kinds import KINDS, to_q8_0
from phloem.plugins.quant.gguf import GgufBlocks
from phloem.plugins.quant.int4 import Int4

ROWS = (1, 2, 7, 31, 32, 33, 64, 100)


def context(**changes: str) -> PluginContext:
    return PluginContext("quant", "gguf", **{"device": "cpu", "dtype": "float32", **changes})


@pytest.fixture(scope="module")
def quant() -> GgufBlocks:
    return GgufBlocks(GgufBlocks.Options(), context())


@pytest.fixture(scope="module")
def int4() -> Int4:
    return Int4(Int4.Options(), context())


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(kind: str, rows: int, inputs: int, seed: int = 1) -> torch.Tensor:
    """Blocks of any values, whose floats are of a sensible size."""
    size, (values, _) = KINDS[kind].size, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = torch.randint(0, 256, (rows, inputs // values, size), generator=torch.Generator().manual_seed(seed))
    made = made.to(torch.uint8)
    first, floats = (208, 1) if kind == "Q6_K" else (0, 1 if kind in ("Q4_0", "Q5_0", "Q8_0") else 2)
    numbers = drawn(rows, inputs // values, floats, seed=seed + 1) * 0.01
    made[..., first : first + 2 * floats] = numbers.half().view(torch.uint8)
    return made.flatten(1)


def read(kind: str, raw: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]).astype(np.float32))


def blocks(*parts: tuple[str, int], inputs: int) -> Blocks:
    made = tuple((kind, stored(kind, rows, inputs, seed=10 * i)) for i, (kind, rows) in enumerate(parts))
    return Blocks(made, inputs, read)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x in 8 bits, 32 values to a scale: float64."""
    inputs = x.shape[1]
    apart = torch.nn.functional.pad(x, (0, -inputs % 32)).unflatten(1, (-1, 32))
    largest = apart.abs().amax(-1, keepdim=True)
    q = (apart * torch.where(largest > 0, 127 / largest, 0)).round()
    return (q.double() * (largest / 127).double()).flatten(1)[:, :inputs]


def close(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """y is rounded(x) @ weight.T: the integers exactly, up to float32's rounding of what is summed."""
    x, weight = rounded(x), weight.double()
    scale = x.abs() @ weight.abs().T
    assert ((y.double() - x @ weight.T).abs() <= 2e-6 * scale + 1e-30).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_what_the_library_reads(quant: GgufBlocks, kind: str) -> None:
    weight = blocks((kind, 70), inputs=512)
    linear = quant.linear(Linear(weight))
    torch.testing.assert_close(linear.rows(torch.arange(70)), weight.dequantise(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (33, 256), (100, 768)])
def test_a_product_is_exact_in_integers(quant: GgufBlocks, threads: None, kind: str, outputs: int, inputs: int) -> None:
    weight = blocks((kind, outputs), inputs=inputs)
    linear = quant.linear(Linear(weight))
    floats = weight.dequantise()
    for rows in ROWS:
        x = drawn(rows, inputs, seed=rows) * 10
        close(linear(x), x, floats)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_the_inputs_costs_at_most_half_a_step(quant: GgufBlocks, kind: str) -> None:
    """Each input is off by at most half of 1/127 of the largest of its block: times the sum of the weights there."""
    weight, x = blocks((kind, 40), inputs=512), drawn(9, 512)
    floats = weight.dequantise()
    step = x.unflatten(1, (-1, 32)).abs().amax(-1) / 127
    bound = step / 2 @ floats.abs().unflatten(1, (-1, 32)).sum(-1).T
    assert ((quant.linear(Linear(weight))(x) - x @ floats.T).abs() <= 1.001 * bound).all()


@pytest.mark.parametrize("inputs", [1, 5, 31, 33, 129])
def test_floats_of_any_width_become_eight_bits(quant: GgufBlocks, inputs: int) -> None:
    weight, x = drawn(37, inputs), drawn(33, inputs, seed=2)
    linear = quant.linear(Linear(weight))
    kept = read("Q8_0", to_q8_0(weight))[:, :inputs]
    assert ((kept - weight).abs() <= weight.abs().amax() / 127).all()
    close(linear(x), x, kept)
    torch.testing.assert_close(linear.rows(torch.tensor([36, 0])), kept[[36, 0]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("parts", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "Q5_0", "Q8_0"), ("Q4_1", "Q4_0", "Q5_1")])
def test_parts_of_several_kinds(quant: GgufBlocks, parts: tuple[str, ...]) -> None:
    weight = blocks(*zip(parts, (64, 32, 30), strict=True), inputs=256)
    linear = quant.linear(Linear(weight))
    assert isinstance(linear, BlockLinear)
    assert len(linear._strips.kinds.unique()) == len(set(parts))
    x = drawn(40, 256)
    close(linear(x), x, weight.dequantise())


def test_parts_that_end_inside_a_strip_become_eight_bits(quant: GgufBlocks) -> None:
    weight, x = blocks(("Q4_K", 33), ("Q6_K", 20), inputs=256), drawn(3, 256)
    linear = quant.linear(Linear(weight))
    assert isinstance(linear, BlockLinear)
    assert linear._strips.kinds.unique().tolist() == [KINDS["Q8_0"].number]
    close(linear(x), x, read("Q8_0", to_q8_0(weight.dequantise())))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("parts", [(("Q4_1", 74),), (("Q5_0", 37), ("Q8_0", 37)), (("Q4_K", 32), ("Q6_K", 32))])
def test_what_goes_along(quant: GgufBlocks, threads: None, gate: str, parts: tuple[tuple[str, int], ...]) -> None:
    weight = blocks(*parts, inputs=256)
    n = weight.shape[0]
    along = {"before": Norm(drawn(256), 1e-5), "after": Norm(drawn(n // 2, seed=3), 1e-6)}
    linear = quant.linear(Linear(weight, drawn(n), gate=gate, **along))
    for rows in (1, 5, 40):
        x, total = drawn(rows, 300)[:, :256], drawn(rows, n // 2, seed=4)
        y = (rounded(along["before"](x)) @ weight.dequantise().double().T + drawn(n)).float()
        y = along["after"](GATES[gate](y[:, : n // 2]) * y[:, n // 2 :])
        # a value at the edge of two steps may go to either, as the norm's last bit has it
        torch.testing.assert_close(linear(x), y, rtol=2e-2, atol=5e-3)
        torch.testing.assert_close(linear.add_to(total.clone(), x), total + y, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_a_row_does_not_depend_on_its_company(quant: GgufBlocks, kind: str) -> None:
    linear = quant.linear(Linear(blocks((kind, 1200), inputs=256), before=Norm(drawn(256), 1e-5)))
    x, before = drawn(512, 256), torch.get_num_threads()
    together = linear(x)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 3, 31, 33, 100, 512):
                assert torch.equal(linear(x[:rows]), together[:rows])
                assert torch.equal(linear(x[-rows:]), together[-rows:])
    finally:
        torch.set_num_threads(before)


def test_a_few_outputs_are_those_of_all(quant: GgufBlocks) -> None:
    linear, x = quant.linear(Linear(blocks(("Q4_1", 200), inputs=256))), drawn(1, 256)
    some = torch.tensor([199, 0, 17, 16])
    torch.testing.assert_close(linear.at(x[0], some), linear(x)[0, some], rtol=1e-5, atol=1e-5)


def test_what_is_no_number_stays_in_its_row(quant: GgufBlocks) -> None:
    linear, x = quant.linear(Linear(blocks(("Q4_1", 40), inputs=256))), drawn(4, 256)
    x[1, 3], x[3, 100] = float("nan"), float("inf")
    finite = linear(x).isfinite()
    assert finite[[0, 2]].all()
    assert not finite[[1, 3]].any()
    assert (linear(torch.zeros(2, 256)) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_the_file(quant: GgufBlocks, kind: str) -> None:
    """Factors of 6 bits take a byte each."""
    most = 1.04 if kind in ("Q4_K", "Q5_K") else 1.01
    weight = blocks((kind, 256), inputs=2048)
    linear = quant.linear(Linear(weight))
    assert linear.weight.nbytes <= most * weight.parts[0][1].nbytes


def test_four_bits_of_floats(int4: Int4) -> None:
    weight, x = drawn(70, 100), drawn(5, 100, seed=2)
    linear = int4.linear(Linear(weight))
    kept = linear.rows(torch.arange(70))
    close(linear(x), x, kept)
    ends = torch.nn.functional.pad(weight, (0, 28)).unflatten(1, (-1, 32))[:, :3]
    low, high = ends.amin(-1, keepdim=True), ends.amax(-1, keepdim=True)
    plain = low + ((ends - low) * 15 / (high - low)).round() * (high - low) / 15
    assert (kept[:, :96] - weight[:, :96]).pow(2).mean() < 0.95 * (plain.flatten(1) - weight[:, :96]).pow(2).mean()


def test_what_has_four_bits_already_keeps_its_values(int4: Int4) -> None:
    raw = gguf.quantize(drawn(40, 256).numpy(), gguf.GGMLQuantizationType.Q4_1)
    weight = read("Q4_1", torch.from_numpy(raw))
    torch.testing.assert_close(int4.linear(Linear(weight)).rows(torch.arange(40)), weight, rtol=2e-3, atol=1e-3)


def test_a_matrix_with_a_row_for_each_token_gets_eight_bits(int4: Int4) -> None:
    for outputs, kind in ((512, "Q8_0"), (500, "Q4_1")):
        linear = int4.linear(Linear(drawn(outputs, 32)))
        assert isinstance(linear, BlockLinear)
        assert set(linear._strips.kinds.tolist()) == {KINDS[kind].number}


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-3])
def test_one_value_throughout_is_kept(int4: Int4, value: float) -> None:
    kept = int4.linear(Linear(torch.full((3, 40), value))).rows(torch.arange(3))
    torch.testing.assert_close(kept, torch.full((3, 40), value), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("changes", [{"device": "cuda"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("plugin", [GgufBlocks, Int4])
def test_other_devices_and_dtypes_are_refused(plugin: type[GgufBlocks] | type[Int4], changes: dict[str, str]) -> None:
    with pytest.raises(PluginError, match="is for float32 on a CPU"):
        plugin(plugin.Options(), context(**changes))
