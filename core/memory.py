"""How many tokens the KV pool holds, and the arithmetic that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import windows as win
from .config import Config
from .errors import ConfigError
from .interfaces import HoldsKV, PoolGroup
from .model_spec import ModelSpec
from .state_slots import DRAFTING, per_request, pool_size

if TYPE_CHECKING:
    import torch

GIB = 1024**3
# `size: auto` takes this share of the memory that is free once the weights are loaded, up to AUTO_MOST_BYTES on a CPU.
AUTO_SHARE_CPU, AUTO_SHARE_GPU = 0.25, 0.85
AUTO_MOST_BYTES = 4 * GIB
NUMBER_BYTES = 12  # of a token without K and V: in the tree its id and its slot, and its place in the free list


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pool sizes in tokens, and the longest request they allow."""

    tokens: int  # of the group that the others follow
    slots: tuple[int, ...]  # of each group
    max_total_tokens: int
    why_max: str
    text: str
    pinnable: int  # tokens that pins may lock; no request counts on them
    snapshots: int = 0  # states of recurrent layers that the cache may keep
    states_each: int = 0  # and a running request, at most


@dataclass(frozen=True, slots=True)
class _Split:
    """What each group costs, and how large it is beside the one that the others follow."""

    config: Config
    groups: Sequence[PoolGroup]
    bytes: Sequence[int]  # of one slot
    ahead: bool
    drafters: Sequence[tuple[str, HoldsKV]]
    scratch: Sequence[tuple[str, int, int]]

    @property
    def drafts(self) -> int:
        """Most draft nodes of a request."""
        return self.config.engine.draft_tokens if self.config.spec else 0

    def states(self, tokens: int) -> tuple[int, int]:
        """Slots for states, and how many of them the cache may keep; none without recurrent layers."""
        if not self.groups[-1].states:
            return 0, 0
        limits, cache = self.config.schedule, self.config.cache
        return pool_size(
            tokens,
            cache.page_size,
            running=limits.max_running,
            ahead=self.ahead,
            drafts=self.drafts,
            every=cache.snapshot_every,
        )

    def sizes(self, tokens: int) -> tuple[int, ...]:
        """Slots per group."""
        limits, cache = self.config.schedule, self.config.cache
        windows = [group.window for group in self.groups if not group.states]
        made = win.sizes(
            windows,
            tokens,
            cache.page_size,
            running=limits.max_running,
            step=limits.max_tokens_per_step,
            every=cache.window_every,
            pinned=int(cache.pin_share * tokens),
        )
        states = self.states(tokens)[0]
        return (*made, states) if states else made

    def cost(self, tokens: int) -> int:
        """Bytes of all groups, and of what drafters keep."""
        drafts = sum((each.kv_tokens or tokens) * each.kv_bytes for _, each in self.drafters)
        drafts += sum(rows * each for _, rows, each in self.scratch)
        return drafts + sum(size * each for size, each in zip(self.sizes(tokens), self.bytes, strict=True))

    def fit(self, budget: int) -> int:
        """Most tokens, in whole pages, that cost no more than `budget`."""
        page = self.config.cache.page_size
        low, high = 0, max(0, budget) // (max(1, min(self.bytes)) * page) + 1  # in pages; the cost grows with them
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.cost(middle * page) <= budget else (low, middle)
        return low * page

    def text(self, tokens: int) -> str:
        """The arithmetic."""
        parts = [
            f"{size:,} tokens{f' of window {group.window:,}' if group.window and len(self.groups) > 1 else ''}"
            f" x {each:,} bytes"
            for group, size, each in zip(self.groups, self.sizes(tokens), self.bytes, strict=True)
            if group.layers
        ]
        if self.groups[-1].states:
            (total, snapshots), page = self.states(tokens), self.config.cache.page_size
            each = per_request(page, ahead=self.ahead) + 1
            parts.append(
                f"{total:,} states ({self.config.schedule.max_running:,} requests x {each}"
                f" + {DRAFTING} x {self.drafts} draft nodes + {snapshots:,} kept) x {self.bytes[-1]:,} bytes"
            )
        parts += [
            f"{each.kv_tokens or tokens:,} tokens x {each.kv_bytes:,} bytes for spec.{name}"
            for name, each in self.drafters
        ]
        parts += [f"{rows:,} rows x {each:,} bytes for drafts of spec.{name}" for name, rows, each in self.scratch]
        kept = "KV" if any(group.layers for group in self.groups) else "states"
        return f"{' + '.join(parts)} = {self.cost(tokens) / GIB:.2f} GiB of {kept}"


