"""Counter-based Gumbel noise: a pure function of (request seed, choice index, output position, token id).

So a token's noise does not depend on the row, step, draft or company in which its position is sampled, and a seeded
request repeats itself whatever runs beside it. Keys of 64 bits per row come from splitmix64 (Steele, Lea and Flood,
2014); tokens are mixed in by two keyed rounds in the manner of lowbias32 (Wellons, 2018). The index of the highest
`score + gumbel` is a draw from softmax(score) (the Gumbel-max trick).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_WEYL = 0x9E3779B97F4A7C15  # splitmix64's increment
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's multipliers
_MUL1, _MUL2 = 0x7FEB352D, 0x846CA68B - 2**32  # lowbias32's multipliers, as signed 32-bit integers
_HOST_BLOCK = 1 << 16  # elements per block: the scratch of some fifteen passes stays in the cache of one core
_DEVICE_BLOCK = 1 << 24  # elements per block where memory, not a cache, is the limit


def _splitmix(state: npt.NDArray[np.uint64], word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (state ^ word) + np.uint64(_WEYL)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    return z ^ (z >> np.uint64(31))


def row_keys(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """Keys [R, 2] int32 of R rows. Seeds may be any integers (64 bits count); called once a step, on the host."""
    state = np.zeros(len(seeds), dtype=np.uint64)
    for words in ([seed & (2**64 - 1) for seed in seeds], choices, positions):
        state = _splitmix(state, np.array(words, dtype=np.uint64))
    return state.view(np.int32).reshape(-1, 2)


def token_hash(ids: torch.Tensor) -> torch.Tensor:
    """lowbias32 of token ids of any shape, int32: the part of the noise that a vocabulary needs only once."""
    x = ids.to(torch.int32, copy=True)
    x ^= (x >> 16) & 0xFFFF  # `>>` keeps the sign: the mask makes it a logical shift
    x *= _MUL1
    x ^= (x >> 15) & 0x1FFFF
    x *= _MUL2
    x ^= (x >> 16) & 0xFFFF
    return x


def _log_exponential(keys: torch.Tensor, hashed: torch.Tensor) -> torch.Tensor:
    """log(E) [R, K] float32 of unit exponentials E: minus a standard Gumbel variate. keys [R, 2], hashed [(R,) K]."""
    x = hashed ^ keys[:, :1]
    x.mul_(_MUL1)
    y = x >> 15
    x.bitwise_xor_(y.bitwise_and_(0x1FFFF)).bitwise_xor_(keys[:, 1:]).mul_(_MUL2)
    # a shift that keeps the sign folds the 32 bits two to one onto 31, so that small values keep all their bits in
    # float32: those are the winners' (E near 0), whose resolution decides rare tokens
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=y))
    v = y.view(torch.float32).copy_(x)
    v.add_(0.5).mul_(-(2.0**-31) * (1 - 2.0**-24))  # in (-1, 0), never -1, where E would be infinite
    return v.log1p_().neg_().log_()


def gumbel(keys: torch.Tensor, hashed: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [R, K] float32 for row keys [R, 2] and token hashes [K] or [R, K], both int32."""
    return _log_exponential(keys, hashed).neg_()


def winners(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest score [R] and its column [R] int64 per row of [R, K]; the lowest column among equals, NaN above all.

    numpy's argmax has these rules too and, unlike torch's on a CPU, uses the vector units.
    """
    if scores.device.type != "cpu":
        best, index = scores.max(dim=-1)
        return best, index
    index = torch.from_numpy(scores.detach().numpy().argmax(axis=-1))
    return scores.gather(-1, index[:, None])[:, 0], index


def draw(scores: torch.Tensor, keys: torch.Tensor, hashed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One draw per row from softmax(scores [R, K] float32): the winners' perturbed scores [R] and columns [R] int64.

    `keys` [R, 2] and `hashed` [K] or [R, K] as for `gumbel`. A row with NaN or infinity, or without any finite score,
    is won by a score that is not finite. `scores` is left as it is.
    """
    rows, width = scores.shape
    block = max(1, (_HOST_BLOCK if scores.device.type == "cpu" else _DEVICE_BLOCK) // max(1, width))
    won = []
    for a in range(0, rows, block):
        b = min(rows, a + block)
        noise = _log_exponential(keys[a:b], hashed if hashed.dim() == 1 else hashed[a:b])
        won.append(winners(torch.sub(scores[a:b], noise, out=noise)))
    return torch.cat([best for best, _ in won]), torch.cat([index for _, index in won])
