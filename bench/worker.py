"""One engine in a process of its own: loads a peer, then runs workloads on command and idles between.

python -m bench.worker PEER [JSON options]; a JSON object per line in, one per line out. Used by bench.run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

from bench.workloads import load, passes, run


def answer(peer: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command: {"workload", "variant"}, optionally "max_tokens" and "requests" (at most so many), or
    {"call": method name}."""
    if "call" in command:
        return {"value": getattr(peer, command["call"])()}
    data = load(command["workload"], command["variant"])
    if "max_tokens" in command:
        data["max_tokens"] = command["max_tokens"]
    if "requests" in command and command["workload"] not in ("W1", "W4", "W5"):  # which have a shape of their own
        data["prompts"] = data["prompts"][: command["requests"]]
    reset = getattr(peer, "reset", None)
    if reset:
        reset()  # a second engine meets the variant that another has seen; this one must not have it cached
    metrics, waves = run(command["workload"], peer, data)
    counters = getattr(peer, "counters", None)
    reply: dict[str, Any] = {"metrics": metrics, "counters": counters(waves) if counters else {}}
    reply["passes"] = passes(command["workload"], waves)
    if command["workload"] == "W6g":
        reply["documents"] = [[peer.text(ids), len(ids)] for _, outputs in waves for ids in outputs]
    return reply


def main() -> None:
    """Serve commands until the input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print what they like; the pipe carries replies only
    name, options = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    begin = time.perf_counter()
    peer = importlib.import_module(f"bench.peers.{name}").connect(**options)
    print(json.dumps({"ready_s": time.perf_counter() - begin, "about": getattr(peer, "about", {})}), file=replies)
    try:
        for line in sys.stdin:
            try:
                reply = answer(peer, json.loads(line))
            except Exception as error:
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies)
    finally:
        close = getattr(peer, "close", None)
        if close:
            close()


if __name__ == "__main__":
    main()
