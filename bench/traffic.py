"""Steady traffic over HTTP: requests arrive when they arrive, whether or not earlier ones are done (open loop)."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.workloads import load


@dataclass
class Seen:
    """What clients saw: seconds to the first token of each request, and between tokens."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        """Pool with another window's."""
        self.first += other.first
        self.between += other.between
        self.failed += other.failed


def bodies(plain_tokens: int, schema_tokens: int, vocab_size: int) -> list[dict[str, Any]]:
    """Short requests to POST /generate: W2's prompts and W6's with the schema, in turns."""
    plain, record = load("W2", 1), load("W6g", 1)
    free = {"temperature": 0.0, "max_tokens": plain_tokens, "ignore_eos": True}
    schema = {"temperature": 0.0, "max_tokens": schema_tokens, "json_schema": record["schema"]}
    made = []
    for a, b in zip(plain["prompts"], record["prompts"], strict=False):
        for prompt, params in ((a, free), (b, schema)):
            ids = [token % vocab_size for token in prompt]
            made.append({"input_ids": ids, "sampling_params": params, "stream": True})
    return made


def renamed(body: dict[str, Any]) -> dict[str, Any]:
    """The same request; its schema, if it has one, is new to the server, which compiles it again."""
    params = body["sampling_params"]
    if "json_schema" not in params:
        return body
    schema = {**params["json_schema"], "title": uuid.uuid4().hex}
    return {**body, "sampling_params": {**params, "json_schema": schema}}


async def window(url: str, work: Sequence[dict[str, Any]], rate: float, seconds: float, seed: int) -> Seen:
    """Requests at `rate` a second for so long, Poisson, the same for the same seed; returns when all have ended."""
    source, seen, at = random.Random(seed), Seen(), 0.0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client, asyncio.TaskGroup() as group:
        begin = time.perf_counter()
        for number in range(int(4 * rate * seconds) + 1):
            if (at := at + source.expovariate(rate)) > seconds:
                break
            await asyncio.sleep(begin + at - time.perf_counter())
            group.create_task(_request(client, work[number % len(work)], seen))
    return seen


async def _request(client: httpx.AsyncClient, body: dict[str, Any], seen: Seen) -> None:
    last, first = time.perf_counter(), True
    try:
        async with client.stream("POST", "/generate", json=body) as reply:
            if reply.status_code != 200:
                seen.failed.append(f"{reply.status_code}: {(await reply.aread())[:200]!r}")
                return
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now, count = time.perf_counter(), len(json.loads(line[6:])["output_ids"])
                if first and count:
                    seen.first.append(now - last)
                    first, count = False, count - 1
                seen.between += [(now - last) / max(1, count)] * count
                last = now
    except httpx.HTTPError as error:
        seen.failed.append(repr(error))
