"""OpenVINO GenAI's continuous batching pipeline, in an environment of its own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bench.workloads import Tokens


class OpenVINO:
    """One pipeline call per wave over a model exported with optimum."""

    def __init__(self, folder: str, share: bool, threads: int, cache_gib: int, dtype: str) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = share
        # Left to itself it computes in bfloat16 where the CPU has units for it, whatever the weights are.
        precision = {"float32": "f32", "bfloat16": "bf16", "auto": None}[dtype]
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if precision:
            properties["INFERENCE_PRECISION_HINT"] = precision
        self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self.about = {"openvino_genai": genai.__version__, "prefix_caching": share}

    def generate(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        """All prompts submitted at once."""
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.apply_chat_template = False
        config.ignore_eos = schema is None
        if schema is not None:
            structure = genai.StructuredOutputConfig()
            structure.json_schema = json.dumps(schema)
            config.structured_output_config = structure
            config.eos_token_id, config.stop_token_ids = 2, {2}
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    def text(self, ids: Tokens) -> str:
        """An output as text."""
        written: str = self._tokenizer.decode(ids)
        return written


def connect(
    folder: str,
    share: bool = True,
    threads: int = 2,
    cache_gib: int = 5,
    dtype: str = "float32",
    weights: str | None = None,
) -> OpenVINO:
    """Load an exported folder; `dtype` is what it computes in, "auto" its own choice. `weights` is for reports only."""
    return OpenVINO(folder, share, threads, cache_gib, dtype)
