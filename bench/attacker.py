"""Hostile constraints, sent to a server of this machine until standard input ends: python -m bench.attacker URL KIND.

Closed loop, `--clients` at a time and at most `--pace` a second, for at most `--seconds`. Every request is new to the
server. At the end the connections are dropped as they are, and a JSON object counts the answers by status. Used by
bench.attack.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from urllib.parse import urlsplit

# Backtracking ones, ones whose automaton has 2^n states, and ones that repeat what repeats.
REGEXES = (
    "(x+x+)+y{number}",
    "[ab]*a[ab]{{{big}}}c{number}",
    "((.{{0,{big}}}){{0,{big}}}){{0,{big}}}z{number}",
    "(a?){{{big}00}}a{{{big}00}}{number}",
)
LARGEST = 4_000_000  # bytes: below the limit of a body, above that of a constraint
LARGE = 1_000_000  # below both


def regex(number: int) -> str:
    """A catastrophic regular expression."""
    return json.dumps({"regex": REGEXES[number % len(REGEXES)].format(number=number, big=20 + number % 30)})


@cache
def _large(size: int) -> str:
    """JSON text with a mark in it: written once, as the attacker's own work must not count."""
    properties = {f"property_{i}": {"type": "string"} for i in range(size // 40)}
    return json.dumps({"json_schema": {"title": "NUMBER", "type": "object", "properties": properties}})


def large(number: int) -> str:
    """A schema of 4 MB, or of the megabyte that is still compiled."""
    return _large(LARGE if number % 2 else LARGEST).replace("NUMBER", f"{number}", 1)


def distinct(number: int) -> str:
    """One of thousands of small schemas."""
    properties = {f"field_{number}_{i}": {"type": "integer", "minimum": number} for i in range(4)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return json.dumps({"json_schema": schema})


def deep(number: int) -> str:
    """References in circles, and bounds that are huge."""
    loop = {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
        "title": f"{number}",
    }
    huge = {"type": "array", "items": {"type": "integer"}, "minItems": 100_000 + number, "maxItems": 10_000_000}
    return json.dumps({"json_schema": huge if number % 2 else loop})


def plain(number: int) -> str:
    """No constraint: what as many requests cost by themselves, which is the measure of `distinct`."""
    return json.dumps({"temperature": 0.0})


# By name: the parameters of request `number`, as JSON.
KINDS: dict[str, Callable[[int], str]] = {
    "regex": regex,
    "large": large,
    "distinct": distinct,
    "deep": deep,
    "plain": plain,
}


def client(host: str, port: int, bodies: Callable[[], bytes], end: float, counts: Counter[str]) -> None:
    """One client: its next request follows its last answer."""
    while (left := end - time.monotonic()) > 0:
        connection = http.client.HTTPConnection(host, port, timeout=left)
        try:
            connection.request("POST", "/generate", bodies(), {"Content-Type": "application/json"})
            counts[str(connection.getresponse().status)] += 1
        except (OSError, http.client.HTTPException) as error:
            counts[type(error).__name__] += 1
        finally:
            connection.close()


def main() -> None:
    """Attack until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--first", type=int, default=0, help="number of the first request: others are new ones")
    parser.add_argument("--pace", type=float, default=8.0, help="requests a second, at most")
    options = parser.parse_args()
    begin = time.monotonic()
    numbers, lock, counts = itertools.count(options.first), threading.Lock(), Counter[str]()

    def body() -> bytes:
        with lock:
            number = next(numbers)
        time.sleep(max(0.0, begin + (number - options.first) / options.pace - time.monotonic()))
        params = KINDS[options.kind](number).removeprefix("{")
        return f'{{"input_ids": [5], "sampling_params": {{"max_tokens": 1, {params}}}'.encode()

    address, end = urlsplit(options.url), begin + options.seconds
    if address.hostname != "127.0.0.1":
        raise SystemExit("only a server of this machine is attacked: http://127.0.0.1:PORT")
    for _ in range(options.clients):
        arguments = (address.hostname, address.port, body, end, counts)
        threading.Thread(target=client, args=arguments, daemon=True).start()
    sys.stdin.read()
    print(json.dumps({"next": next(numbers), "answers": counts}), flush=True)
    os._exit(0)  # not waiting for answers


if __name__ == "__main__":
    main()
