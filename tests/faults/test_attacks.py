"""Constraints that are sent to hurt: a 400 or a bounded cost over each real backend, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from attacks import ATTACKS, LARGE, Attack
from equivalence.harness import engine, prompts
from live import Live
from process_tree import idle
from schemas import validate

from phloem import Engine, SamplingParams
from phloem.errors import RequestError
from phloem.results import Result

BACKENDS = ("xgrammar", "llguidance", "outlines")
ALL: dict[str, Any] = {"use": "xgrammar", "also": list(BACKENDS[1:]), "memory": "1GiB"}
PROMPTS = prompts(3, high=30)
Pair = tuple[Attack, str]


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def memory() -> int:
    """Bytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def attacked(running: Engine, pairs: Sequence[Pair]) -> list[Result | RequestError]:
    """All attacks at once, and bystanders beside them, whose tokens are those without the attacks."""
    bystanders = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)]
    bystanders.append(SamplingParams(temperature=1.0, seed=3, max_tokens=40, regex="[a-z]{9,30}"))

    async def one(attack: Attack, backend: str) -> Result | RequestError:
        try:
            constraint = {attack.kind: attack.value, "grammar_backend": backend}
            result: Result = await running.agenerate("x", SamplingParams(max_tokens=8, seed=1, **constraint))
            return result
        except RequestError as error:
            return error

    async def beside() -> list[list[int]]:
        asked = [running.agenerate(prompt, params) for prompt in PROMPTS for params in bystanders]
        return [result.token_ids for result in await asyncio.gather(*asked)]

    async def together() -> list[Result | RequestError]:
        alone = await beside()
        under_way = [asyncio.ensure_future(one(*pair)) for pair in pairs]
        while not all(attack.done() for attack in under_way):
            assert await beside() == alone
        return [attack.result() for attack in under_way]

    return asyncio.run(together())


def judge(pairs: Sequence[Pair], results: Sequence[Result | RequestError]) -> None:
    """A 400 about the constraint, or output within the bounds that satisfies it."""
    for (attack, backend), result in zip(pairs, results, strict=True):
        what = f"{attack.name} over {backend}"
        if isinstance(result, RequestError):
            assert (result.param, result.status) == (attack.kind, 400), f"{what}: {result}"
            assert len(str(result)) < 5000, what
            continue
        assert not attack.refused, f"{what} wrote {result.text!r}"
        assert len(result.token_ids) <= 8, what
        if attack.kind == "json_schema" and result.finish_reason == "stop":
            schema = json.loads(attack.value) if isinstance(attack.value, str) else attack.value
            validate(json.loads(result.text), schema)