def plan_memory(
    config: Config,
    cache: str,
    spec: ModelSpec,
    groups: Sequence[PoolGroup],
    element_bytes: int,
    device: torch.device,
    *,
    ahead: bool,
    drafters: Sequence[tuple[str, HoldsKV]],
    scratch: Sequence[tuple[str, int, int]] = (),
) -> MemoryPlan:
    """Split memory among the groups of the plugin `cache` and what `drafters` keep; `ahead`: steps overlap.

    `scratch`: of drafters whose rows lie among the target's, names, further rows and bytes of one (`Lodging`).

    `cache.tokens` wins over `cache.size`. Raises ConfigError with the arithmetic and two ways out.
    """
    page = config.cache.page_size
    each = [
        sum(spec.layers[i].floats_per_token for i in group.layers) * element_bytes
        + sum(spec.states[i].floats for i in group.states) * 4  # they are float32
        + (0 if group.layers or group.states else NUMBER_BYTES)
        for group in groups
    ]
    split = _Split(config, groups, each, ahead, drafters, scratch)
    free = free_bytes(device)
    tokens = _tokens(split, free, device)
    arithmetic, need = split.text(tokens), split.cost(tokens)
    if tokens < page:
        raise ConfigError(
            f"cache: {arithmetic}: not even one page of {page} tokens fits",
            hint=f"raise cache.size to at least {split.cost(page):,} bytes, or lower "
            + ("schedule.max_running" if groups[-1].states else "cache.page_size"),
        )
    if need > free:
        raise ConfigError(
            f"cache: {arithmetic}, but only {free / GIB:.2f} GiB are free on {device.type}",
            hint=f"set cache.tokens to {fits} or less, or choose a smaller model or dtype"
            if (fits := split.fit(free)) >= page
            else "lower schedule.max_running or engine.draft_tokens, or choose a smaller model",
        )
    context = _context(config, spec)
    _check_windows(cache, groups, split.sizes(tokens), context)
    guide = groups[win.guide([group.window for group in groups if not group.states])].window
    alone = None if guide is None else win.span(guide, page) + 2 * config.schedule.max_tokens_per_step
    pinnable = int(config.cache.pin_share * tokens) // page * page
    if config.cache.pin_share and not 0 < pinnable < tokens:
        raise ConfigError(
            f"cache.pin_share {config.cache.pin_share:g} of {tokens} tokens = {pinnable} for pins, "
            f"{tokens - pinnable} for requests, in pages of {page}: both need some",
            hint="set it to 0 for no pins, or choose another share or more cache.tokens",
        )
    limit = context if alone is not None and alone <= tokens - pinnable else min(context, tokens - pinnable)
    pool = f"the KV pool holds {tokens} tokens" + (f", {pinnable} of them for pins" if pinnable else "")
    why = f"the context length is {context}" if limit == context else pool
    text = f"{arithmetic} of {free / GIB:.2f} GiB free; context {context:,}"
    states = split.states(tokens)[1], per_request(page, ahead=ahead)
    return MemoryPlan(tokens, split.sizes(tokens), limit, why, text, pinnable, *states)


def _tokens(split: _Split, free: int, device: torch.device) -> int:
    """Tokens of the pool: as many as asked for, or as fit in the bytes that are."""
    cache = split.config.cache
    if cache.tokens is not None:
        return cache.tokens
    if cache.size != "auto":
        return split.fit(cache.size)
    if device.type == "cpu":
        most = max(AUTO_MOST_BYTES, 2 * split.cost(cache.page_size))  # the states of running requests may be large
        return split.fit(min(int(free * AUTO_SHARE_CPU), most))
    return split.fit(int(free * AUTO_SHARE_GPU))


def _context(config: Config, spec: ModelSpec) -> int:
    """Most tokens of one request that model and config allow."""
    wanted = config.engine.context_length
    if wanted is not None and wanted > spec.context_length:
        raise ConfigError(
            f"engine.context_length {wanted} exceeds the model's {spec.context_length}",
            hint="lower it, or leave it out",
        )
    return spec.context_length if wanted is None else wanted


def _check_windows(cache: str, groups: Sequence[PoolGroup], slots: Sequence[int], context: int) -> None:
    """A pool for windows must hold one."""
    for group, size in zip(groups, slots, strict=True):
        if group.window is not None and size < min(group.window, context):
            raise ConfigError(
                f"cache: {cache!r} keeps a window of {group.window} tokens for some layers, and the pool "
                f"would have {size} slots for them: no request could fill one",
                hint=f"raise cache.tokens to at least {min(group.window, context)}, or say `cache: radix`, which has "
                "one pool",
            )


def free_bytes(device: torch.device) -> int:
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
