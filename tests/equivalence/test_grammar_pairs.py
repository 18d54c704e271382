"""Pairs of features that meet under a grammar: thoughts, canonical forcing, tool calls, rows of few tokens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from equivalence.harness import TOYS, engine, prompts
from phloem import Engine, SamplingParams, sampler
from phloem.interfaces import PluginContext
from phloem.plugins.api.openai import OpenAIApi
from phloem.results import Result

TOY = {"use": "phloem.testing.toy_grammar:ToyGrammar"}
PATTERN = r"(the|a) (quick|slow) (fox|dog)s?( and so on)?\."
PROMPTS = prompts(4, high=30)
GREEDY: dict[str, Any] = {"temperature": 0.0}
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def specs(texts: Sequence[Sequence[int]], *names: str) -> list[dict[str, Any]]:
    """Drafters by name."""
    toys = {name: {"use": f"{TOYS}:{name}", "texts": [list(text) for text in texts]} for name in names}
    return [{"use": "grammar"} if name == "grammar" else toys[name] for name in names]


# --- thoughts


@pytest.mark.parametrize(("grammar", "kind"), [(TOY, GREEDY), ({"use": "llguidance"}, HOT)], ids=["toy", "llguidance"])
def test_thoughts_are_the_same_with_drafts_and_retracted(
    llama: Path, grammar: dict[str, Any], kind: dict[str, Any]
) -> None:
    """what-breaks 37: thoughts that the prompt opened, that may come, and that never end by themselves."""
    more: dict[str, Any] = {"think_start": "<think>", "think_end": "</think>", "max_tokens": 60, **kind}
    bound = SamplingParams(regex=PATTERN, think_tokens=9, **more)
    free = SamplingParams(think_tokens=12, ignore_eos=True, **more)

    def run(**sections: Any) -> tuple[list[list[int]], dict[str, Any]]:
        with engine(llama, grammar=grammar, **sections) as running:
            opened = [prompt + running.tokenizer.encode("<think>") for prompt in PROMPTS[:3]]
            results = running.generate([*opened, PROMPTS[3]], bound) + running.generate(opened, free)
            running.check()
            for result in results[:3]:
                assert re.fullmatch(f"(?s).*</think>{PATTERN}", result.text), result.text
            assert re.fullmatch(f"(?s)(\\s*<think>.*</think>)?{PATTERN}", results[3].text), results[3].text
            assert all("</think>" in result.text for result in results[4:])
            return [result.prompt_token_ids + result.token_ids for result in results], dict(running.stats())

    plain, _ = run(spec=[])
    rows = ((("grammar",), 3, "off", 140), (("Right",), 64, "on", 140), (("grammar", "Tree"), 3, "on", 4096))
    for names, chunk, overlap, pool in rows:
        sections = {"cache": {"tokens": pool}, "schedule": {"chunk": chunk}, "engine": {"overlap": overlap}}
        written, stats = run(spec=specs(plain, *names), **sections)
        assert written == plain, (names, sections)
        assert stats["accepted_tokens"] > 20, names
        assert (stats["retractions"] > 0) == (pool == 140), names


# --- canonical forcing


@pytest.mark.parametrize("kind", [GREEDY, HOT])
def test_canonical_forcing_beside_other_drafters(llama: Path, kind: dict[str, Any]) -> None:
    """What is forced is not the drafters' to change; those that are right may bring the model's own cut of it."""
    regex = r"\{'order(Id|Name)': '(é|世|yes){1,4}', 'and so on': (true|false)\}"
    params = SamplingParams(regex=regex, max_tokens=60, **kind)
    forced = {"use": "grammar", "forcing": "canonical"}

    def run(spec: list[dict[str, Any]], **sections: Any) -> list[Result]:
        with engine(llama, grammar=TOY, spec=spec, **sections) as running:
            results = running.generate(PROMPTS, params)
            running.check()
        for result in results:
            assert re.fullmatch(regex, result.text), result.text
            assert [note for note in result.outputs[0].notes if "canonical" in note]
        return results

    alone = run([forced])
    texts = [[*result.prompt_token_ids, *result.token_ids] for result in alone]
    others = enumerate(("Right", "Tree", "Ngram", "Wrong", "Raises", "Nonsense"))
    for i, name in list(others)[kind is HOT :: 2]:
        sections = {"cache": {"tokens": (4096, 140)[i // 2 % 2]}, "engine": {"overlap": ("off", "on")[i // 3]}}
        spec = [forced, *specs(texts, name)] if i // 2 % 2 else [*specs(texts, name), forced]
        results = run(spec, **sections)
        if name in ("Wrong", "Nonsense"):  # proposes nothing that is taken
            assert [r.token_ids for r in results] == [r.token_ids for r in alone], name


# --- tool calls


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["k", "größe"]}, "days": {"enum": [1, 20]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    for name in ("first", "second")
]


def called(running: Engine, parser: str) -> list[Any]:
    """Choices of several tool requests at once, without the ids of calls, which are random."""
    bodies: list[dict[str, Any]] = [
        {"tool_choice": "required", "parallel_tool_calls": False, "n": 2, "seed": 5},
        {"tool_choice": {"type": "function", "function": {"name": "second"}}, "temperature": 0},
        {"tool_choice": "required", "temperature": 1.3, "seed": 8, "logprobs": True, "top_logprobs": 1},
        {"tool_choice": "auto", "temperature": 0, "ignore_eos": True},
    ]

    async def together() -> list[httpx.Response]:
        context = PluginContext("api", "openai", extras={"parsers": {"tools": parser}})
        app = FastAPI()
        app.include_router(OpenAIApi(OpenAIApi.Options(), context).router(running.service()))
        transport = httpx.ASGITransport(app)
        base = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 110}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            return await asyncio.gather(*(client.post("/v1/chat/completions", json=base | body) for body in bodies))

    choices = []
    for response in asyncio.run(together()):
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            for call in choice["message"].get("tool_calls") or []:
                del call["id"]
            scored = (choice.pop("logprobs") or {}).get("content") or []
            choices.append(choice | {"token_ids": [entry["token_id"] for entry in scored]})
    assert sum(choice["finish_reason"] == "tool_calls" for choice in choices) >= 2
    return choices


@pytest.mark.parametrize(
    ("parser", "row"), [("hermes", ("on", [], 512, 8192)), ("pythonic", ("on", [{"use": "grammar"}], 64, 1024))]
)
def test_tool_calls_are_the_same_running_ahead(llama: Path, parser: str, row: tuple[str, list[Any], int, int]) -> None:
    """Overlap on and off, with drafts and without, in small chunks and from a small pool."""
    written = []
    for overlap, spec, chunk, pool in (("off", [], 512, 8192), row):
        sections = {"engine": {"overlap": overlap}, "schedule": {"chunk": chunk}, "cache": {"tokens": pool}}
        with engine(llama, grammar={"use": "llguidance"}, spec=spec, **sections) as running:
            written.append(called(running, parser))
            running.check()
    assert written[1] == written[0]


# --- rows of few tokens


def test_logprobs_and_choices_with_and_without_the_sparse_head(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that want logprobs are whole, those of company are not; nobody's tokens or logprobs change."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "seed": 4, "n": 3},
        {"temperature": 1.0, "seed": 4, "n": 3, "logprobs": 2},
        {"temperature": 1.2, "seed": 5, "n": 2, "logprobs": 1, "logprobs_mode": "processed", "top_p": 0.9},
    ]
    params = [SamplingParams(max_tokens=40, regex=PATTERN, **kind) for kind in kinds]

    def run(**sections: Any) -> list[Result]:
        async def together(running: Engine) -> list[Result]:
            asked = [running.agenerate(prompt, own) for own in params for prompt in PROMPTS]
            return list(await asyncio.gather(*asked))

        with engine(llama, grammar=TOY, **sections) as running:
            results = asyncio.run(together(running))
            running.check()
        return results

    def tokens(results: list[Result]) -> list[list[int]]:
        return [output.token_ids for result in results for output in result.outputs]

    def logprobs(results: list[Result]) -> list[float]:
        outputs = [output for result in results for output in result.outputs]
        return [entry.logprob for output in outputs for entry in output.logprobs or []]

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "FEW_TOKENS", 0)
        whole = run(spec=[])
    assert tokens(whole[4:8]) == tokens(whole[8:12])  # asking for logprobs changes nothing
    for chunk, overlap, spec in ((64, "off", ""), (3, "on", "grammar")):
        sections = {"schedule": {"chunk": chunk}, "engine": {"overlap": overlap}}
        sparse = run(spec=specs([], spec) if spec else [], **sections)
        assert tokens(sparse) == tokens(whole), sections
        assert logprobs(sparse) == pytest.approx(logprobs(whole), abs=1e-4), sections