def test_quick_attacks(llama: Path) -> None:
    """what-breaks 31, 33, 35: each over one backend; the slow suite sends all to all."""
    quick = [attack for attack in (*ATTACKS, LARGE) if not attack.heavy]
    pairs = [(attack, attack.backends[i % len(attack.backends)]) for i, attack in enumerate(quick)]
    with engine(llama, grammar=ALL) as running:
        judge(pairs, attacked(running, pairs))
        running.check()
        counts = running.stats()["grammar"]
        assert counts["timeouts"] == counts["waiting"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_attacks(llama: Path, backend: str) -> None:
    """Beside them all, a few at a time as workers allow, the engine goes on and its memory stays bounded."""
    pairs = [(attack, backend) for attack in (*ATTACKS, LARGE) if backend in attack.backends]
    with engine(llama, grammar=ALL | {"timeout_s": 20, "workers": 2}) as running:
        judge(pairs[:1], attacked(running, pairs[:1]))
        before = memory()
        judge(pairs, attacked(running, pairs))
        running.check()
        assert memory() - before < 1 << 30
        assert running.stats()["grammar"]["waiting"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousands_of_constraints_stay_within_the_bytes(llama: Path) -> None:
    """Distinct schemas and regexes over all backends, one after the other: the cache evicts, and nothing else grows."""
    most = 4 << 20
    with engine(llama, grammar=ALL | {"cache_size": most, "workers": 2}) as running:

        async def ask(number: int) -> None:
            backend = BACKENDS[number % 3]
            constraint: dict[str, Any] = {"regex": f"[a-z]{{{1 + number % 7}}}{number}"}
            if number % 2:
                constraint = {"json_schema": {"enum": [number, f"v{number}"]}}
            result = await running.agenerate("x", SamplingParams(max_tokens=20, grammar_backend=backend, **constraint))
            assert str(number) in result.text or result.finish_reason == "length"

        async def some(numbers: range) -> None:
            await asyncio.gather(*map(ask, numbers))
            counts = running.stats()["grammar"]
            assert counts["bytes"] <= most
            assert counts["kept"] <= most // (32 << 10)

        asyncio.run(some(range(300)))
        before = memory()
        for begin in range(300, 2100, 300):
            asyncio.run(some(range(begin, begin + 300)))
        assert memory() - before < 100 << 20
        assert running.stats()["grammar"]["compiled"] == 2100


# --- a real server


@pytest.fixture(scope="module")
def live(llama: Path) -> Iterator[Live]:
    sets = ("grammar.use=xgrammar", 'grammar.also=["llguidance","outlines"]', "grammar.memory=1GiB")
    with Live(llama, *sets, "grammar.timeout_s=60") as server:
        yield server


HEAVY = [
    ("outlines", "exponential automaton"),
    ("outlines", "large enum"),
    ("xgrammar", "many properties"),
    ("xgrammar", "large enum"),
    ("xgrammar", "range beyond 64 bits"),
    ("llguidance", "nested anyOf"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "name"), HEAVY)
def test_no_cpu_is_used_one_second_after_an_abort(live: Live, backend: str, name: str) -> None:
    """what-breaks 33: a compilation that nobody waits for burns on; here with the real libraries."""
    assert live.complete(regex="a", grammar_backend=backend).status_code == 200  # its process has started
    [attack] = [one for one in ATTACKS if one.name == name]
    body = {"prompt": "x", "max_tokens": 400, attack.kind: attack.value, "grammar_backend": backend}
    try:
        httpx.post(f"{live.url}/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.3))
    except httpx.ReadTimeout:
        time.sleep(1)
    assert idle(live.model_pid)
    assert live.complete().status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_attacks_over_http(live: Live) -> None:
    """Four attackers at a time; every answer is a 200 or a 400, and the server is as ready as before."""
    plain = live.complete(temperature=0).json()["choices"][0]["text"]

    def send(pair: Pair) -> tuple[Pair, int, Any]:
        attack, backend = pair
        body = json.dumps({"prompt": "x", "max_tokens": 6, attack.kind: attack.value, "grammar_backend": backend})
        answer = httpx.post(
            f"{live.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=300
        )
        return pair, answer.status_code, answer.json()

    pairs = [(attack, backend) for attack in ATTACKS for backend in attack.backends if not attack.heavy]
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send, pair) for pair in pairs]
        while not all(one.done() for one in sent):
            assert live.complete(temperature=0).json()["choices"][0]["text"] == plain
        for (attack, backend), status, answer in (one.result() for one in sent):
            assert status in (200, 400), (attack.name, backend, answer)
            if status == 400:
                param = answer["error"]["param"]  # none where the request as a whole cannot be read
                assert param is None or param.startswith(attack.kind), (attack.name, backend, answer)
            else:
                assert not attack.refused, (attack.name, backend, answer)
    live.until(live.all_slots_back)
    assert live.status("/ready") == 200


def test_refusals_are_remembered_within_the_bytes(llama: Path) -> None:
    """Of invalid constraints of 100 kB each only the last are kept."""
    with engine(llama, grammar={"use": "llguidance", "cache_size": "1MiB"}) as running:
        for i in range(12):
            with pytest.raises(RequestError, match="not a regular expression"):
                running.generate("x", SamplingParams(regex="(" + "x" * 100_000 + str(i)))
        counts = running.stats()["grammar"]
        assert counts["bytes"] <= 1 << 20
        assert 1 < counts["kept"] < 12
