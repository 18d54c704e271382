"""From a plan to ragged tensors: where tokens, draft nodes and wanted logits lie."""

from __future__ import annotations

import pytest
import torch

from phloem.batch import Batch, Plan, Segment
from phloem.drafts import Draft
from phloem.inputs import build, future_rows
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.pool import SlotTable
from phloem.request import Request

TREE = Draft((7, 8, 9), (-1, -1, 1))


def request(row: int, tokens: int, **params: int) -> Request:
    call = GenerateCall(call_id=f"{row}", prompt=list(range(100, 100 + tokens)), params=SamplingParams(**params))
    return Request(call, 0, seed=0, limit=99, arrival=row, row=row)


def batch_of(*segments: Segment) -> Batch:
    """Slot i of table row r is 1000 * r + i."""
    table = SlotTable(1, 4, 64)
    table.slots[0][:] = torch.arange(4)[:, None].numpy() * 1000 + torch.arange(64).numpy()
    plan = Plan()
    for segment in segments:
        plan.add(segment)
    return build(plan, table, torch.device("cpu"))


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_chain_behind_a_chunk_is_ordinary_text(count: int) -> None:
    """No tree mask: kernels without them can serve chains."""
    batch = batch_of(Segment(request(2, 6), 6 - count, count, True, Draft.chain((7, 8))))
    assert batch.tree_masks == {}
    assert batch.tokens.tolist() == [*range(106 - count, 106), 7, 8]
    assert batch.positions.tolist() == list(range(6 - count, 8))
    assert batch.groups[0].out_slots.tolist() == list(range(2006 - count, 2008))
    assert batch.logits_rows.tolist() == [count - 1, count, count + 1]
    assert (batch.q_lens, batch.kv_lens) == ([count + 2], [8])


@pytest.mark.parametrize("count", [1, 4])
def test_a_tree_behind_a_chunk(count: int) -> None:
    batch = batch_of(Segment(request(0, 4), 4 - count, count, True, TREE), Segment(request(1, 2), 1, 1, True))
    assert batch.tree_masks[0].tolist() == [[True, False, False], [False, True, False], [False, True, True]]
    assert list(batch.tree_masks) == [0]
    assert batch.positions.tolist() == [*range(4 - count, 4), 4, 4, 5, 1]
    assert batch.logits_rows.tolist() == [*range(count - 1, count + 3), count + 3]


def test_scored_prompt_rows_come_after_all_sampled_ones() -> None:
    """A chunk that ends its prompt, carries a draft and owes prompt logprobs; another sampled segment behind it."""
    scored = Segment(request(0, 5, prompt_logprobs=0), 2, 3, True, Draft.chain((7,)), prompt_logprobs=True)
    batch = batch_of(scored, Segment(request(1, 2), 1, 1, True))
    assert batch.logits_rows.tolist() == [2, 3, 4, 0, 1]


def test_tokens_still_on_the_device_are_named() -> None:
    plan = Plan()
    known, future = request(0, 3), request(1, 3)
    plan.add(Segment(known, 2, 1, True, Draft.chain((7, 8))))
    plan.add(Segment(future, 3, 1, True))
    assert future_rows(plan) == ([3], [1])
