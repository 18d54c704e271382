"""Conversations that keep their place in the cache between turns: a `session` in a request names its hold."""

from __future__ import annotations

import json

from phloem.errors import RequestError
from phloem.interfaces import ServiceInfo

MAX_NAME = 256


def session_hold(
    session: str | None,
    salt: str | None,
    adapter: str | None,
    prompts: int,
    info: ServiceInfo,
    idle_s: float | None = None,
) -> str | None:
    """The name of a session's hold, None without a session. RequestError where a session cannot be honoured.

    Salt and adapter are part of it: a tenant cannot end or replace another one's session by guessing its name.
    """
    if session is None:
        if idle_s is not None:
            raise RequestError("session_idle_s needs a session", param="session_idle_s")
        return None
    if idle_s is not None and not 0 < idle_s <= info.hold_idle_s:
        problem = f"session_idle_s must be above 0 and at most {info.hold_idle_s:g}, got {idle_s:g}"
        raise RequestError(problem, hint="the most is the server's schedule.hold_idle_s", param="session_idle_s")
    if not 0 < len(session) <= MAX_NAME:
        raise RequestError(f"session must have 1 to {MAX_NAME} characters, got {len(session)}", param="session")
    if not info.shares:
        raise RequestError(
            "this server's cache finds no prefix again, so a session would keep nothing",
            hint="leave session out, or serve with a cache that shares, such as radix",
            param="session",
        )
    if prompts != 1:
        raise RequestError(f"a session is one conversation, got {prompts} prompts", param="session")
    return "session " + json.dumps([salt, adapter, session])
