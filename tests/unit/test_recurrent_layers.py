"""Short convolutions and the scan of Mamba-2 over ragged steps, against a loop that takes one token after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phloem.batch import Batch
from phloem.errors import ModelError
from phloem.model_spec import StateSpec
from phloem.plugins.model.native.config import read_arch
from phloem.plugins.model.native.short_conv import ConvStep
from phloem.plugins.model.native.ssd import PIECE_TOKENS, ScanStep
from phloem.states import StateStore

HEADS, WIDTH, STATE, CHANNELS, KERNEL = 3, 4, 5, 6, 4
LENGTHS = [
    [1],
    [1, 1, 1],
    [5, 1, 5, 2],
    [PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 1],
    [2 * PIECE_TOKENS + 7, 3],
]


def step(lengths: list[int], kept: list[int]) -> Batch:
    """A batch of these segments that keeps the states after some queries."""
    store = StateStore([StateSpec(((1,),))], 1, torch.device("cpu"))
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    states = store.made([-1] * len(lengths), kept, [0] * len(kept))
    return Batch(tokens, tokens, (), tokens, lengths, lengths, states=states)


def chosen(lengths: list[int]) -> list[int]:
    """The last query of each segment, and some before it."""
    total = sum(lengths)
    ends = {sum(lengths[: i + 1]) - 1 for i in range(len(lengths))}
    return sorted(ends | {0, total // 2, total // 3})


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_scan_is_its_recurrence(lengths: list[int]) -> None:
    torch.manual_seed(1)
    total, kept = sum(lengths), chosen(lengths)
    x, b, c = torch.randn(total, HEADS, WIDTH), torch.randn(total, HEADS, STATE), torch.randn(total, HEADS, STATE)
    dt, rate = torch.rand(total, HEADS), -torch.rand(HEADS) * 4
    initial = torch.randn(len(lengths), HEADS, WIDTH, STATE)
    y, states = ScanStep(step(lengths, kept))(x, dt, rate, b, c, initial)
    outputs, after, at = [], {}, 0
    for segment, length in enumerate(lengths):
        state = initial[segment]
        for t in range(at, at + length):
            decay = (dt[t] * rate).exp()[:, None, None]
            state = decay * state + (dt[t][:, None] * x[t])[..., None] * b[t][:, None]
            outputs.append((state * c[t][:, None]).sum(-1))
            after[t] = state
        at += length
    torch.testing.assert_close(y, torch.stack(outputs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, torch.stack([after[t] for t in kept]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [1, 2, KERNEL])
@pytest.mark.parametrize("lengths", LENGTHS[:3], ids=str)
def test_a_convolution_is_its_taps(lengths: list[int], kernel: int) -> None:
    torch.manual_seed(2)
    total, kept = sum(lengths), chosen(lengths)
    x, weight, bias = torch.randn(total, CHANNELS), torch.randn(CHANNELS, kernel), torch.randn(CHANNELS)
    before = torch.randn(len(lengths), kernel - 1, CHANNELS)
    out, states = ConvStep(step(lengths, kept), kernel)(x, before, weight, bias)
    outputs, after, at = [], {}, 0
    for segment, length in enumerate(lengths):
        inputs = torch.cat([before[segment], x[at : at + length]])
        for t in range(length):
            outputs.append((inputs[t : t + kernel] * weight.T).sum(0) + bias)
            after[at + t] = inputs[t + 1 : t + kernel]
        at += length
    torch.testing.assert_close(out, torch.stack(outputs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, torch.stack([after[t] for t in kept]))


MAMBA2 = {
    "model_type": "mamba2",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
}
LFM2 = {
    "model_type": "lfm2",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "block_ff_dim": 90,
    "block_multiple_of": 16,
    "full_attn_idxs": [1],
}


def test_configs_are_read_as_transformers_reads_them() -> None:
    """Widths that are computed, kinds by the numbers of layers that attend, and a context where none is named."""
    mamba = read_arch(MAMBA2)
    assert mamba.context_length == 131_072
    assert mamba.layers[1].ssm is not None
    assert mamba.layers[1].ssm.shapes == ((3, 8 * 16 + 2 * 2 * 128), (8, 16, 128))
    lfm = read_arch(LFM2)
    assert lfm.intermediate == 64  # two thirds of 90, rounded up to 16
    assert lfm.tied
    assert [layer.kernel for layer in lfm.layers] == [3, None, 3]
    assert read_arch({**LFM2, "block_auto_adjust_ff_dim": False}).intermediate == 90


@pytest.mark.parametrize(
    ("config", "changes", "problem"),
    [
        (MAMBA2, {"num_heads": 4}, "4 heads of 16 are not the 128 that the hidden size expands to"),
        (MAMBA2, {"n_groups": 3}, "8 heads cannot share 3 groups evenly"),
        (MAMBA2, {"state_size": 0}, "state_size is 0, expected a positive integer"),
        (MAMBA2, {"num_heads": None}, "num_attention_heads is None, expected a positive integer"),
        (LFM2, {"layer_types": ["conv", "sliding_attention", "conv"]}, "does not name conv or full_attention 3 times"),
        (LFM2, {"conv_L_cache": "3"}, "conv_L_cache is '3', expected a positive integer"),
        (LFM2, {"intermediate_size": None, "block_ff_dim": None}, "intermediate_size is None"),
    ],
)
def test_configs_that_mean_nothing_are_refused(config: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        read_arch({**config, **changes})
