"""Calls of one program (`GenerateCall.group`): the order in which they compute each prefix once."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Request


def shortest_first(ordered: Sequence[Request]) -> list[Request]:
    """Waiting requests in the policy's order, but in the places of one group's members the shorter ones come first.

    What one member's prompt begins with is another's whole prompt: then that one runs its last token anyway, and
    nobody needs to run it twice.
    """
    groups: dict[str, list[Request]] = {}
    for request in ordered:
        if request.call.group is not None:
            groups.setdefault(request.call.group, []).append(request)
    if not groups:
        return list(ordered)
    queues = {name: iter(sorted(members, key=lambda r: len(r.tokens))) for name, members in groups.items()}
    return [request if (name := request.call.group) is None else next(queues[name]) for request in ordered]
