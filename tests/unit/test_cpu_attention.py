"""The compiled attention against its definition and the reference, and what a query's result does not depend on."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import attention as bench
from phloem.batch import Batch
from phloem.drafts import Draft
from phloem.errors import PluginError
from phloem.interfaces import PluginContext
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.plugins.attention._jobs import ROWS, Jobs, make_jobs
from phloem.plugins.attention.cpu_paged import CpuAttention
from phloem.plugins.attention.torch_paged import TorchAttention
from phloem.registry import Registry, build
from phloem.testing.attention import CASES, TREE, AttentionSuite
from phloem.testing.ragged import Part, Ragged

CONTEXT = PluginContext("attention", "under test")
SPAN = 128


def kernel(threads: int) -> CpuAttention:
    """The plugin with so many threads, whatever torch has."""
    made = CpuAttention(CpuAttention.Options(), CONTEXT)
    made.kernel.threads = lambda: threads
    return made


class TestOneThread(AttentionSuite):
    """The conformance suite."""

    plugin = CpuAttention

    def make(self) -> CpuAttention:
        return kernel(1)


class TestTwoThreads(AttentionSuite):
    """Again, work divided; fewer rows."""

    plugin = CpuAttention

    def make(self) -> CpuAttention:
        return kernel(2)

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize(("page_size", "window"), [(1, None), (4, 5)])
    def test_mask_and_pages(self, case: str, page_size: int, window: int | None) -> None:
        self._compare(CASES[case], page_size=page_size, window=window)


def both() -> tuple[CpuAttention, TorchAttention]:
    return kernel(2), TorchAttention(TorchAttention.Options(), CONTEXT)


def made(
    pasts: Sequence[int],
    heads: tuple[int, int],
    widths: tuple[int, int],
    *,
    slots: int = 4096,
    dtype: torch.dtype = torch.float32,
    shared: int = 0,
) -> Ragged:
    """Sequences with random KV behind them; all but the first begin with `shared` tokens of the first."""
    spec = ModelSpec("test", 16, 20000, (LayerSpec(heads[1], *widths),))
    ragged = Ragged(spec, slots=slots, dtype=dtype)
    ragged.step([Part(0, [1] * pasts[0])])
    for sequence, past in enumerate(pasts[1:], start=1):
        if shared:
            ragged.fork(0, sequence, shared)
        if past > shared:
            ragged.step([Part(sequence, [1] * (past - shared))])
    torch.manual_seed(3)
    for tensor in (*ragged.kv.keys, *ragged.kv.values):
        tensor.copy_(torch.randn(tensor.shape))
    return ragged


def attend(
    attention: CpuAttention | TorchAttention,
    ragged: Ragged,
    batch: Batch,
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    return attention.prepare(batch, ragged.kv)(0, q, *kv, scale=0.2, window=window, softcap=softcap)


def drawn(rows: int, heads: tuple[int, int], widths: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """q, k and v of so many tokens."""
    torch.manual_seed(4)
    sizes = ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    return tuple(torch.randn(rows, *size) for size in sizes)


@pytest.mark.parametrize(
    ("heads", "widths", "window", "softcap", "dtype"),
    [
        ((9, 3), (64, 64), None, None, torch.float32),
        ((4, 1), (256, 256), 300, None, torch.float32),
        ((2, 2), (5, 5), None, None, torch.bfloat16),
        ((8, 2), (20, 36), None, 5.0, torch.float16),
        ((14, 2), (80, 128), 17, 30.0, torch.bfloat16),
        ((130, 1), (1, 3), None, None, torch.float32),
    ],
)
def test_odd_shapes_and_long_contexts_like_the_reference(
    heads: tuple[int, int], widths: tuple[int, int], window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """Contexts around every place where they are cut, decoded, verified and extended."""
    pasts = [1, 127, 128, 129, 511, 512, 513, 1100, 300]
    ragged = made(pasts, heads, widths, dtype=dtype)
    steps = [Part(i, [1]) for i in range(7)]
    batch = ragged.step([*steps, Part(7, [1], TREE), Part(8, [1] * 150)])
    q, k, v = drawn(len(batch.tokens), heads, widths)
    mine, reference = (attend(each, ragged, batch, q, (k, v), window, softcap) for each in both())
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [1, 5, 70])
def test_a_shared_prefix_like_the_reference(step: int) -> None:
    """Twelve requests on one prefix and one stranger; 70 tokens at once share nothing."""
    heads, widths = (9, 3), (64, 64)
    ragged = made([700, *range(701, 712)], heads, widths, slots=8192, shared=700)
    ragged.step([Part(12, [1] * 40)])
    torch.nn.init.normal_(ragged.kv.keys[0])
    torch.nn.init.normal_(ragged.kv.values[0])
    batch = ragged.step([Part(i, [1] * step) for i in range(13)])
    q, k, v = drawn(len(batch.tokens), heads, widths)
    mine, reference = (attend(each, ragged, batch, q, (k, v)) for each in both())
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


def test_views_of_one_matrix_are_taken_as_they_lie() -> None:
    """Models hand over slices of a joint projection, and sometimes other layouts."""
    heads, widths = (4, 2), (16, 16)
    ragged = made([40], heads, widths)
    batch = ragged.step([Part(0, [1] * 3)])
    q, k, v = drawn(3, heads, widths)
    mine, _ = both()
    plain = attend(mine, ragged, batch, q, (k, v))
    joint = torch.cat([q, k, v], 1)
    assert torch.equal(attend(mine, ragged, batch, joint[:, :4], (joint[:, 4:6], joint[:, 6:])), plain)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attend(mine, ragged, batch, turned[0], (turned[1], turned[2])), plain)
    half = attend(mine, ragged, batch, q.bfloat16(), (k.bfloat16(), v.bfloat16()))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), plain, rtol=0, atol=0.03)


def test_a_query_depends_on_its_own_context_only() -> None:
    """Chunks of any size, decoding, company and threads: the same to the bit, so that a prefix hit changes nothing."""
    heads, widths, tokens = (6, 2), (32, 32), 1300
    q, k, v = drawn(tokens, heads, widths)

    def run(chunk: int, company: Sequence[int], threads: int, first: int = 0) -> torch.Tensor:
        mine, ragged, out = kernel(threads), made([5, *company], heads, widths), []
        for begin in [0, *range(first or chunk, tokens, chunk)]:
            count = min(chunk if begin or not first else first, tokens - begin)
            others = [Part(i, [1]) for i in range(1, len(company) + 1)]
            batch = ragged.step([*others, Part(99, [1] * count)])
            extra = drawn(len(others), heads, widths)
            mixed = [torch.cat([a, b[begin : begin + count]]) for a, b in zip(extra, (q, k, v), strict=True)]
            out.append(attend(mine, ragged, batch, mixed[0], (mixed[1], mixed[2]))[len(others) :])
        return torch.cat(out)

    whole = run(tokens, [], 1)
    assert torch.equal(run(tokens, [], 2), whole)
    assert torch.equal(run(137, [30, 600], 2), whole)
    assert torch.equal(run(16, [], 1), whole)
    assert torch.equal(run(1, [9], 2, first=1260), whole)


@pytest.mark.parametrize("window", [None, 40, 300])
def test_windows_change_no_bit_with_chunks(window: int | None) -> None:
    """Jobs begin where their first query's window does; an entry has its place in the sums all the same."""
    heads, widths, tokens = (6, 2), (32, 32), 500
    q, k, v = drawn(tokens, heads, widths)

    def run(chunk: int) -> torch.Tensor:
        mine, ragged, out = kernel(2), made([5], heads, widths), []
        for at in range(0, tokens, chunk):
            batch, rows = ragged.step([Part(9, [1] * min(chunk, tokens - at))]), slice(at, at + chunk)
            out.append(attend(mine, ragged, batch, q[rows], (k[rows], v[rows]), window))
        return torch.cat(out)

    whole = run(tokens)
    assert torch.equal(run(7), whole)
    assert torch.equal(run(1), whole)


