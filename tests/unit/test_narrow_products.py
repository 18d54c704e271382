"""Products over weights of 16 and 8 bits: what is rounded, by how much, and that all else is float32's arithmetic."""

from __future__ import annotations

import pytest
import torch

from phloem.errors import ModelError, PluginError
from phloem.interfaces import PluginContext
from phloem.linear import Linear, Norm
from phloem.plugins.quant._tiles import TileKernel
from phloem.plugins.quant.bf16 import Bf16, Bf16Linear
from phloem.plugins.quant.int8 import Int8, Int8Linear

CPU = PluginContext("quant", "narrow", device="cpu", dtype="float32")
KINDS: dict[str, type[Bf16Linear] | type[Int8Linear]] = {"bf16": Bf16Linear, "int8": Int8Linear}
SHAPES = [(1, 1), (3, 5), (33, 64), (100, 129), (300, 576)]
ROWS = [1, 5, 8, 12, 13, 16, 17, 31, 32, 33, 64, 100]


@pytest.fixture(scope="module", params=["matrix unit", "vectors"])
def kernels(request: pytest.FixtureRequest) -> dict[str, TileKernel]:
    made = {name: TileKernel(name, CPU) for name in KINDS}
    for kernel in made.values():
        if request.param == "vectors":
            kernel.unit = False
        elif not kernel.unit:
            pytest.skip("this machine has no matrix unit")
    return made


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def taken(kernel: TileKernel, x: torch.Tensor) -> torch.Tensor:
    """x [T, in] as the kernel rounds it, in doubles."""
    made = torch.empty_like(x)
    for row, to in zip(x, made, strict=True):
        kernel.taken(row.data_ptr(), x.shape[1], to.data_ptr())
    return made.double()


def step(name: str, values: torch.Tensor, largest: int) -> torch.Tensor:
    """The most that rounding may change values [rows, in] by, where `largest` is the largest integer."""
    if name == "bf16":
        return values.abs() * 2.0**-8
    return (values.abs().amax(1, keepdim=True) / (2 * largest) * 1.01).expand_as(values)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_product(kernels: dict[str, TileKernel], threads: None, name: str, outputs: int, inputs: int) -> None:
    kernel, weight = kernels[name], drawn(outputs, inputs)
    bias = drawn(outputs)
    plain, with_bias = (KINDS[name](kernel, Linear(weight, given)) for given in (None, bias))
    rounded = plain.rows(torch.arange(outputs))
    assert ((rounded - weight).abs() <= step(name, weight, 127)).all()
    many = drawn(512, inputs)
    together = plain(many)
    for rows in ROWS:
        x, total = many[:rows], drawn(rows, outputs)
        seen = taken(kernel, x)
        assert ((seen - x).abs() <= step(name, x, 128 * 127)).all()
        exact, close = seen @ rounded.double().T, {"rtol": 1e-5, "atol": 1e-5 * inputs**0.5}
        torch.testing.assert_close(plain(x).double(), exact, **close)
        torch.testing.assert_close(with_bias.add_to(total.clone(), x).double(), exact + bias + total, **close)
        assert torch.equal(plain(x), together[:rows]), "a row depends on its company"


@pytest.mark.parametrize("name", KINDS)
def test_what_goes_along(kernels: dict[str, TileKernel], threads: None, name: str) -> None:
    """Norms, gates and residuals: as with the plain Linear over what the weights were rounded to."""
    kernel, (outputs, inputs) = kernels[name], (90, 70)
    weight, bias = drawn(2 * outputs, inputs), drawn(2 * outputs)
    rounded = KINDS[name](kernel, Linear(weight)).rows(torch.arange(2 * outputs))
    for gate in (None, "silu", "gelu_pytorch_tanh"):
        width = 2 * outputs if gate is None else outputs
        before, after = Norm(drawn(inputs), 1e-5), Norm(drawn(width), 1e-6)
        mine = KINDS[name](kernel, Linear(weight, bias, before=before, gate=gate, after=after))
        theirs = Linear(rounded, bias, gate=gate, after=after)
        for rows in (1, 7, 40):
            x, total = drawn(rows, inputs) * 3, drawn(rows, width)
            exact = theirs(taken(kernel, before(x)).float())
            torch.testing.assert_close(mine(x), exact, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.add_to(total.clone(), x), exact + total, rtol=1e-4, atol=1e-4)
            assert torch.equal(mine(x)[:1], mine(x[:1]))


@pytest.mark.parametrize("name", KINDS)
def test_views_and_columns(kernels: dict[str, TileKernel], name: str) -> None:
    kernel, weight, wide = kernels[name], drawn(70, 40), drawn(9, 100)
    product = KINDS[name](kernel, Linear(weight))
    x = wide[:, 7:47]
    whole = product(x)
    assert torch.equal(whole, product(x.contiguous()))
    assert torch.equal(whole, product(x.T.contiguous().T))
    y = torch.full((9, 80), 7.0)
    product._multiply(x, y[:, :70], add=False)
    assert (y[:, 70:] == 7.0).all()
    outputs = torch.tensor([69, 0, 31, 32])
    torch.testing.assert_close(product.at(x[3], outputs), whole[3, outputs], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_not_a_number_stays_one(kernels: dict[str, TileKernel], name: str, odd: float) -> None:
    x = torch.zeros(2, 20)
    x[1, 3] = odd
    y = KINDS[name](kernels[name], Linear(drawn(20, 20)))(x)
    assert (y[0] == 0).all()
    assert not y[1].isfinite().any()


def test_integers_are_the_same_on_all_units(kernels: dict[str, TileKernel]) -> None:
    """Sums are exact, so a machine's unit cannot be told from its results."""
    weight, x = drawn(50, 200), drawn(40, 200)
    other = TileKernel("int8", CPU)
    assert torch.equal(Int8Linear(kernels["int8"], Linear(weight))(x), Int8Linear(other, Linear(weight))(x))


@pytest.mark.parametrize(("name", "share"), [("bf16", 0.5), ("int8", 0.25)])
def test_a_weight_takes_its_share_of_memory(kernels: dict[str, TileKernel], name: str, share: float) -> None:
    weight = KINDS[name](kernels[name], Linear(drawn(960, 576))).weight
    assert isinstance(weight, torch.Tensor)
    assert weight.nbytes == 960 * 576 * 4 * share


def test_what_does_not_apply_is_refused() -> None:
    with pytest.raises(PluginError, match=r"bf16 is for float32 on a CPU, not bfloat16 on cpu"):
        Bf16(Bf16.Options(), PluginContext("quant", "narrow", device="cpu", dtype="bfloat16"))
    with pytest.raises(PluginError, match=r"int8 is for float32 on a CPU, not auto on cuda"):
        Int8(Int8.Options(), PluginContext("quant", "narrow", device="cuda", dtype="auto"))
    with pytest.raises(ModelError, match=r"at most 131,072 inputs, a matrix has 131,073"):
        Int8(Int8.Options(), CPU).linear(Linear(torch.empty(1, (1 << 17) + 1)))
