"""Conformance of kind `quant`: a linear map is what it was but for rounding, however many rows and threads there are.

class TestMine(QuantSuite):
    plugin = MyQuant
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
import torch

from ..interfaces import PluginContext, Quant
from ..linear import GATES, Blocks, Linear, Norm
from .plugin import PluginSuite

SHAPES = ((5, 32), (37, 96), (64, 64), (130, 160), (48, 576))  # outputs, inputs
ROWS = (1, 2, 3, 7, 12, 13, 33, 64)
ALONG: Sequence[tuple[bool, str | None, bool, bool]] = (  # before, gate, after, bias
    (False, None, False, False),
    (True, None, False, True),
    (False, "silu", True, False),
    (True, "gelu_pytorch_tanh", False, True),
    (True, "silu", True, True),
)


class QuantSuite(PluginSuite):
    """Subclass it in a test module and set `plugin` to the class under test. On a CPU, in float32."""

    kind = "quant"
    tolerance: ClassVar[float] = 0.25  # of products beside those of the given weights: relative, all outputs together
    rounding: ClassVar[float] = 0.03  # likewise beside those of its own weights, as `rows` tells them
    bits: ClassVar[bool] = False  # rows are the same to the last bit in any company

    def make(self) -> Quant:
        """A fresh instance of the plugin under test."""
        quant: Quant = self.plugin(self.plugin.Options(**self.options), PluginContext(self.kind, "under test"))
        return quant

    @pytest.fixture(autouse=True, params=[1, 2])
    def threads(self, request: pytest.FixtureRequest) -> Iterator[int]:
        """Of torch."""
        before = torch.get_num_threads()
        torch.set_num_threads(request.param)
        yield request.param
        torch.set_num_threads(before)

    @pytest.mark.parametrize(("before", "gate", "after", "bias"), ALONG)
    def test_products(self, before: bool, gate: str | None, after: bool, bias: bool) -> None:
        """Beside the definition in float64, on the given weights and on the quant's own; alone and added to a sum."""
        quant = self.make()
        for outputs, inputs in SHAPES:
            weight = drawn(outputs if gate is None else 2 * outputs, inputs) / inputs**0.5
            along = Linear(
                weight,
                drawn(len(weight)) if bias else None,
                before=Norm(drawn(inputs), 1e-5) if before else None,
                gate=gate,
                after=Norm(drawn(outputs), 1e-2) if after else None,
            )
            own = quant.linear(Linear(weight.clone())).rows(torch.arange(len(weight)))
            made = quant.linear(with_weight(along, weight.clone()))
            for rows in ROWS:
                x, total = drawn(rows, 2 * inputs)[:, :inputs], drawn(rows, outputs)  # rows that lie further apart
                got = made(x)
                assert (got.shape, got.dtype) == ((rows, outputs), torch.float32)
                assert_near(got, exact(along, weight, x), self.tolerance)
                assert_near(got, exact(along, own, x), self.rounding)
                assert made.add_to(total, x) is total
                assert_near(total - drawn(rows, outputs), got, 1e-5)

    @pytest.mark.parametrize("gate", [None, *GATES])
    def test_company_changes_nothing(self, gate: str | None, threads: int) -> None:
        """A row alone, among few, among many, on more threads."""
        made = self.make().linear(Linear(drawn(150, 96), before=Norm(drawn(96), 1e-5), gate=gate))
        x = drawn(130, 96)
        x[5] *= 1e3  # how large others are is nothing to a row
        whole = made(x)
        for rows in (1, 2, 8, 33):
            for first in (0, 64, 130 - rows):
                self._same(made(x[first : first + rows]), whole[first : first + rows])
        torch.set_num_threads(3 - threads)
        self._same(made(x), whole)

    def test_columns_are_those_of_the_product(self) -> None:
        """`at`, which grammars that allow little ask of the head: any outputs, in any order."""
        made = self.make().linear(Linear(drawn(131, 64)))
        x = drawn(3, 64)
        whole = made(x)
        for row in range(3):
            for outputs in ([130], [0, 130, 64, 1], list(range(131))):
                assert_near(made.at(x[row], torch.tensor(outputs)), whole[row, outputs], 1e-4)

    def test_rows_are_floats_of_ones_own(self) -> None:
        """`rows`, the embedding of a tied head: float32, near the weight's, and the caller's to write to."""
        weight = drawn(100, 64)
        made = self.make().linear(Linear(weight.clone()))
        tokens = torch.tensor([99, 0, 17, 0])
        rows = made.rows(tokens)
        assert rows.dtype == torch.float32
        assert_near(rows, weight[tokens], self.tolerance)
        expected = rows.clone()
        rows.zero_()
        assert torch.equal(made.rows(tokens), expected)

    def test_the_weight_is_not_kept(self) -> None:
        """Memory holds the quantised model and one matrix; only what takes the weight as it is may keep it."""
        weight, quant = drawn(64, 64), self.make()  # which lives as long as the model
        gone = weakref.ref(weight)
        made = quant.linear(Linear(weight))
        kept = made.weight is weight
        del weight
        assert kept or gone() is None

    def test_norms_and_bias_may_be_filled_later(self) -> None:
        """Their places are known when the matrix is read, their values perhaps not."""
        weight, values = drawn(64, 96), (drawn(96), drawn(32), drawn(64))
        along = Linear(
            weight, torch.full((64,), torch.nan), before=Norm(torch.full((96,), torch.nan), 1e-5), gate="silu",
            after=Norm(torch.full((32,), torch.nan), 1e-5),
        )  # fmt: skip
        assert along.before is not None
        assert along.after is not None
        assert along.bias is not None
        made = self.make().linear(with_weight(along, weight.clone()))
        for place, value in zip((along.before.weight, along.after.weight, along.bias), values, strict=True):
            place.copy_(value)
        x = drawn(5, 96)
        assert_near(made(x), exact(along, weight, x), self.tolerance)

    def test_nothing_beside_the_output_is_written(self) -> None:
        """`add_to` into some columns of a wider tensor."""
        for outputs in (5, 16, 37):
            made = self.make().linear(Linear(drawn(outputs, 64)))
            wide = torch.full((3, 60), 7.0)
            made.add_to(wide[:, :outputs], drawn(3, 64))
            assert (wide[:, outputs:] == 7.0).all()
            assert_near(wide[:, :outputs] - 7.0, made(drawn(3, 64)), 1e-5)

    def test_blocks(self) -> None:
        """Kinds in `blocks` that the gguf library can make: nothing is lost, and parts may differ."""
        quant = self.make()
        if not quant.blocks:
            pytest.skip("it takes no blocks")
        pieces = [stored for kind in sorted(quant.blocks) if (stored := blocks_of(drawn(48, 512), kind)) is not None]
        for blocks in [*pieces, Blocks.joined(pieces)]:
            expected, x = blocks.dequantise(), drawn(9, 512)
            made = quant.linear(Linear(blocks))
            assert_near(made.rows(torch.arange(blocks.shape[0])), expected, 1e-5)
            assert_near(made(x), exact(Linear(expected), expected, x), self.rounding)

    def _same(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        if self.bits:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().mean()))


