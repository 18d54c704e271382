"""The counter-based noise: uniform, independent in every coordinate, and a function of its four words only."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from phloem import noise

VOCAB = 40_000
HASHES = noise.token_hash(torch.arange(VOCAB))


def keys(rows: list[tuple[int, int, int]]) -> torch.Tensor:
    seeds, choices, positions = zip(*rows, strict=True)
    return torch.from_numpy(noise.row_keys(seeds, choices, positions))


def uniforms(rows: list[tuple[int, int, int]], hashes: torch.Tensor = HASHES) -> np.ndarray:
    """The noise mapped back to (0, 1) through the Gumbel distribution function, [R, K] float64."""
    return torch.exp(-torch.exp(-noise.gumbel(keys(rows), hashes).double())).numpy()


def chi_square(values: np.ndarray, bins: int = 256) -> float:
    """p-value of uniformity."""
    return float(stats.chisquare(np.histogram(values, bins, (0.0, 1.0))[0]).pvalue)


@pytest.mark.parametrize("seed", [0, 1, 2, -1, 2**63, 2**64 - 1])
def test_tokens_of_a_row_are_uniform(seed: int) -> None:
    assert chi_square(uniforms([(seed, 0, 0)])) > 1e-4


@pytest.mark.parametrize("coordinate", [0, 1, 2])
def test_a_token_is_uniform_over_neighbouring_seeds_choices_and_positions(coordinate: int) -> None:
    rows = [tuple(i if at == coordinate else 5 for at in range(3)) for i in range(20_000)]
    values = uniforms(rows, HASHES[:4])  # type: ignore[arg-type]
    for token in range(4):
        assert chi_square(values[:, token]) > 1e-4


@pytest.mark.parametrize("other", [(8, 0, 3), (7, 1, 3), (7, 0, 4), (7 + 2**32, 0, 3), (3, 0, 7), (0, 7, 3), (7, 3, 0)])
def test_neighbouring_rows_are_independent(other: tuple[int, int, int]) -> None:
    a, b = uniforms([(7, 0, 3), other])
    assert abs(stats.pearsonr(a, b).statistic) < 4.5 / math.sqrt(VOCAB)
    table = np.histogram2d(a, b, bins=16, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(table.ravel()).pvalue > 1e-4


@pytest.mark.parametrize("distance", [1, 2, 16, 256, 4096, 32768])
def test_neighbouring_tokens_are_independent(distance: int) -> None:
    (row,) = uniforms([(11, 2, 9)])
    a, b = row[:-distance], row[distance:]
    assert abs(stats.pearsonr(a, b).statistic) < 4.5 / math.sqrt(len(a))
    assert stats.chisquare(np.histogram2d(a, b, bins=16, range=((0, 1), (0, 1)))[0].ravel()).pvalue > 1e-4


def test_both_words_of_a_key_matter() -> None:
    rows = torch.tensor([[123456789, -987654321], [123456789, 555555555], [-777777777, -987654321]], dtype=torch.int32)
    values = torch.exp(-torch.exp(-noise.gumbel(rows, HASHES).double())).numpy()
    for i, j in ((0, 1), (0, 2)):
        assert abs(stats.pearsonr(values[i], values[j]).statistic) < 4.5 / math.sqrt(VOCAB)
        table = np.histogram2d(values[i], values[j], bins=16, range=((0, 1), (0, 1)))[0]
        assert stats.chisquare(table.ravel()).pvalue > 1e-4


def test_the_largest_word_is_no_infinity() -> None:
    """The mixing run backwards finds the hash whose 31 bits are all ones, which float32 rounds to 2**31."""
    x = 0x7FFF8000 * pow(0x846CA68B, -1, 2**32) & 0xFFFFFFFF
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) & 0xFFFFFFFF
    hashed = torch.tensor([x - 2**32 if x >= 2**31 else x], dtype=torch.int32)
    value = float(noise.gumbel(torch.zeros(1, 2, dtype=torch.int32), hashed)[0, 0])
    assert value == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


def test_every_word_matters() -> None:
    rows = [(s, c, p) for s in (0, 1, 2**32, 2**63) for c in (0, 1) for p in (0, 1, 2)]
    assert len({tuple(pair) for pair in keys(rows).tolist()}) == len(rows)


def test_small_values_have_many_bits() -> None:
    """The largest Gumbel values decide rare tokens: no lattice, no ceiling below ln(2**25)."""
    rows = [(s, 0, 0) for s in range(200)]
    top = noise.gumbel(keys(rows), HASHES).flatten().topk(2000).values
    assert top.unique().numel() > 1990
    assert float(top[0]) > math.log(200 * VOCAB) - 4
    assert torch.isfinite(noise.gumbel(keys(rows), HASHES)).all()


def test_tail_has_the_right_mass() -> None:
    values = noise.gumbel(keys([(s, 1, 4) for s in range(250)]), HASHES).flatten()
    for cut in (5.0, 9.0, 12.0):
        expected = values.numel() * -math.expm1(-math.exp(-cut))
        seen = int((values > cut).sum())
        assert abs(seen - expected) < 5 * math.sqrt(expected) + 1, (cut, seen, expected)


def reference_hash(token: int, mul1: int = 0x7FEB352D, mul2: int = 0x846CA68B) -> int:
    """lowbias32 in Python integers: logical shifts, multiplication modulo 2**32."""
    x = token
    for mul, shift in ((mul1, 16), (mul2, 15)):
        x ^= x >> shift
        x = x * mul & 0xFFFFFFFF
    return x ^ x >> 16


def test_hash_is_lowbias32_with_logical_shifts() -> None:
    ids = [0, 1, 2, 65_535, 65_536, 262_143, 2**31 - 1]
    got = noise.token_hash(torch.tensor(ids)).tolist()
    assert [value & 0xFFFFFFFF for value in got] == [reference_hash(token) for token in ids]


def test_row_keys_are_splitmix64() -> None:
    """Stable for ever: a seed given today must give the same text tomorrow."""

    def mix(state: int, word: int) -> int:
        z = (state ^ word) + 0x9E3779B97F4A7C15 & 2**64 - 1
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 2**64 - 1
        return z ^ z >> 31

    for seed, choice, position in ((0, 0, 0), (1234, 2, 77), (-5, 1, 10**6)):
        expected = mix(mix(mix(0, seed & 2**64 - 1), choice), position)
        low, high = (int(word) & 0xFFFFFFFF for word in noise.row_keys([seed], [choice], [position])[0])
        assert low | high << 32 == expected


@pytest.mark.parametrize("width", [1, 5, 31, 1000, 33_000, VOCAB])
def test_draw_does_not_depend_on_row_or_company(width: int) -> None:
    """Blocks of rows, subsets of tokens and vector tails: the same noise for the same words."""
    scores = torch.randn(9, width, generator=torch.Generator().manual_seed(width))
    rows = keys([(i, 0, 40 + i) for i in range(9)])
    best, index = noise.draw(scores, rows, HASHES[:width])
    for i in (8, 3, 0):
        alone = noise.draw(scores[i : i + 1], rows[i : i + 1], HASHES[:width])
        assert (best[i].item(), index[i].item()) == (alone[0].item(), alone[1].item())
    whole = scores + noise.gumbel(rows, HASHES[:width])
    assert index.tolist() == whole.argmax(-1).tolist()


def test_draw_from_candidates_is_the_draw_from_all_with_the_rest_masked() -> None:
    scores = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    rows = keys([(3, 1, i) for i in range(6)])
    ids = torch.stack([torch.randperm(500, generator=torch.Generator().manual_seed(i))[:40] for i in range(6)])
    masked = torch.full_like(scores, -math.inf).scatter(1, ids, scores.gather(1, ids))
    _, whole = noise.draw(masked, rows, HASHES[:500])
    _, column = noise.draw(scores.gather(1, ids), rows, noise.token_hash(ids))
    assert ids.gather(1, column[:, None])[:, 0].tolist() == whole.tolist()


def test_draw_has_the_distribution_of_softmax() -> None:
    scores = torch.tensor([0.0, -1.0, 1.5, -6.0, 0.5, -math.inf, 1.49, -3.0])
    draws = 40_000
    _, index = noise.draw(scores.expand(draws, 8), keys([(99, 0, i) for i in range(draws)]), HASHES[:8])
    expected = torch.softmax(scores.double(), -1).numpy() * draws
    seen = np.bincount(index.numpy(), minlength=8)
    assert seen[5] == 0
    alive = expected > 0
    assert stats.chisquare(seen[alive], expected[alive]).pvalue > 1e-4


def test_rows_without_a_finite_score_are_marked() -> None:
    scores = torch.zeros(4, 10)
    scores[1, 3] = math.nan
    scores[2, 4] = math.inf
    scores[3] = -math.inf
    best, _ = noise.draw(scores, keys([(0, 0, i) for i in range(4)]), HASHES[:10])
    assert best.isfinite().tolist() == [True, False, False, False]


def test_winners_take_the_lowest_column_and_show_nan() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [1.0, math.nan, 5.0, math.nan]])
    best, index = noise.winners(scores)
    assert index.tolist() == [1, 0, 1]
    assert best[0] == 3.0
    assert best[2].isnan()
