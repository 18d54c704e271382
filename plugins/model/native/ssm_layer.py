"""A layer of Mamba-2: a gated recurrence behind a short convolution, and no MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phloem.linear import Linear, Norm

from .config import Arch
from .layers import Block, Builder, Step
from .weights import Weights


class SsmLayer(Block):
    """h + out(norm(scan(conv(x, B, C), dt)) gated by z), with z, x, B, C and dt from one projection.

    After `Mamba2Mixer` of transformers.
    """

    project: Linear
    out: Linear

    def __init__(self, arch: Arch, index: int, weights: Weights, recurrent: int) -> None:
        """`recurrent` counts layers of this kind."""
        ssm = arch.layers[index].ssm
        assert ssm is not None, "a layer without a recurrence"
        self.ssm, self.recurrent, self.eps = ssm, recurrent, arch.norm_eps
        build = Builder(arch, weights, f"{arch.family.root}.layers.{index}.")
        name = build.named("mixer")

        def linear(attribute: str, part: str, rows: int, columns: int, before: Norm | None = None) -> None:
            bias = weights.vector({f"{name}.{part}.bias": rows}) if ssm.bias else None
            weights.linear((self, attribute), {f"{name}.{part}.weight": rows}, columns, bias=bias, before=before)

        linear("project", "in_proj", ssm.inner + ssm.channels + ssm.heads, arch.hidden, build.norm("norm"))
        linear("out", "out_proj", arch.hidden, ssm.inner)
        self.filter = weights.tensor(f"{name}.conv1d.weight", ssm.channels, 1, ssm.kernel)[:, 0]
        self.filter_bias = weights.vector({f"{name}.conv1d.bias": ssm.channels}) if ssm.conv_bias else None
        self.gated_norm = weights.vector({f"{name}.norm.weight": ssm.inner})
        self.log_rate, self.skip, self.dt_bias = (
            weights.vector({f"{name}.{part}": ssm.heads}) for part in ("A_log", "D", "dt_bias")
        )

    def __call__(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """h [T, hidden] -> [T, hidden]; the first such layer may turn it to float32."""
        mixed = self._mix(self.project(h), step)
        if self.ssm.float_residual:
            h = h.float()
        return self.out.add_to(h, mixed) if h.dtype == mixed.dtype else h + self.out(mixed)

    def _mix(self, projected: torch.Tensor, step: Step) -> torch.Tensor:
        ssm, states = self.ssm, step.states
        assert states is not None and step.conv is not None and step.scan is not None, "a step without states"  # noqa: PT018
        before, state = states.initial(self.recurrent)
        z, xbc, dt = torch.split(projected, [ssm.inner, ssm.channels, ssm.heads], dim=1)
        xbc, inputs = step.conv(xbc, before, self.filter, self.filter_bias)
        width = ssm.groups * ssm.state
        own, b, c = torch.split(F.silu(xbc).float(), [ssm.inner, width, width], dim=1)
        own = own.view(-1, ssm.heads, ssm.head_dim)
        b, c = (part.view(-1, ssm.groups, ssm.state).repeat_interleave(ssm.heads // ssm.groups, 1) for part in (b, c))
        dt = F.softplus(dt + self.dt_bias).clamp(*ssm.limits).float()
        y, kept = step.scan(own, dt, -self.log_rate.float().exp(), b, c, state)
        states.keep(self.recurrent, (inputs, kept))
        y = (y + own * self.skip.float()[:, None]).flatten(1) * F.silu(z.float())
        groups = y.view(-1, ssm.groups, ssm.inner // ssm.groups)
        y = F.rms_norm(groups, groups.shape[-1:], None, self.eps).flatten(1)
        return self.gated_norm * y.to(projected.dtype)
