"""The drafter `eagle` passes the suite that any drafter can run, on a tiny model and a random head."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from eagle_heads import config_of, tensors_of, write_head

from phloem.batch import Batch, GroupSlots
from phloem.drafts import Draft
from phloem.interfaces import DraftContext, PluginContext
from phloem.plugins.attention.torch_paged import TorchAttention
from phloem.plugins.cache.radix import RadixCache
from phloem.plugins.model.native import NativeModel
from phloem.plugins.spec.eagle import EagleDrafter
from phloem.pool import KVStore
from phloem.prefix import common_prefix
from phloem.testing import SpecSuite
from phloem.testing.plugin import TOY_SPEC
from phloem.token_rows import Lodging

SLOTS, REQUESTS = 16384, 4


class OnItsTarget:
    """A drafter with a target that has run each text but for its last token, in slots that are never given back."""

    def __init__(self, folder: Path, head: Path, options: dict[str, Any]) -> None:
        context = PluginContext("model", "native", extras={"path": str(folder)})
        self.model = NativeModel(NativeModel.Options(), context)
        spec = replace(self.model.spec, eos_token_ids=(1,), vocab_size=TOY_SPEC.vocab_size)
        self.drafter = EagleDrafter(
            EagleDrafter.Options(model=str(head), **options), PluginContext("spec", "eagle", model=spec)
        )
        self.attention = TorchAttention(TorchAttention.Options(), context)
        lodging = Lodging.of([("eagle", self.drafter)], REQUESTS, self.model.spec, RadixCache.groups(self.model.spec))
        of = [0] * len(lodging.spec.layers)
        self.kv = KVStore(lodging.spec, [SLOTS], of, torch.float32, torch.device("cpu"), lodging.scratch)
        lodging.attach(self.kv, [SLOTS], self.model, branches=True)
        self.free, self.known = 0, (array("i"), np.zeros(0, dtype=np.int32))

    def slots(self, tokens: array[int]) -> Any:
        """Slots of all but the last token; what the text before had in common with it is not run again."""
        text, slots = self.known
        end = len(tokens) - 1
        same = common_prefix(text, tokens, 0, min(len(text), end))
        new = np.arange(self.free, self.free + end - same, dtype=np.int32)
        self.free += len(new)
        slots = np.concatenate([slots[:same], new])
        if len(new):
            where = GroupSlots(torch.from_numpy(new.astype(np.int64)), torch.from_numpy(slots[None]))
            batch = Batch(
                torch.tensor(tokens[same:end].tolist()),
                torch.arange(same, end),
                (where,),
                torch.arange(1),
                [len(new)],
                [end],
            )
            step = self.attention.prepare(batch, self.kv)
            self.drafter.keep(batch, self.model.forward_seen(batch, step, self.drafter.layers)[1])
        self.known = tokens[:end], slots
        return slots

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """With slots, as an engine would tell them."""
        return self.propose_all([context], [budget])[0]

    def propose_all(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft | None]:
        """The same for several."""
        told = [replace(c, slots=self.slots(c.tokens[: len(c.tokens) - c.chain])) for c in contexts]
        return self.drafter.propose_all(told, budgets)

    def forget(self, request_id: str) -> None:
        """As the drafter does."""
        self.drafter.forget(request_id)


class TestEagle(SpecSuite):
    plugin = EagleDrafter
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _folders(self, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tiny_model("llama")
        self.head = tmp_path_factory.mktemp("head")
        config = config_of(self.folder, draft_vocab_size=24)
        config["target"]["vocab_size"] = TOY_SPEC.vocab_size  # the suite knows no more tokens of the tiny model
        write_head(self.head, config, tensors_of(config))

    def make(self) -> Any:
        return OnItsTarget(self.folder, self.head, self.options)


@pytest.mark.slow
class TestEagleChain(TestEagle):
    options: ClassVar[dict[str, Any]] = {"breadth": 1, "max_tokens": 3}
