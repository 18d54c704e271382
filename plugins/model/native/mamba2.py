"""Mamba-2: how its config is spelled, and its layer, which has no attention and no MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONTEXT = 131_072  # where its config names no limit: nothing in the model depends on the length of a text
MAMBA2_NAMES = {"embed_tokens": "embeddings", "final_norm": "norm_f"}


@dataclass(frozen=True, slots=True)
class Ssm:
    """Sizes of one layer's recurrence."""

    heads: int
    head_dim: int
    groups: int  # heads of one group share B and C
    state: int
    kernel: int  # of the convolution before it
    bias: bool
    conv_bias: bool
    limits: tuple[float, float]  # of time steps
    float_residual: bool

    @property
    def inner(self) -> int:
        """Width of x and of the output."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Width of what is convolved: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the state: inputs of the convolution, and the recurrence's own."""
        return (self.kernel - 1, self.channels), (self.heads, self.head_dim, self.state)


def mamba2_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with Llama's keys, as far as there are any; after `Mamba2Config` of transformers."""
    heads, width = config.get("num_heads", 128), config.get("head_dim", 64)
    return {
        **config,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width,
        "intermediate_size": int(config.get("expand", 2) * int(config.get("hidden_size") or 0)),
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": config.get("max_position_embeddings", CONTEXT),
        "layer_types": ["mamba2"] * int(config.get("num_hidden_layers") or 0),
        "n_groups": config.get("n_groups", 8),
        "state_size": config.get("state_size", 128),
        "conv_kernel": config.get("conv_kernel", 4),
    }


def ssm_problem(config: Mapping[str, Any]) -> str | None:
    """Why a config that `mamba2_config` has read means nothing, or None."""
    heads, groups, inner = config["num_attention_heads"], config["n_groups"], config["intermediate_size"]
    if heads * config["head_dim"] != inner:
        return f"{heads} heads of {config['head_dim']} are not the {inner} that the hidden size expands to"
    if heads % groups:
        return f"{heads} heads cannot share {groups} groups evenly"
    return None


def ssm_of(config: Mapping[str, Any]) -> Ssm:
    """The sizes in a config that `mamba2_config` has read."""
    low, high = config.get("time_step_limit") or (0.0, float("inf"))
    return Ssm(
        heads=int(config["num_attention_heads"]),
        head_dim=int(config["head_dim"]),
        groups=int(config["n_groups"]),
        state=int(config["state_size"]),
        kernel=int(config["conv_kernel"]),
        bias=bool(config.get("use_bias", False)),
        conv_bias=bool(config.get("use_conv_bias", True)),
        limits=(float(low), float(high)),
        float_residual=bool(config.get("residual_in_fp32", True)),
    )
