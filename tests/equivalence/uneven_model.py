"""A small model whose layers differ in every KV size, and a cache that keeps them in two pools."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from phloem.batch import Batch
from phloem.interfaces import AttentionStep, PluginContext, TokenizerData
from phloem.model_spec import GroupSpec, LayerSpec, ModelSpec

VOCAB, HIDDEN, WINDOW = 512, 48, 16
GROUPS = (GroupSpec("full"), GroupSpec("window", "window", WINDOW))
LAYERS = (LayerSpec(1, 8, 24), LayerSpec(2, 16, 8, group=1), LayerSpec(4, 4, 12))  # kv heads, K width, V width
QUERY_HEADS = 4


class Options(BaseModel):
    """No options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Uneven:
    """Embedding, three attention layers with residuals, output head; seeded random weights."""

    api = 1
    Options = Options
    capabilities = frozenset({"tree_mask"})

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.path = str(context.extras["path"])
        self.spec = ModelSpec("uneven", VOCAB, 1024, LAYERS, GROUPS)
        self.tokenizer = TokenizerData(Path(self.path, "tokenizer.json").read_text())
        made = torch.Generator().manual_seed(5)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made) * shape[-1] ** -0.5

        self.embedding = torch.randn(VOCAB, HIDDEN, generator=made)
        self.layers = [
            (
                weights(QUERY_HEADS * s.k_dim, HIDDEN),
                weights(s.kv_heads * s.k_dim, HIDDEN),
                weights(s.kv_heads * s.v_dim, HIDDEN),
                weights(HIDDEN, QUERY_HEADS * s.v_dim),
            )
            for s in LAYERS
        ]
        self.head = weights(VOCAB, HIDDEN) * 4

    @classmethod
    def supports(cls, path: str) -> str | None:
        return None

    def forward(self, batch: Batch, attend: AttentionStep) -> torch.Tensor:
        x = self._embed(batch.tokens, batch.positions)
        for i, spec in enumerate(LAYERS):
            q, k, v = self._project(i, x)
            out = attend(i, q, k, v, scale=spec.k_dim**-0.5, window=GROUPS[spec.group].window)
            x = x + out.flatten(1) @ self.layers[i][3].T
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T

    def dense(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of the last token, by plain attention over the whole text: the reference."""
        at = torch.arange(len(tokens))
        x = self._embed(torch.tensor(tokens), at)
        for i, spec in enumerate(LAYERS):
            q, k, v = self._project(i, x)
            share = QUERY_HEADS // spec.kv_heads
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(share, 1)) * spec.k_dim**-0.5
            back = at[:, None] - at
            seen = (back >= 0) & (back < (GROUPS[spec.group].window or len(tokens)))
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(share, 1))
            x = x + out.flatten(1) @ self.layers[i][3].T
        return self.logits(x[-1:])[0]

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * torch.logspace(0, -3, HIDDEN // 2)
        return self.embedding[tokens] + torch.cat([angles.sin(), angles.cos()], -1)

    def _project(self, i: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec, (q, k, v, _) = LAYERS[i], self.layers[i]
        x = x / x.norm(dim=-1, keepdim=True) * HIDDEN**0.5
        return (
            (x @ q.T).view(-1, QUERY_HEADS, spec.k_dim),
            (x @ k.T).view(-1, spec.kv_heads, spec.k_dim),
            (x @ v.T).view(-1, spec.kv_heads, spec.v_dim),
        )


@functools.cache
def reference(folder: Path) -> Uneven:
    """The model alone."""
    return Uneven(Options(), PluginContext("model", "uneven", extras={"path": folder}))


@torch.inference_mode()
def greedy(folder: Path, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """`count` tokens after `prompt`, and the gap between the two best logits of each."""
    tokens: list[int] = []
    margins = []
    while len(tokens) < count:
        best = reference(folder).dense([*prompt, *tokens]).topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return tokens, margins
