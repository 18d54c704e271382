"""Conformance of kind `model`: a forward pass depends on a token's ancestors and on nothing else.

class TestMine(ModelSuite):
    plugin = MyModel
    path = "folder/of/a/tiny/model"
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, cast

import pytest
import torch

from ..drafts import Draft
from ..interfaces import HiddenStates, LendsParts, Model, PluginContext, SparseHead
from .attention import NaiveAttention
from .plugin import PluginSuite
from .ragged import Part, Ragged

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8]


class ModelSuite(PluginSuite):
    """Subclass it and set `plugin`, and `path` to a model that it serves: the smaller, the faster."""

    kind = "model"
    path: ClassVar[str] = "smollm2-135m"
    tolerance: ClassVar[float] = 1e-4  # of logits, absolute, in float32

    def make(self) -> Model:
        """A freshly loaded model."""
        context = PluginContext(self.kind, "under test", extras={"path": self.path})
        model: Model = self.plugin(self.plugin.Options(**self.options), context)
        return model

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Model:
        """The loaded model; one instance serves all tests but those of loading."""
        return cls().make()

    def test_supports_what_it_loads(self, model: Model) -> None:
        """`supports` accepts the model under test."""
        assert type(model).supports(model.path) is None

    def test_spec_is_sane(self, model: Model) -> None:
        """Sizes are positive, layers name groups that exist, windows have a size."""
        spec = model.spec
        assert spec.vocab_size > 0
        assert spec.context_length > 0
        assert spec.layers or spec.states
        for layer in spec.layers:
            assert min(layer.kv_heads, layer.k_dim, layer.v_dim) > 0
            assert 0 <= layer.group < len(spec.groups)
        for group in spec.groups:
            assert (group.kind == "window") == (group.window is not None)
            assert group.kind != "recurrent" or group.draft == "chain"
        assert sum(group.kind == "recurrent" for group in spec.groups) == bool(spec.states), "one group for all states"
        assert all(state.floats > 0 for state in spec.states)
        assert all(0 <= token < spec.vocab_size for token in spec.eos_token_ids)

    def test_tokenizer_travels(self, model: Model) -> None:
        """The tokenizer's data is a `tokenizers` JSON document."""
        assert "model" in json.loads(model.tokenizer.json)

    def test_attends_once_per_layer(self, model: Model) -> None:
        """Each layer attends once, in order, with the shapes its spec announces."""
        ragged = Ragged(model.spec)
        batch = ragged.step([Part(0, PROMPT[:5])])
        step = NaiveAttention().prepare(batch, ragged.kv)
        calls: list[int] = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
            spec = model.spec.layers[layer]
            assert (k.shape, v.shape) == ((5, spec.kv_heads, spec.k_dim), (5, spec.kv_heads, spec.v_dim))
            assert q.shape[0] == 5
            assert q.shape[1] % spec.kv_heads == 0
            assert how.get("window") == model.spec.groups[spec.group].window
            calls.append(layer)
            return step(layer, q, k, v, **how)

        hidden = model.forward(batch, attend)
        assert calls == list(range(len(model.spec.layers)))
        assert hidden.shape[0] == 5
        logits = model.logits(hidden[1:3])
        assert logits.shape == (2, model.spec.vocab_size)
        assert logits.dtype == torch.float32

    @pytest.mark.parametrize("chunk", [1, 4, 16])
    def test_chunks_change_nothing(self, model: Model, chunk: int) -> None:
        """A prompt in pieces gives the logits of the prompt in one."""
        ragged = Ragged(model.spec, page_size=4)
        parts = [self._logits(model, ragged, [Part(0, PROMPT[i : i + chunk])]) for i in range(0, len(PROMPT), chunk)]
        self._close(torch.cat(parts), self._alone(model, PROMPT))

    def test_company_changes_nothing(self, model: Model) -> None:
        """Prompts, chunks and single tokens of several sequences in one step give what each gives alone."""
        ragged = Ragged(model.spec)
        self._logits(model, ragged, [Part(0, PROMPT[:20]), Part(1, PROMPT[:7])])
        together = self._logits(model, ragged, [Part(2, PROMPT[:9]), Part(0, PROMPT[20:21]), Part(1, PROMPT[7:12])])
        whole = self._alone(model, PROMPT)
        self._close(together, torch.cat([whole[:9], whole[20:21], whole[7:12]]))

    def test_a_tree_is_its_paths(self, model: Model) -> None:
        """Each draft node's logits are those of its path as a sequence of its own; of a chain with recurrent layers."""
        tree = Draft((5, 6, 7, 8, 9), (-1, 0, 0, -1, 1))
        chain = any(group.draft == "chain" for group in model.spec.groups)
        draft = Draft.chain(tree.tokens) if chain else tree
        ragged = Ragged(model.spec)
        self._logits(model, ragged, [Part(0, PROMPT[:19])])
        logits = self._logits(model, ragged, [Part(0, PROMPT[19:20], draft)])
        for node in range(len(draft)):
            path = [draft.tokens[i] for i in draft.path(node)]
            self._close(logits[1 + node], self._alone(model, PROMPT[:20] + path)[-1])
        after = self._logits(model, ragged, [Part(0, PROMPT[20:])])  # rejected nodes leave nothing behind
        self._close(after, self._alone(model, PROMPT)[20:])

    def test_logits_at_are_columns_of_logits(self, model: Model) -> None:
        """Capability `sparse_head`: any tokens, in any order, the first and the last of the vocabulary included."""
        if "sparse_head" not in self.plugin.capabilities:
            pytest.skip("no capability sparse_head")
        ragged = Ragged(model.spec)
        batch = ragged.step([Part(0, PROMPT)])
        hidden = model.forward(batch, NaiveAttention().prepare(batch, ragged.kv))
        logits, vocab = model.logits(hidden), model.spec.vocab_size
        for row in (0, len(PROMPT) - 1):
            for tokens in ([vocab - 1], [0, vocab - 1, vocab // 2, 1], list(range(vocab))):
                got = cast(SparseHead, model).logits_at(hidden[row], torch.tensor(tokens))
                assert got.dtype == torch.float32
                self._close(got, logits[row, tokens])

    def test_hidden_states_are_those_of_the_pass(self, model: Model) -> None:
        """Capability `hidden_states` of the spec: at any layers, in the order asked for, whatever the chunks."""
        spec = model.spec
        if "hidden_states" not in spec.capabilities:
            pytest.skip("no capability hidden_states")
        layers = [spec.depth, 0, spec.depth // 2]

        def seen(ragged: Ragged, parts: list[Part]) -> torch.Tensor:
            batch = ragged.step(parts)
            attend = NaiveAttention().prepare(batch, ragged.kv)
            hidden, states = cast(HiddenStates, model).forward_seen(batch, attend, layers)
            self._close(hidden, model.forward(batch, attend))
            self._close(states[:, 0], hidden)
            assert states.shape == (len(batch.tokens), 3, spec.hidden_size)
            return states

        whole, ragged = seen(Ragged(spec), [Part(0, PROMPT)]), Ragged(spec)
        chunks = [seen(ragged, [Part(0, PROMPT[:17])]), seen(ragged, [Part(0, PROMPT[17:])])]
        self._close(torch.cat(chunks), whole)

    def test_lends_what_heads_need(self, model: Model) -> None:
        """Capability `parts` of the spec: rows of the embedding, and a product of any weight, with and without bias."""
        spec = model.spec
        if "parts" not in spec.capabilities:
            pytest.skip("no capability parts")
        lends, dtype = cast(LendsParts, model), getattr(torch, spec.dtype)
        words = lends.embed(torch.tensor([0, spec.vocab_size - 1, 0]))
        assert (words.shape, words.dtype) == ((3, spec.hidden_size), dtype)
        assert torch.equal(words[0], words[2])
        assert not torch.equal(words[0], words[1])
        random = torch.Generator().manual_seed(2)
        weight, bias = (torch.randn(7, *shape, generator=random).to(dtype) for shape in ((spec.hidden_size,), ()))
        self._close(lends.product(weight)(words), words @ weight.T)
        self._close(lends.product(weight, bias)(words), words @ weight.T + bias)

    def _alone(self, model: Model, tokens: list[int]) -> torch.Tensor:
        return self._logits(model, Ragged(model.spec), [Part(0, tokens)])

    def _logits(self, model: Model, ragged: Ragged, parts: list[Part]) -> torch.Tensor:
        batch = ragged.step(parts)
        return model.logits(model.forward(batch, NaiveAttention().prepare(batch, ragged.kv)))

    def _close(self, ours: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(ours, expected, rtol=0, atol=self.tolerance)
