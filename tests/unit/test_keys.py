"""Key schemes in an engine: what is shared follows the keys, through turns and retraction; faults stay local."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem import Engine, SamplingParams
from phloem.config import load_config
from phloem.errors import ConfigError, PhloemError, RequestError
from phloem.keys import rekey
from phloem.testing import KeySuite
from phloem.testing.schedule import waiting_request

Tiny = Callable[[str], Path]
FOUR = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
SCHEMES = '''
from array import array
from pydantic import BaseModel, ConfigDict


class Base:
    api = 1
    capabilities = frozenset()

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        above: int = 3

    def __init__(self, options, context):
        self.above = options.above


class Own(Base):
    """Each routing key its own, from the position `above` on."""

    def keys(self, tokens, start, call):
        own = hash(call.routing_key or "") >> 8 << 24 & (1 << 62) - 1
        return array("q", (t if i < self.above else own + t for i, t in enumerate(tokens[start:], start)))


class Coarse(Base):
    def keys(self, tokens, start, call):
        return array("q", (t // 2 for t in tokens[start:]))


class Narrow(Base):
    def keys(self, tokens, start, call):
        return tokens[start:]


class Short(Base):
    def keys(self, tokens, start, call):
        return array("q", tokens[start + 1 :])


class Hindsight(Base):
    def keys(self, tokens, start, call):
        return array("q", (t + len(tokens) for t in tokens[start:]))


class Raising(Base):
    """Of outputs only."""

    def keys(self, tokens, start, call):
        if start and call.routing_key == "bad":
            raise ZeroDivisionError("no key")
        return array("q", tokens[start:])
'''


@pytest.fixture
def schemes(tmp_path: Path) -> Path:
    file = tmp_path / "schemes.py"
    file.write_text(SCHEMES)
    return file


def engine(tiny_model: Tiny, schemes: Path, name: str, *, tokens: int = 512, page: int = 1, **key: Any) -> Engine:
    return Engine(
        str(tiny_model("llama")),
        cache={"tokens": tokens, "page_size": page, "key": {"use": f"{schemes}:{name}", **key}},
        engine={"check": True, "threads": 1},
    )


PROMPT = [7, 9, 11, *(3 + i % 40 for i in range(60))]


@pytest.mark.parametrize("page", [1, 4])
def test_sharing_follows_the_keys(tiny_model: Tiny, schemes: Path, page: int) -> None:
    with engine(tiny_model, schemes, "Own", page=page, above=20) as made:
        first = made.generate(PROMPT, FOUR, routing_key="a")
        again = made.generate(PROMPT, FOUR, routing_key="a")
        other = made.generate(PROMPT, FOUR, routing_key="b")
        assert first.token_ids == again.token_ids == other.token_ids
        cached = [result.usage.cached_tokens for result in (first, again, other)]
        assert cached == [0, 62 // page * page, 20]


def test_the_next_turn_finds_the_output(tiny_model: Tiny, schemes: Path) -> None:
    with engine(tiny_model, schemes, "Own") as made:
        first = made.generate(PROMPT, FOUR, routing_key="a")
        turn = [*PROMPT, *first.token_ids, 5, 6]
        assert made.generate(turn, FOUR, routing_key="a").usage.cached_tokens == len(PROMPT) + 3
        assert made.generate(turn, FOUR, routing_key="b").usage.cached_tokens == 3


def test_company_and_retraction_change_nothing(tiny_model: Tiny, schemes: Path) -> None:
    """A pool too small for all: requests are retracted with half their output and found again by key."""
    long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    prompts = [[*PROMPT[:30], 50 + i] for i in range(6)]
    with Engine(str(tiny_model("llama")), engine={"threads": 1}) as plain:
        expected = [plain.generate(prompt, long).token_ids for prompt in prompts]
    with engine(tiny_model, schemes, "Own", tokens=200) as made:
        results = made.generate(prompts, long, routing_key="a")
        assert made.stats()["retractions"] > 0
        assert [result.token_ids for result in results] == expected


def test_pins_go_by_keys(tiny_model: Tiny, schemes: Path) -> None:
    with Engine(
        str(tiny_model("llama")),
        cache={"tokens": 512, "pin_share": 0.25, "key": f"{schemes}:Own"},
        engine={"check": True, "threads": 1},
    ) as made:
        made.pin("system", PROMPT)
        made.pin("own", PROMPT, routing_key="a")
        made.flush_cache()
        assert made.generate(PROMPT, FOUR).usage.cached_tokens == 62
        made.unpin("system")
        made.flush_cache()
        assert made.generate(PROMPT, FOUR).usage.cached_tokens == 3
        assert made.generate(PROMPT, FOUR, routing_key="a").usage.cached_tokens == 62
        with pytest.raises(RequestError, match="unknown argument 'hold'"):
            made.pin("own", PROMPT, hold="a")


def test_a_scheme_that_raises_ends_its_request_only(tiny_model: Tiny, schemes: Path) -> None:
    with engine(tiny_model, schemes, "Raising") as made:
        with pytest.raises(PhloemError, match="the key scheme failed: no key"):
            made.generate(PROMPT, FOUR, routing_key="bad")
        assert len(made.generate(PROMPT, FOUR).token_ids) == 4


@pytest.mark.parametrize("name", ["Narrow", "Short"])
def test_wrong_keys_are_refused_at_arrival(tiny_model: Tiny, schemes: Path, name: str) -> None:
    with engine(tiny_model, schemes, name) as made, pytest.raises(PhloemError, match=f"{name}.keys.. returned 6"):
        made.generate(PROMPT, FOUR)


def test_without_a_scheme_keys_are_the_tokens() -> None:
    request = waiting_request(0)
    rekey(request, None)
    assert request.keys is request.tokens


def load(schemes: Path, name: str) -> type[Any]:
    space: dict[str, Any] = {}
    exec(compile(schemes.read_text(), "schemes.py", "exec"), space)
    scheme: type[Any] = space[name]
    return scheme


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("Narrow", "test_one_key_per_token"),
        ("Short", "test_one_key_per_token"),
        ("Hindsight", "test_a_key_depends_on_what_is_before_it_only"),
        ("Coarse", "test_equal_keys_mean_equal_tokens"),
    ],
)
def test_the_suite_finds_what_is_wrong(schemes: Path, name: str, test: str) -> None:
    suite = type("Suite", (KeySuite,), {"plugin": load(schemes, name)})()
    with pytest.raises(AssertionError):
        getattr(suite, test)()
    good = type("Suite", (KeySuite,), {"plugin": load(schemes, "Own")})()
    getattr(good, test)()


def test_mistakes_have_places(schemes: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("cache:\n  key: {use: './schemes.py:Own', abov: 3}\n")
    with pytest.raises(ConfigError, match=r"engine.yaml:2:34: cache.key.abov: unknown key .did you mean 'above'"):
        load_config(str(file), env={})
    file.write_text("cache:\n  key: priv\n")
    with pytest.raises(ConfigError, match=r"engine.yaml:2:3: cache.key.use: no key plugin is named 'priv'"):
        load_config(str(file), env={})
