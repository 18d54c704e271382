"""Builds an engine's parts from its config: model first, then memory, cache, policy, drafters, sampler, observers."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .admission import Admission
from .config import Config
from .config_sections import AttentionPair, AttentionSection, ScheduleSection, sampler_name
from .draft_cost import VerifyCost, profile
from .draft_size import Sizer
from .drafting import Drafting
from .errors import ConfigError
from .events import DEFAULT_BLOCK
from .executor import Executor, SplitAttention
from .feed import Feed
from .filters import needs_tokens
from .grammars import Grammars
from .holds import Holds
from .hooks import ObserverSet
from .interfaces import Attention, Cache, Model, PluginContext, PoolGroup, Quant, ServiceInfo
from .ledger import Ledger
from .loop import Parts
from .memory import MemoryPlan, plan_memory
from .model_spec import ModelSpec
from .pool import KVStore, SlotPool
from .registry import Registry, build, construct
from .request import Request
from .sampler import Sampler
from .scheduler import Scheduler
from .state_slots import StateSlots
from .states import StateStore
from .tier_setup import build_tiers
from .token_rows import Lodging
from .tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_parts(config: Config) -> Parts:
    """The parts of a ready engine. Raises ConfigError, PluginError or ModelError. Loads weights: may take seconds."""
    device = _device(config)
    where: dict[str, Any] = {"device": str(device), "dtype": config.model.dtype}
    quant: Quant = build("quant", config.quant, PluginContext("quant", config.quant.use, **where))
    extras: dict[str, Any] = {"path": config.model.path, "quant": quant}
    model: Model = build("model", config.model, PluginContext("model", config.model.use, **where, extras=extras))
    config.check_requires("model", model.spec.name, model.spec.capabilities)
    tokenizer = Tokenizer(model.tokenizer)
    base: dict[str, Any] = {"model": model.spec, "tokenizer": tokenizer, "device": str(device)}
    base["page_size"] = config.cache.page_size

    def make(kind: str, section: Any, **more: Any) -> Any:
        return build(kind, section, PluginContext(kind, getattr(section, "use", str(section)), **base, **more))

    use, plugin, options = _cache_plugin(config, model.spec)
    groups: tuple[PoolGroup, ...] = plugin.groups(model.spec)
    _check_states(use, model.spec, groups)
    ahead = config.engine.overlap == "on" or (config.engine.overlap == "auto" and device.type != "cpu")
    dtype = _DTYPES[model.spec.dtype]
    extras = {"path": model.path, "asked": config.model.path}
    drafters = [(section.use, make("spec", section, extras=extras)) for section in config.spec]
    drafting = Drafting(drafters, model.spec.vocab_size)
    lodging = Lodging.of(drafting.lodgers, config.schedule.max_running, model.spec, groups)
    memory = _memory(config, use, lodging, dtype, device, drafting, ahead)
    pages = [1 if group.states else config.cache.page_size for group in groups]
    pools = tuple(SlotPool(slots // page, page) for slots, page in zip(memory.slots, pages, strict=True))
    extras = {"eviction": make("eviction", config.cache.eviction), "components": _components(config, use, groups)}
    context = PluginContext("cache", use, **base, pools=pools, extras=extras)
    cache: Cache = construct("cache", use, plugin, options, context)
    kv, states = _stores(lodging, memory, dtype, device)
    limits, limit = config.schedule, memory.max_total_tokens
    most = max(1, int(limits.hold_share * memory.snapshots)) if memory.snapshots else None
    holds = Holds(cache, int(limits.hold_share * memory.tokens), idle_s=limits.hold_idle_s, most=most)
    ledger = _ledger(cache, groups, pools, kv, holds, limits, memory)
    processors = {sampler_name(section.use): make("sampler", section) for section in config.samplers}
    policy = make("schedule", limits)
    if "listens" in policy.capabilities:
        cache.listen(policy)
    attention = _attention(config, model.spec, make)
    trees = _branches(attention, model)
    lodging.attach(kv, memory.slots, model, branches=trees)
    bound = _host_bound(drafting)
    scheduler = Scheduler(ledger, policy, limits, drafting.propose_all, bound, config.engine.draft_tokens, trees)
    sampler = Sampler(model.spec.vocab_size, processors)
    executor = Executor(model, attention, kv, ledger.table, sampler, device, ahead, states)
    rows = min(slots for slots, group in zip(memory.slots, groups, strict=True) if not group.states)
    _fit_drafts(config, drafting, executor, lodging, min(limit, rows), trees)
    inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    grammars = Grammars(config.grammar, model.spec, tokenizer, model.tokenizer, inbox.put)
    seed, policy_name = config.engine.seed, config.schedule.use
    step_tokens, scheme = limits.max_tokens_per_step, make("key", config.cache.key)
    admission = Admission(model.spec, tokenizer, memory, policy_name, policy, processors, seed, step_tokens, scheme)
    name = config.model.name or _served_name(config.model.path)
    info = ServiceInfo(name, model.path, model.spec, limit, time.time(), ledger.shares, limits.hold_idle_s)
    observers = ObserverSet([(section.use, make("observer", section)) for section in config.observers])
    feed = _feed(config, cache, inbox.put, device, make("events", config.events))
    scheduler.tiers = ledger.tiers = build_tiers(config, use, ledger, model, quant, states, make, inbox.put, executor)
    ends = (feed, drafting, observers, info, model.tokenizer, memory.text, config.engine.check)
    return Parts(admission, grammars, inbox, scheduler, ledger, executor, quant, *ends)


def _host_bound(drafting: Drafting) -> Callable[[Request], bool]:
    """Says of a request that its next step needs its last token on the host."""

    def bound(request: Request) -> bool:
        return needs_tokens(request.params) or request.matcher is not None or drafting.active(request)

    return bound


def _branches(attention: Attention, model: Model) -> bool:
    """Whether drafts may be trees: the kernel takes them, and the model in all its layers."""
    able = all("tree_mask" in getattr(part, "capabilities", ()) for part in (attention, model))
    return able and all(group.draft == "tree" for group in model.spec.groups)


def _device(config: Config) -> torch.device:
    wanted = config.engine.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"engine.device: {wanted!r} cannot be used: {str(error).splitlines()[0]}",
            hint="say cpu, or install a torch build for this device",
        ) from error
    if device.type == "cpu" and config.engine.threads != "auto":
        torch.set_num_threads(config.engine.threads)
    return device


def _cache_plugin(config: Config, spec: ModelSpec) -> tuple[str, type[Any], Any]:
    """Name, class and options of the cache. One chosen by `auto` is held to what other plugins require now."""
    if config.cache.plugin is not None:
        return config.cache.use, config.cache.plugin, config.cache.options()
    name, plugin = Registry().resolve_auto("cache", spec)
    config.check_requires("cache", name, plugin.capabilities)
    return name, plugin, plugin.Options()


def _components(config: Config, cache: str, groups: Sequence[PoolGroup]) -> dict[str, tuple[str, type[Any], Any]]:
    """Name, class and options of the component for each kind of group. One that is chosen must have something to do."""
    made: dict[str, tuple[str, type[Any], Any]] = {}
    for kind in type(config.cache.components).model_fields:
        section: Any = getattr(config.cache.components, kind)
        if section.use != kind and kind not in {group.kind for group in groups}:
            mark = config.origin(("cache", "components", kind, "use"))[1]
            raise ConfigError(
                f"{mark.place if mark else 'default'}: cache.components.{kind}: '{section.use}' has nothing to do: of "
                f"this model's layers the cache '{cache}' keeps none apart as {kind}",
                hint="leave it out, or choose another cache",
            )
        made[kind] = (section.use, section.plugin, section.options())
    return made


def _check_states(cache: str, spec: ModelSpec, groups: Sequence[PoolGroup]) -> None:
    """A model's recurrent layers need a cache that has slots for their states."""
    if spec.states and not groups[-1].states:
        raise ConfigError(
            f"cache: {cache!r} keeps K and V of tokens only, and {spec.name} has {len(spec.states)} recurrent layers",
            hint="say `cache: hybrid`, or `cache: chunk`, which shares nothing",
        )


