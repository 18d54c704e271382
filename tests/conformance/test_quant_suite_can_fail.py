"""The suite of quants finds what it looks for: each of these is wrong in one way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from phloem.interfaces import PluginContext
from phloem.linear import Linear, Norm
from phloem.testing import QuantSuite
from phloem.testing.quant import ALONG, with_weight


class Right:
    """Weights in sixteen bits."""

    api = 1
    capabilities: frozenset[str] = frozenset()
    blocks: frozenset[str] = frozenset()

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.kept: list[Any] = []

    def linear(self, linear: Linear) -> Linear:
        return self.made(with_weight(linear, linear.floats().half().float()))

    def made(self, linear: Linear) -> Linear:
        return linear


class Keeps(Right):
    def linear(self, linear: Linear) -> Linear:
        self.kept.append(linear.weight)
        return super().linear(linear)


class Coarse(Right):
    """Rounded to a few values."""

    def linear(self, linear: Linear) -> Linear:
        return with_weight(linear, (linear.floats() * 2).round() / 2)


class Forgets(Right):
    def made(self, linear: Linear) -> Linear:
        return Linear(linear.floats(), None, before=linear.before, gate=linear.gate, after=linear.after)


class ReadsEarly(Right):
    """Folds the norm's weights into the matrix when it is made."""

    def made(self, linear: Linear) -> Linear:
        if linear.before is None:
            return linear
        plain = Norm(torch.ones_like(linear.before.weight), linear.before.eps)
        weight = linear.floats() * linear.before.weight
        return Linear(weight, linear.bias, before=plain, gate=linear.gate, after=linear.after)


class Sociable(Linear):
    """One scale for the activations of all rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return super().__call__((x / scale).round() * scale)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return total.add_(self(x))


class Sociables(Right):
    def made(self, linear: Linear) -> Linear:
        return Sociable(linear.floats(), linear.bias, before=linear.before, gate=linear.gate, after=linear.after)


class Apart(Linear):
    """Other arithmetic for many rows; columns without the inputs' rounding."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x if len(x) < 8 else x.bfloat16().float())

    def at(self, x: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        return super().at(x, outputs) * 1.01


class Aparts(Right):
    def made(self, linear: Linear) -> Linear:
        return Apart(linear.floats(), linear.bias, before=linear.before, gate=linear.gate, after=linear.after)


class Lends(Linear):
    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.floats()[: len(outputs)]


class Lender(Right):
    def made(self, linear: Linear) -> Linear:
        return Lends(linear.floats())


def suite(broken: type[Any]) -> QuantSuite:
    made: QuantSuite = type("Suite", (QuantSuite,), {"plugin": broken})()
    return made


def test_what_is_right_passes() -> None:
    judge = suite(Right)
    for along in ALONG:
        judge.test_products(*along)
    judge.test_company_changes_nothing("silu", torch.get_num_threads())
    judge.test_the_weight_is_not_kept()
    judge.test_norms_and_bias_may_be_filled_later()


@pytest.mark.parametrize(
    ("broken", "test", "given"),
    [
        (Keeps, "test_the_weight_is_not_kept", ()),
        (Coarse, "test_products", (False, None, False, False)),
        (Forgets, "test_products", (True, None, False, True)),
        (ReadsEarly, "test_norms_and_bias_may_be_filled_later", ()),
        (Sociables, "test_company_changes_nothing", (None, 1)),
        (Aparts, "test_company_changes_nothing", (None, 1)),
        (Aparts, "test_columns_are_those_of_the_product", ()),
        (Lender, "test_rows_are_floats_of_ones_own", ()),
    ],
)
def test_what_is_wrong_is_found(broken: type[Any], test: str, given: tuple[Any, ...]) -> None:
    before = torch.get_num_threads()
    try:
        with pytest.raises(AssertionError):
            getattr(suite(broken), test)(*given)
    finally:
        torch.set_num_threads(before)
