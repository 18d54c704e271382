"""How many tokens the KV pool holds, and the arithmetic that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .config import Config
from .errors import ConfigError
from .interfaces import PoolGroup
from .model_spec import ModelSpec

if TYPE_CHECKING:
    import torch

GIB = 1024**3
# `size: auto` takes this share of the memory that is free once the weights are loaded, up to AUTO_MOST_BYTES on a CPU.
AUTO_SHARE_CPU, AUTO_SHARE_GPU = 0.25, 0.85
AUTO_MOST_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pool size in tokens, and the longest request it allows."""

    tokens: int
    max_total_tokens: int
    why_max: str
    text: str
    pinnable: int  # tokens that pins may lock; no request counts on them


def plan_memory(
    config: Config, spec: ModelSpec, groups: Sequence[PoolGroup], element_bytes: int, device: torch.device
) -> MemoryPlan:
    """Split memory. `cache.tokens` wins over `cache.size`. Raises ConfigError with the arithmetic and two ways out."""
    page = config.cache.page_size
    per_token = spec.kv_bytes_per_token(element_bytes)
    free = _free_bytes(device)
    if config.cache.tokens is not None:
        tokens = config.cache.tokens
    elif config.cache.size != "auto":
        tokens = config.cache.size // per_token
    elif device.type == "cpu":
        tokens = min(int(free * AUTO_SHARE_CPU), AUTO_MOST_BYTES) // per_token
    else:
        tokens = int(free * AUTO_SHARE_GPU) // per_token
    tokens -= tokens % page
    need = tokens * per_token
    arithmetic = f"{tokens:,} tokens x {per_token:,} bytes = {need / GIB:.2f} GiB of KV"
    if tokens < page:
        raise ConfigError(
            f"cache: {arithmetic}: not even one page of {page} tokens fits",
            hint=f"raise cache.size to at least {page * per_token:,} bytes, or lower cache.page_size",
        )
    if need > free:
        raise ConfigError(
            f"cache: {arithmetic}, but only {free / GIB:.2f} GiB are free on {device.type}",
            hint=f"set cache.tokens to {free // per_token // page * page} or less, or choose a smaller model or dtype",
        )
    context = spec.context_length
    if config.engine.context_length is not None:
        if config.engine.context_length > context:
            raise ConfigError(
                f"engine.context_length {config.engine.context_length} exceeds the model's {context}",
                hint="lower it, or leave it out",
            )
        context = config.engine.context_length
    pinnable = int(config.cache.pin_share * tokens) // page * page
    if config.cache.pin_share and not 0 < pinnable < tokens:
        raise ConfigError(
            f"cache.pin_share {config.cache.pin_share:g} of {tokens} tokens = {pinnable} for pins, "
            f"{tokens - pinnable} for requests, in pages of {page}: both need some",
            hint="set it to 0 for no pins, or choose another share or more cache.tokens",
        )
    limit = min(context, tokens - pinnable)
    pool = f"the KV pool holds {tokens} tokens" + (f", {pinnable} of them for pins" if pinnable else "")
    why = f"the context length is {context}" if limit == context else pool
    text = f"{arithmetic} of {free / GIB:.2f} GiB free; context {context:,}"
    return MemoryPlan(tokens, limit, why, text, pinnable)


def _free_bytes(device: torch.device) -> int:
    """Bytes that an allocation can hope for: of the GPU, or of the machine within its control group's limit."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # no Linux: trust the user's setting, and be modest on auto
        return 8 * GIB
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free