@pytest.mark.parametrize("step", [1, 5])
def test_what_company_shares_changes_no_bit(step: int) -> None:
    """One prefix of two lengths, read once for all who have it: each gets what it gets alone."""
    heads, widths, pasts = (6, 2), (32, 32), [1100, *range(1101, 1105), 600]

    def stepped(members: Sequence[int]) -> torch.Tensor:
        mine, ragged = kernel(2), made([1100], heads, widths, slots=16384)
        for i, past in enumerate(pasts[1:], start=1):
            ragged.fork(0, i, 1100 if past > 1100 else 590)
            ragged.step([Part(i, [1] * (past - (1100 if past > 1100 else 590)))])
        for tensor in (*ragged.kv.keys, *ragged.kv.values):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
        batch = ragged.step([Part(i, [1] * step) for i in members])
        rows = torch.cat([torch.arange(step) + i * step for i in members])
        q, k, v = (tensor[rows] for tensor in drawn(len(pasts) * step, heads, widths))
        if len(members) > 1:
            assert len(make_jobs(batch, batch.groups[0].table.numpy(), None, 3, SPAN).merged)
        return attend(mine, ragged, batch, q, (k, v))

    together = stepped(range(len(pasts)))
    for i in range(len(pasts)):
        assert torch.equal(stepped([i]), together[i * step : (i + 1) * step]), i


@pytest.mark.parametrize("past", [6, 99, 127, 243])
@pytest.mark.parametrize("window", [None, 40])
def test_a_node_of_a_tree_is_a_token_of_its_path(past: int, window: int | None) -> None:
    """To the bit, if no multiple of `tree_unit` lies in the tree."""
    heads, widths, parents = (6, 2), (32, 32), (-1, 0, -1, 2, 2, 4, 0, 5)
    q, k, v = drawn(1 + len(parents), heads, widths)

    def stepped(rows: Sequence[int], draft: Draft) -> torch.Tensor:
        mine, ragged = kernel(1), made([past], heads, widths)
        assert (past + 1) % mine.tree_unit + len(parents) <= mine.tree_unit
        batch = ragged.step([Part(0, [1], draft)])
        return attend(mine, ragged, batch, q[rows], (k[rows], v[rows]), window)

    tree = stepped(range(1 + len(parents)), Draft(tuple(range(len(parents))), parents))
    for path in ([0, 1], [0, 6], [2, 3], [2, 4, 5, 7]):
        rows = [0, *(node + 1 for node in path)]
        assert torch.equal(stepped(rows, Draft.chain(range(len(path)))), tree[rows]), path


