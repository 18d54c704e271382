"""Hooks for observers: declared with pluggy, baked at start into tuples of bound methods; with none, nothing is paid.

An observer is an object with any of the methods of `ObserverHooks`, each marked with `hookimpl`. It may leave out
arguments that it does not use. Hooks are called on the loop's thread, so they must be quick and must not block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from .errors import PluginError
from .registry import did_you_mean

if TYPE_CHECKING:
    from .batch import StepStats
    from .interfaces import ServiceInfo
    from .request import Request

MAX_ERRORS = 3
hookspec = pluggy.HookspecMarker("phloem")
hookimpl = pluggy.HookimplMarker("phloem")
log = logging.getLogger("phloem.hooks")


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """What observers learn of one finished choice of a call. Times in seconds, counts in tokens."""

    id: str  # call id, slash, choice
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    retractions: int
    queue_to_first_token_s: float | None  # None: it ended before its first token
    duration_s: float

    @classmethod
    def of(cls, request: Request) -> RequestSummary:
        """The summary of a request that has just finished."""
        first = request.first_token_s - request.arrival_s if request.first_token_s else None
        reason, cached = request.finish_reason or "unknown", request.cached_tokens or 0
        counts = (request.prompt_len, request.output_len, cached, request.retractions)
        return cls(request.id, reason, *counts, first, time.monotonic() - request.arrival_s)


class ObserverHooks:
    """The hooks that an observer may implement."""

    @hookspec
    def start(self, info: ServiceInfo) -> None:
        """The engine is ready. Called once, before the first step."""

    @hookspec
    def stop(self) -> None:
        """The engine ends. Called once, after the last step; flush and close files here."""

    @hookspec
    def step(self, stats: StepStats) -> None:
        """A step was committed."""

    @hookspec
    def request(self, summary: RequestSummary) -> None:
        """A choice of a call has finished, was aborted or failed."""


@dataclass(slots=True)
class _Observer:
    name: str
    failures: int = 0


_Baked = tuple[tuple[_Observer, Callable[..., Any]], ...]


class ObserverSet:
    """The observers of one engine. One that raises is logged by name, and switched off after `MAX_ERRORS` times."""

    def __init__(self, observers: Sequence[tuple[str, Any]]) -> None:
        """Bake (name, observer) pairs, called in this order. PluginError for a misspelt hook, or one without hooks."""
        manager = pluggy.PluginManager("phloem")
        manager.add_hookspecs(ObserverHooks)
        names = [name for name in vars(ObserverHooks) if not name.startswith("_")]
        by_plugin: dict[str, _Observer] = {}
        for i, (name, observer) in reversed(list(enumerate(observers))):  # pluggy calls the last registered first
            key = f"{name}[{i}]"
            by_plugin[key] = _Observer(name)
            try:
                manager.register(observer, key)
            except pluggy.PluginValidationError as error:
                raise PluginError(f"observer '{name}': {' '.join(str(error).split())}") from error
            if not manager.get_hookcallers(observer):
                raise PluginError(f"observer '{name}' has no hook", hint="mark its methods with phloem.hooks.hookimpl")
            for hook in sorted(h.name for h in manager.get_hookcallers(observer) or () if h.name not in names):
                raise PluginError(f"observer '{name}' implements '{hook}', no such hook {did_you_mean(hook, names)}")
        manager.check_pending()
        self._hooks: dict[str, _Baked] = {}
        for name in names:
            baked = []
            for implementation in reversed(getattr(manager.hook, name).get_hookimpls()):
                if implementation.wrapper or implementation.hookwrapper:
                    raise PluginError(f"observer '{implementation.plugin_name}': hooks cannot be wrappers")
                function = implementation.function
                call = function if implementation.argnames else lambda *_, function=function: function()
                baked.append((by_plugin[implementation.plugin_name], call))
            self._hooks[name] = tuple(baked)

    def start(self, info: ServiceInfo) -> None:
        """The engine is ready."""
        self._call("start", info)

    def stop(self) -> None:
        """The engine ends."""
        self._call("stop")

    def step(self, stats: StepStats) -> None:
        """A step was committed; called once a step."""
        self._call("step", stats)

    def request(self, request: Request) -> None:
        """A request finished; called once a request."""
        if self._hooks["request"]:
            self._call("request", RequestSummary.of(request))

    def _call(self, hook: str, *arguments: Any) -> None:
        for observer, call in self._hooks[hook]:
            try:
                call(*arguments)
            except Exception:
                observer.failures += 1
                log.exception(
                    "observer '%s' raised in %s (%d of %d)", observer.name, hook, observer.failures, MAX_ERRORS
                )
                if observer.failures == MAX_ERRORS:
                    log.error("observer '%s' is switched off", observer.name)
                    self._hooks = {
                        name: tuple(pair for pair in baked if pair[0] is not observer)
                        for name, baked in self._hooks.items()
                    }
