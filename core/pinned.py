"""Pins that the configuration names (`cache.pins`): computed when the loop begins, before it serves anybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .config import Config
from .config_sections import PinSection
from .config_yaml import KeyPath, dotted
from .errors import ConfigError, RequestError
from .messages import ErrorInfo, pin_call
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .loop import EngineCore


class PinWanted(NamedTuple):
    """A pin of the configuration, and where it stands there."""

    place: str
    section: PinSection


def pins_wanted(config: Config) -> list[PinWanted]:
    """The pins of a configuration, in its order."""
    wanted = []
    for i, section in enumerate(config.cache.pins):
        path: KeyPath = ("cache", "pins", i)
        layer, mark = config.origin(path)
        wanted.append(PinWanted(f"{mark.place if mark else layer}: {dotted(path)}", section))
    return wanted


def pin_all(core: EngineCore, pins: Sequence[PinWanted]) -> None:
    """Compute and pin. Called once, by the loop, when nobody is served yet.

    Raises ConfigError with all that cannot be pinned, and why: longer than a request may be, over the limit, less than
    a page, no prompt for this model.
    """
    places: dict[str, str] = {}
    calls, problems = [], []
    for i, (place, section) in enumerate(pins):
        try:
            prompt = _prompt(section, core.parts.admission.tokenizer)
        except RequestError as error:
            problems.append(_said(place, error))
            continue
        salt, adapter, key = section.salt, section.adapter, section.routing_key
        calls.append(pin_call(f"pin-{i}", section.name, prompt, salt=salt, adapter=adapter, routing_key=key))
        places[calls[-1].call_id] = place
    for event in core.complete(calls):
        if event.error is not None:
            problems.append(_said(places[event.call_id], event.error))
    if problems:
        raise ConfigError(problems)


def _said(place: str, error: RequestError | ErrorInfo) -> str:
    return f"{place}: {error.message}" + (f"; {error.hint}" if error.hint else "")


def _prompt(section: PinSection, tokenizer: Tokenizer) -> list[int]:
    if section.messages is not None:
        return tokenizer.chat_prefix(section.messages)
    return tokenizer.encode(section.text) if section.text is not None else list(section.token_ids or ())
