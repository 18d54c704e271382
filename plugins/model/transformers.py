"""Model `transformers`: any decoder-only architecture, through transformers' attention interface.

The model's own code runs on one row of ragged tokens; each attention module calls the step's paged attention. What a
layer is (heads, widths, window, scale, soft-cap) is observed at load, not guessed from names, and an architecture
whose logits would change is refused (see `_hf/probe.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from phloem.batch import Batch
from phloem.errors import ModelError
from phloem.interfaces import AttentionStep, PluginContext
from phloem.model_spec import LayerSpec, ModelSpec

from ._hf.refusals import INSTALL_HINT, not_installed, refusal
from ._source import open_source, resolve
from ._spec import choose_dtype, state_groups

if TYPE_CHECKING:
    import torch


class TransformersModel:
    """Kind `model`, name `transformers`. Loads a folder or GGUF file; imports transformers when constructed."""

    api = 1
    capabilities = frozenset({"tree_mask"})

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Loads `context.extras["path"]` in `context.dtype` on `context.device`; raises ModelError."""
        import torch

        if not_installed():
            raise ModelError("model plugin 'transformers' needs the transformers package", hint=INSTALL_HINT)
        source = open_source(resolve(str(context.extras["path"]), progress=True), progress=True)
        self.path = source.path
        reason = refusal(source.config)
        if reason:
            raise self._refused(str(source.config.get("model_type")), reason)
        self.tokenizer = source.tokenizer()
        device = torch.device(context.device)
        dtype = choose_dtype(context.dtype, device, source.config)
        with torch.inference_mode():
            self._load(source, dtype, device)

    @classmethod
    def supports(cls, path: str) -> str | None:
        """None, or what the config shows that cannot be served. Loading may still refuse what only running shows."""
        reason = not_installed()
        if reason:
            return reason
        where = resolve(path, progress=True)
        try:
            return refusal(open_source(where).config)
        except ModelError as error:
            return error.message

    def forward(self, batch: Batch, attend: AttentionStep) -> torch.Tensor:
        """[T, hidden] after the last norm."""
        import torch

        with torch.inference_mode():
            return self._runner.hidden(batch.tokens, batch.positions, attend, self._facts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> float32 [N, vocab_size]."""
        import torch

        with torch.inference_mode():
            return self._runner.logits(hidden)

    def _load(self, source: Any, dtype: torch.dtype, device: torch.device) -> None:
        from ._hf.bridge import Bridge, register
        from ._hf.loading import load
        from ._hf.probe import examine
        from ._hf.runner import Runner

        register()
        model = load(source, dtype, device)
        config = model.config.get_text_config()
        bridge = Bridge(model)
        try:
            self._runner = Runner(model, bridge)
            self._facts = examine(self._runner, bridge, config)
        except ModelError as error:
            raise self._refused(type(model).__name__, error.message) from error
        except Exception as error:
            # strangers' code on inputs it was not written for: whatever it raises means it cannot be served
            raise self._refused(type(model).__name__, f"a ragged step fails: {error!r}") from error
        groups, indices = state_groups([facts.window for facts in self._facts])
        layers = [LayerSpec(f.kv_heads, f.k_dim, f.v_dim, group) for f, group in zip(self._facts, indices, strict=True)]
        self.spec = ModelSpec(
            name=str(config.model_type),
            vocab_size=self._runner.vocab_size,
            context_length=int(config.max_position_embeddings),
            layers=tuple(layers),
            groups=groups,
            eos_token_ids=source.eos_token_ids,
            dtype=str(dtype).removeprefix("torch."),
        )

    def _refused(self, name: str, reason: str) -> ModelError:
        return ModelError(f"{name} at {self.path} cannot be served exactly: {reason}")