def drawn(*shape: int) -> torch.Tensor:
    """Random numbers, the same ones for a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def with_weight(along: Linear, weight: torch.Tensor) -> Linear:
    """What goes along with one linear map, on another weight."""
    return Linear(weight, along.bias, before=along.before, gate=along.gate, after=along.after)


def exact(along: Linear, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What torch makes of it in float64."""
    norms = [None if norm is None else Norm(norm.weight.double(), norm.eps) for norm in (along.before, along.after)]
    bias = None if along.bias is None else along.bias.double()
    return Linear(weight.double(), bias, before=norms[0], gate=along.gate, after=norms[1])(x.double())


def assert_near(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """The difference is this small beside what is expected, all elements together."""
    size = float(expected.double().norm())
    off = float((ours.double() - expected.double()).norm())
    assert off <= tolerance * size, f"off by {off / size:.2g} of its size"


def blocks_of(weight: torch.Tensor, kind: str) -> Blocks | None:
    """A weight [rows, columns] stored as GGUF's `kind`; None where the gguf library cannot."""
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    try:
        stored = gguf.quantize(weight.numpy(), number)
    except NotImplementedError:
        return None

    def read(name: str, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name]))

    return Blocks(((kind, torch.from_numpy(stored)),), weight.shape[1], read)