def _memory(
    config: Config,
    cache: str,
    lodging: Lodging,
    dtype: torch.dtype,
    device: torch.device,
    drafting: Drafting,
    ahead: bool,
) -> MemoryPlan:
    """How many tokens there will be; drafters with K and V of their own take theirs."""
    size, keep, rows = dtype.itemsize, drafting.keepers, lodging.scratch_bytes(dtype.itemsize)
    plan = plan_memory(
        config, cache, lodging.spec, lodging.groups, size, device, ahead=ahead, drafters=keep, scratch=rows
    )
    for _, each in keep:
        each.allocate(each.kv_tokens or plan.tokens, config.schedule.max_running)
    return plan


def _stores(
    lodging: Lodging, memory: MemoryPlan, dtype: torch.dtype, device: torch.device
) -> tuple[KVStore, StateStore | None]:
    """The tensors behind the slots, and behind these the rows that are drafters' own."""
    spec, groups = lodging.spec, lodging.groups
    group_of = [next(g for g, group in enumerate(groups) if i in group.layers) for i in range(len(spec.layers))]
    states = StateStore(spec.states, memory.slots[-1], device) if spec.states else None
    return KVStore(spec, memory.slots, group_of, dtype, device, lodging.scratch), states


def _ledger(
    cache: Cache,
    groups: Sequence[PoolGroup],
    pools: Sequence[SlotPool],
    kv: KVStore,
    holds: Holds,
    limits: ScheduleSection,
    memory: MemoryPlan,
) -> Ledger:
    """The bookkeeping of pools with a slot for each token, and of the one for states, if there is one."""
    rows, states, last = limits.max_running, None, len(groups) - 1
    if groups[last].states:
        each, kept = memory.states_each, memory.snapshots
        pinned = max(1, kept - int(limits.hold_share * kept))
        states = StateSlots(
            cache, pools[last], last, pools[0].page_size, rows=rows, each=each, snapshots=kept, pinnable=pinned
        )
    windows = [group.window for group in groups if not group.states]
    pools, context = pools[: len(windows)], memory.max_total_tokens
    return Ledger(
        cache, pools, kv, holds, rows=rows, context=context, windows=windows, chunk=limits.chunk, states=states
    )


