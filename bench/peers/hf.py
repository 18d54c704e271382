"""transformers: `generate` on one padded batch (`static`), or its continuous batching (`generate_batch`)."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from bench.workloads import Tokens
from tests.support import hf_folder

# Nothing stops early, and nothing but the argmax decides.
NO_STOP = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Static:
    """One `generate` call per wave. The workloads' waves have prompts of equal length, so nothing is padded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._model.generation_config = transformers.GenerationConfig(bos_token_id=1, **NO_STOP)
        self.about = {"transformers": transformers.__version__, "torch": torch.__version__}

    @torch.inference_mode()
    def generate(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        """All prompts as one rectangle."""
        if schema is not None:
            raise ValueError("transformers has no grammar")
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens
        )
        rows: list[Tokens] = out[:, ids.shape[1] :].tolist()
        return rows


class Continuous(Static):
    """`generate_batch`: paged attention and admission between steps."""

    @torch.inference_mode()
    def generate(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        """All prompts submitted at once; results come back keyed by request number."""
        if schema is not None:
            raise ValueError("transformers has no grammar")
        config = transformers.GenerationConfig(
            max_new_tokens=max_tokens, **{**NO_STOP, "eos_token_id": -1}, use_cuda_graph=False
        )
        results = self._model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        order = sorted(results, key=lambda name: int("".join(filter(str.isdigit, name)) or 0))
        return [list(results[name].generated_tokens) for name in order]


def connect(
    mode: str = "static", model: str = "smollm2-135m", dtype: str = "float32", threads: int | None = None
) -> Static:
    """Load the checkpoint that the equivalence tests compare with."""
    if threads:
        torch.set_num_threads(threads)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(hf_folder(model), dtype=getattr(torch, dtype)).eval()
    return {"static": Static, "batch": Continuous}[mode](loaded)
