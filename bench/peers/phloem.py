"""phloem in-process, through its public library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.stopwatch import Stopwatch
from bench.workloads import Tokens, Wave, least_prefill
from phloem import Engine, SamplingParams, __version__
from phloem.batch import StepStats
from phloem.config import load_config

# The methods through which the scheduler uses a prefix cache.
CACHE_METHODS = ("match", "peek", "lease", "slots", "publish", "release", "evict", "counts")
STEP_TIMES = ("plan_s", "build_s", "forward_s", "sample_s", "commit_s")


class StepLog:
    """Keeps the StepStats of a run."""

    def __init__(self, counters: Any) -> None:
        self.steps: list[StepStats] = []
        add = counters.add

        def logged(stats: StepStats) -> None:
            self.steps.append(stats)
            add(stats)

        counters.add = logged

    def decode(self) -> dict[str, float]:
        """Times of the steps that decode the largest batch of the run and prefill nothing."""
        pure = [step for step in self.steps if not step.prefill_tokens]
        batch = max((step.requests for step in pure), default=0)
        full = [step for step in pure if step.requests == batch]
        sums = {f"decode_{name}": sum(getattr(step, name) for step in full) for name in STEP_TIMES}
        host_s = sum(step.host_s for step in full)
        return {
            "decode_batch": batch,
            "decode_steps": len(full),
            "decode_host_share": host_s / sum(sums.values()) if full else 0.0,
            **sums,
        }


class Phloem:
    """One `Engine.generate` call per wave; counters are differences of `Engine.stats()`."""

    def __init__(self, engine: Engine, *, profile: bool) -> None:
        self._engine = engine
        self._before = engine.stats()
        self._watch = Stopwatch() if profile else None
        if self._watch:
            self._watch.wrap(engine.core.ledger.cache, CACHE_METHODS, "cache")
        self._log = StepLog(engine.core.counters) if profile else None
        self.about = {"phloem": __version__, "model": engine.model_path, "quant": engine.config.quant.use}

    def generate(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        """All prompts submitted at once."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=schema is None, json_schema=schema)
        return [result.token_ids for result in self._engine.generate(prompts, params)]

    def reset(self) -> None:
        """Forget cached prefixes and start the counters anew."""
        self._engine.flush_cache()
        self._before = self._engine.stats()
        if self._watch and self._log:
            self._watch.seconds.clear()
            self._log.steps.clear()

    def counters(self, waves: Sequence[Wave]) -> dict[str, float]:
        """What the run did, beside the least it could have done (design §3)."""
        after, before = self._engine.stats(), self._before
        grew = {name: after[name] - before[name] for name in ("steps", "prefill_tokens", "cached_tokens", *STEP_TIMES)}
        prompt_tokens = sum(len(prompt) for prompts, _ in waves for prompt in prompts)
        step_s = sum(grew[name] for name in STEP_TIMES)
        host_s = grew["plan_s"] + grew["build_s"] + grew["commit_s"]
        cache_s = self._watch.seconds["cache"] if self._watch else 0.0
        watch = {"cache_s": cache_s, "cache_share": cache_s / step_s} if self._watch else {}
        return {
            **grew,
            "least_prefill": least_prefill(waves),
            "prefill_ratio": grew["prefill_tokens"] / least_prefill(waves),
            "cached_share": grew["cached_tokens"] / prompt_tokens,
            "host_share": host_s / step_s,
            **watch,
            **(self._log.decode() if self._log else {}),
        }

    def text(self, ids: Tokens) -> str:
        """An output as text."""
        return self._engine.tokenizer.decode(ids)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()


def connect(model: str = "smollm2-135m", *, profile: bool = False, sets: Sequence[str] = (), **sections: Any) -> Phloem:
    """Load a model; further options are config sections, such as {"cache": {"use": "chunk"}}; `sets` as of --set.

    Weights are float32 unless they say otherwise, as peers' are.
    """
    sections.setdefault("quant", {"use": "none"})
    sections["model"] = {"dtype": "float32", "path": model, **sections.get("model", {})}
    return Phloem(Engine.from_config(load_config(sections=sections, sets=sets)), profile=profile)