def _fit_drafts(
    config: Config, drafting: Drafting, executor: Executor, lodging: Lodging, most_rows: int, trees: bool
) -> None:
    drafting.tree_unit = getattr(executor.attention, "tree_unit", drafting.tree_unit)
    drafting.branches, executor.layers, executor.watched = trees, drafting.layers, drafting.watched
    if lodging.drafters:
        table = executor.table.slots[lodging.group]
        drafting.slots_of = lambda request: table[request.row, : request.computed]
        executor.keep, drafting.lost = lodging.keep, lodging.lost
    depth = executor.model.spec.depth
    if beyond := [layer for layer in drafting.layers if not 0 <= layer <= depth]:
        told = f"the model has those of 0 to {depth}"
        raise ConfigError(f"spec: a drafter reads hidden states of layer {beyond[0]}, and {told}")
    drafting.chance = executor.sampler.chance if config.engine.verify == "rejection" else None
    if drafting.sizable and config.engine.draft_size == "adaptive":
        drafting.sizer = Sizer(VerifyCost(profile(executor, most_rows)))


def _feed(config: Config, cache: Cache, ask: Any, device: torch.device, publisher: Any) -> Feed:
    given, page = config.events.block_size, config.cache.page_size
    size = -(-DEFAULT_BLOCK // page) * page if given == "auto" else given
    if size % page:
        near = " or ".join(str(n * page) for n in (size // page, size // page + 1) if n)
        raise ConfigError(f"events.block_size {size} is no multiple of cache.page_size {page}: use {near}")
    medium = "CPU" if device.type == "cpu" else "GPU"
    return Feed(cache, ask, block_size=size, backlog=config.events.backlog, medium=medium, publisher=publisher)


def _attention(config: Config, spec: ModelSpec, make: Any) -> Attention:
    """The kernel, or the pair; ConfigError where one cannot do what the model or the drafters ask of it."""
    windows = {"window": f"{spec.name} has layers with a window"} if any(g.window for g in spec.groups) else {}
    free = [section for section in config.spec if section.plugin and "chain" not in section.plugin.capabilities]
    trees = {"tree_mask": f"spec.{free[0].use} proposes drafts"} if free else {}

    def kernel(section: AttentionSection, needs: dict[str, str]) -> Attention:
        made: Attention = make("attention", section)
        for need, why in needs.items():
            if need not in getattr(made, "capabilities", ()):
                problem = f"attention: {section.use!r} has no {need}, and {why}"
                raise ConfigError(problem, hint="choose another: `attention: torch`")
        page, sizes = config.cache.page_size, getattr(made, "page_sizes", ())
        if sizes and page not in sizes:
            mark = config.origin(("cache", "page_size"))[1]
            able = f"attention {section.use!r} takes pages of {' or '.join(map(str, sizes))} tokens"
            raise ConfigError(f"{mark.place if mark else 'default'}: cache.page_size: {page}, and {able}")
        return made

    section = config.attention
    if isinstance(section, AttentionPair):  # drafts are never run by the kernel for single tokens
        return SplitAttention(kernel(section.prefill, windows | trees), kernel(section.decode, windows))
    return kernel(section, windows | trees)


def _served_name(path: str) -> str:
    """What the API calls a model: a known name or hub id as it is, of a file or folder the last part."""
    return Path(path).resolve().name.removesuffix(".gguf") if Path(path).exists() else path