def jobs_of(pasts: Sequence[int], parts: Sequence[Part], *, shared: int = 0, window: int | None = None) -> Jobs:
    ragged = made(pasts, (1, 1), (4, 4), slots=sum(pasts) + 4096, shared=shared)
    batch = ragged.step(parts)
    return make_jobs(batch, batch.groups[0].table.numpy(), window, 1, SPAN)


def test_a_shared_prefix_is_a_job_of_all() -> None:
    """32 decodes over one prefix read it once up to the last multiple of a span, and their own tails."""
    jobs = jobs_of([1000, *[1005] * 31], [Part(i, [1]) for i in range(32)], shared=1000).jobs
    assert (jobs[:, 4] - jobs[:, 3]).sum() == 896 + 31 * 110 + 105


def test_every_query_meets_its_whole_context_once() -> None:
    """Whatever is cut or shared: the ranges of a query's jobs follow each other, and parts are merged in that order."""
    pasts = [600, 600, 900, 1, 2000, 40]
    parts = [Part(0, [1]), Part(1, [1] * 9), Part(2, [1], Draft.chain((5, 6))), Part(3, [1] * 300), Part(4, [1] * 130)]
    jobs = jobs_of([max(past, 600) for past in pasts], [*parts, Part(5, [1])], shared=600)
    met: dict[int, list[tuple[int, int, int]]] = {}
    for begin, end, _, low, high, part in jobs.jobs.tolist():
        for i, row in enumerate(jobs.members[begin:end].tolist()):
            met.setdefault(row, []).append((low, high, -1 if part < 0 else part + i))
    assert sorted(met) == list(range(len(jobs.queries)))
    merged = {
        row: jobs.parts[a:b].tolist()
        for row, a, b in zip(jobs.merged.tolist(), jobs.begins, jobs.begins[1:], strict=False)
    }
    for row, ranges in met.items():
        ranges.sort()
        assert ranges[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        assert ranges[-1][1] >= jobs.queries[row, 2]
        numbers = [part for _, _, part in ranges]
        assert numbers == merged.get(row, [-1])
    assert jobs.most <= ROWS


def test_a_window_bounds_what_is_read() -> None:
    """Windowed layers read the window, not the context."""
    jobs = jobs_of([2000, 1500, 100], [Part(i, [1]) for i in range(3)], window=16).jobs
    assert (jobs[:, 4] - jobs[:, 3]).tolist() == [16] * 3
    jobs = jobs_of([2000], [Part(0, [1] * 200)], window=16).jobs
    assert (jobs[:, 4] - jobs[:, 3]).max() <= ROWS + 16


def test_not_a_number_stays_with_its_query() -> None:
    heads, widths = (2, 1), (16, 16)
    ragged = made([200, 30], heads, widths)
    batch = ragged.step([Part(0, [1]), Part(1, [1])])
    q, k, v = drawn(2, heads, widths)
    q[0, 1] = float("nan")
    out = attend(both()[0], ragged, batch, q, (k, v))
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[1].isfinite().all()


def test_auto_takes_it_where_it_can(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a compiler the reference stands in, and the log says why."""
    assert isinstance(build("attention", "auto", CONTEXT), CpuAttention)
    monkeypatch.setattr(Path, "home", lambda: Path("nowhere"))
    monkeypatch.setattr(Path, "mkdir", lambda *args, **more: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert Registry().resolve_auto("attention", CONTEXT) == ("torch", TorchAttention)
    assert "attention runs on torch" in caplog.text
    assert "there is no C++ compiler" in caplog.text


def test_it_is_refused_elsewhere() -> None:
    with pytest.raises(PluginError, match="attention plugin 'cpu' is for CPUs, not for cuda"):
        CpuAttention(CpuAttention.Options(), PluginContext("attention", "cpu", device="cuda:0"))


def test_the_bench_prints_a_row_per_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "bandwidth", lambda: 1e10)
    lines: list[str] = []
    cases = ["decode 1 at 128", "verify 8 at 500", "decode 16 at 1032 1000 shared"]
    assert bench.main(["--rounds", "1", "--layers", "2", "--cases", ",".join(cases)], lines.append) == 0
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:] == cases


def test_masks_follow_the_tree() -> None:
    """A node sees what is committed, itself and its ancestors."""
    jobs = jobs_of([20], [Part(0, [1], TREE)])
    first, plain, last, mask = jobs.queries[3].tolist()
    assert (first, plain, last) == (0, 21, 26)
    assert np.flatnonzero(jobs.masks[mask : mask + 5]).tolist() == np.flatnonzero(TREE.ancestors()[2]).tolist()
