"""The model: embedding, layers, output head, and what the core wants to know of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict

from phloem.batch import Batch
from phloem.errors import ModelError, PluginError
from phloem.interfaces import AttentionStep, PluginContext, Quant
from phloem.linear import Linear
from phloem.model_spec import GroupSpec, LayerSpec, ModelSpec, StateSpec

from .._source import open_source, resolve
from .._spec import choose_dtype, state_groups
from .config import Arch, read_arch
from .conv_layer import ConvLayer
from .layers import AttentionLayer, Block, Step
from .rope import Rope
from .rotation import Rotate, compiled, rotate
from .short_conv import ConvStep
from .ssd import ScanStep
from .ssm_layer import SsmLayer
from .weights import Unquantised, Weights

if TYPE_CHECKING:
    from .._source import ModelSource

log = logging.getLogger(__name__)


class NativeModel:
    """Kind `model`, name `native`. Loads a folder or GGUF file; imports no transformers."""

    api = 1
    capabilities = frozenset({"tree_mask", "sparse_head", "hidden_states", "parts"})

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Loads `context.extras["path"]` in `context.dtype` on `context.device`; raises ModelError.

        Matrices are the business of the quant that is `context.extras["quant"]`; without one torch multiplies them.
        """
        source = open_source(resolve(str(context.extras["path"]), progress=True), progress=True)
        arch = read_arch(source.config)
        self.path = source.path
        self.tokenizer = source.tokenizer()
        self.arch = arch
        self._device = torch.device(context.device)
        self._dtype = choose_dtype(context.dtype, self._device, source.config)
        self.spec = make_spec(arch, source, self._dtype)
        self._quant: Quant = context.extras.get("quant") or Unquantised()
        self._load(source)
        self._rotations: dict[Rope, tuple[torch.Tensor, float]] = {}
        for rope in {layer.rope for layer in arch.layers if layer.rope is not None}:
            frequencies, factor = rope.inverse_frequencies(arch.head_dim)
            self._rotations[rope] = (frequencies.to(self._device), factor)

    def _load(self, source: ModelSource) -> None:
        """Ask for all parameters, then read the file: matrices are quantised one by one."""
        arch, weights = self.arch, Weights(self._dtype, self._device, self._quant)
        root, names = arch.family.root, arch.family.names
        words = f"{root}.{names.get('embed_tokens', 'embed_tokens')}.weight"
        self._words: Linear  # of which only rows are read
        self._head: Linear
        weights.linear((self, "_words"), {words: arch.vocab_size}, arch.hidden)
        if not arch.tied:
            weights.linear((self, "_head"), {"lm_head.weight": arch.vocab_size}, arch.hidden)
        self._layers = make_layers(arch, weights, self._rotate())
        self._norm = weights.vector(
            {f"{root}.{names.get('final_norm', 'norm')}.weight": arch.hidden}, arch.family.norm_offset
        )
        tied = ("lm_head.weight",) if arch.tied else ()
        with torch.inference_mode():
            weights.fill(source.tensors(self._quant.blocks), ignore=(".rotary_emb.inv_freq", *tied))
            for layer in self._layers:
                layer.finish()
        if arch.tied:
            self._head = self._words

    def _rotate(self) -> Rotate:
        """The compiled operator where it applies and compiles."""
        if self._device.type == "cpu" and self._dtype == torch.float32:
            try:
                return compiled()
            except PluginError as error:
                log.warning("heads are rotated by torch: %s", error)
        return rotate

    @classmethod
    def supports(cls, path: str) -> str | None:
        """None, or why this model is not one of the families; reads its metadata only."""
        where = resolve(path, progress=True)  # a name that means nothing is an error, not a reason to ask the next one
        try:
            read_arch(open_source(where).config)
        except ModelError as error:
            return error.message
        return None

    @torch.inference_mode()
    def forward(self, batch: Batch, attend: AttentionStep) -> torch.Tensor:
        """[T, hidden] after the last norm."""
        return self._run(batch, attend, ())[0]

    @torch.inference_mode()
    def forward_seen(
        self, batch: Batch, attend: AttentionStep, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and what enters these layers [T, len(layers), hidden]; their number stands for the last norm."""
        hidden, seen = self._run(batch, attend, layers)
        return hidden, torch.stack([seen[layer] for layer in layers], 1)

    def _run(
        self, batch: Batch, attend: AttentionStep, layers: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        arch, seen = self.arch, dict[int, torch.Tensor]()
        h = self._words.rows(batch.tokens)
        if arch.family.scale_embedding:
            # rounded to the weights' dtype, as the family is trained
            h *= torch.tensor(arch.hidden**0.5, dtype=self._dtype).item()
        step = self._step(batch, attend)
        for i, layer in enumerate(self._layers):
            if i in layers:
                seen[i] = h.clone()  # layers write in place
            h = layer(h, step)
        hidden = seen[len(self._layers)] = self._normed(h)
        return hidden, seen

    def _normed(self, h: torch.Tensor) -> torch.Tensor:
        """The last norm; residuals may be wider than the weights."""
        return F.rms_norm(h, h.shape[1:], self._norm.to(h.dtype), self.arch.norm_eps).to(self._dtype)

    def _step(self, batch: Batch, attend: AttentionStep) -> Step:
        """What all layers of a pass share."""
        step = Step(attend, self._rotation_tables(batch.positions), batch.states)
        kernels = [layer.ssm.kernel if layer.ssm else layer.kernel for layer in self.arch.layers]
        kernel = next((kernel for kernel in kernels if kernel), None)  # the same in all
        if kernel is not None:
            step.conv = ConvStep(batch, kernel)
        if any(layer.ssm for layer in self.arch.layers):
            step.scan = ScanStep(batch)
        return step

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> float32 [N, vocab_size]."""
        return self._capped(self._head(hidden).float())

    @torch.inference_mode()
    def logits_at(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[hidden], [K] int64 -> float32 [K]: only these tokens' rows of the head are read."""
        return self._capped(self._head.at(hidden, tokens).float())

    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, hidden], as stored."""
        return self._words.rows(tokens)

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """A weight [out, in] in the model's dtype, on its device, multiplied as the model's own are: quantised, too."""
        return self._quant.linear(Linear(weight, bias))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.arch.logit_softcap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)

    def _rotation_tables(self, positions: torch.Tensor) -> dict[Rope, tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin of a step, [T, 1, D], once for all layers that share a rotation."""
        tables = {}
        for rope, (frequencies, factor) in self._rotations.items():
            angles = positions[:, None].float() * frequencies
            cos, sin = angles.cos() * factor, angles.sin() * factor
            cos, sin = torch.cat([cos, cos], 1)[:, None], torch.cat([-sin, sin], 1)[:, None]
            tables[rope] = (cos.to(self._dtype), sin.to(self._dtype))
        return tables


def make_layers(arch: Arch, weights: Weights, rotate: Rotate) -> list[Block]:
    """The layers in order; those that attend and recurrent ones are counted apart."""
    made: list[Block] = []
    recurrent = 0
    for index, layer in enumerate(arch.layers):
        if layer.kernel is None and layer.ssm is None:
            made.append(AttentionLayer(arch, index, weights, index - recurrent, rotate))
        else:
            made.append((ConvLayer if layer.ssm is None else SsmLayer)(arch, index, weights, recurrent))
            recurrent += 1
    return made


def state_shapes(arch: Arch) -> tuple[StateSpec, ...]:
    """What the recurrent layers keep, in order."""
    made = []
    for layer in arch.layers:
        if layer.ssm is not None:
            made.append(StateSpec(layer.ssm.shapes))
        elif layer.kernel is not None:
            made.append(StateSpec(((layer.kernel - 1, arch.hidden),)))
    return tuple(made)


def make_spec(arch: Arch, source: ModelSource, dtype: torch.dtype) -> ModelSpec:
    """What the core needs to know of a loaded model."""
    attending = [layer for layer in arch.layers if layer.kernel is None and layer.ssm is None]
    groups, indices = state_groups([layer.window for layer in attending])
    states = state_shapes(arch)
    if states:
        groups = (*groups, GroupSpec("recurrent", "recurrent", draft="chain"))
    layers = tuple(LayerSpec(arch.kv_heads, arch.head_dim, arch.head_dim, group) for group in indices)
    return ModelSpec(
        name=arch.model_type,
        vocab_size=arch.vocab_size,
        context_length=arch.context_length,
        layers=layers,
        groups=groups,
        eos_token_ids=source.eos_token_ids,
        dtype=str(dtype).removeprefix("torch."),
        states=states,
        capabilities=frozenset({"hidden_states", "parts", "quant"}),
        hidden_size=arch.hidden,
        depth=len(arch.layers),
    )
