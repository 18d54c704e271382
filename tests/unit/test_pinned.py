"""Pins of the configuration: computed before anybody is served, and refused with their places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem import Engine, SamplingParams
from phloem.config import load_config
from phloem.errors import ConfigError

Tiny = Callable[[str], Path]
ONE = SamplingParams(max_tokens=1, temperature=0)
SYSTEM = {"role": "system", "content": "You are a botanist."}

OBSERVER = """
from pydantic import BaseModel, ConfigDict

SEEN = []


class Watch:
    api = 1
    capabilities = frozenset()

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options, context):
        SEEN.clear()

    from phloem.hooks import hookimpl

    @hookimpl
    def start(self, info):
        SEEN.append("start")

    @hookimpl
    def step(self, stats):
        SEEN.append("step")
"""


def engine(folder: Path, pins: list[dict[str, Any]], **more: Any) -> Engine:
    cache = {"tokens": 512, "pin_share": 0.25, "pins": pins, **more}
    return Engine(str(folder), cache=cache, engine={"check": True, "threads": 1})


def cached(made: Engine, prompt: list[int], **call: Any) -> int:
    return made.generate(prompt, ONE, **call).usage.cached_tokens


def test_they_are_there_from_the_first_request(tiny_model: Tiny) -> None:
    """By text, by messages through the chat template, by ids; each in its namespace; they stay through a flush."""
    pins = [
        {"name": "story", "text": "Once upon a time"},
        {"name": "system", "messages": [SYSTEM]},
        {"name": "ids", "token_ids": [*range(40, 60)], "salt": "mine"},
    ]
    with engine(tiny_model("llama"), pins) as made:
        named = made.stats()["pins"]["named"]
        assert list(named) == ["story", "system", "ids"]
        chat = made.tokenizer.chat([SYSTEM, {"role": "user", "content": "Why?"}])
        story = made.tokenizer.encode("Once upon a time")
        assert (named["story"], named["ids"]) == (len(story), 20)
        assert chat[: named["system"]] == made.tokenizer.chat_prefix([SYSTEM])
        assert made.tokenizer.decode(chat[named["system"] :]).startswith("Why?")
        made.flush_cache()
        assert cached(made, chat) == named["system"]
        assert cached(made, [*story, 7]) == len(story)
        assert cached(made, [*range(40, 60), 7], salt="mine") == 20
        assert cached(made, [*range(40, 60), 7]) == 0
        assert made.unpin("system")


def test_overlap_and_pages_change_nothing(tiny_model: Tiny) -> None:
    pins = [{"name": "a", "token_ids": [*range(40, 70)]}, {"name": "b", "token_ids": [*range(40, 60), *range(9, 30)]}]
    with Engine(
        str(tiny_model("llama")),
        cache={"tokens": 512, "pin_share": 0.25, "page_size": 4, "pins": pins},
        schedule={"chunk": 8},
        engine={"check": True, "threads": 1, "overlap": "on"},
    ) as made:
        assert made.stats()["pins"]["named"] == {"a": 28, "b": 40}
        assert cached(made, [*range(40, 75)]) == 28


def test_observers_have_started_before(tiny_model: Tiny, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(OBSERVER)
    with Engine(
        str(tiny_model("llama")),
        cache={"tokens": 512, "pin_share": 0.25, "pins": [{"name": "a", "token_ids": [5, 6, 7]}]},
        engine={"threads": 1},
        observers=[f"{tmp_path}/watch.py:Watch"],
    ) as made:
        watch = made.config.observers[0].plugin
        assert watch is not None
        seen = watch.__init__.__globals__["SEEN"]
        assert seen[:2] == ["start", "step"]


def test_what_cannot_be_pinned_ends_the_start(tiny_model: Tiny, tmp_path: Path) -> None:
    """All of it at once, each at its place in the file, with the arithmetic."""
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"model: {tiny_model('llama')}\n"
        "engine: {threads: 1}\n"
        "cache:\n"
        "  tokens: 256\n"
        "  pin_share: 0.25\n"
        "  pins:\n"
        "    - {name: fits, token_ids: [" + ", ".join(["7"] * 40) + "]}\n"
        "    - {name: more, token_ids: [" + ", ".join(["8"] * 40) + "]}\n"
        "    - {name: long, token_ids: [" + ", ".join(["9"] * 192) + "]}\n"
        "    - {name: strange, token_ids: [5, 999999]}\n"
        "    - {name: empty, text: ''}\n"
        "    - {name: voices, messages: []}\n"
    )
    with pytest.raises(ConfigError) as refused:
        Engine.from_yaml(str(path))
    places = [problem.split(": ")[:2] for problem in refused.value.problems]
    assert sorted(places) == sorted([f"{path}:{7 + i}:7", f"cache.pins[{i}]"] for i in range(1, 6))
    text = str(refused.value)
    assert "pin 'more' of 40 tokens would make 80 pinned tokens, 64 are allowed; raise cache.pin_share" in text
    assert "prompt of 192 tokens + max_tokens 1 = 193 exceeds the limit of 192 tokens" in text
    assert "token 999999 is outside the vocabulary" in text


@pytest.mark.parametrize(
    ("pins", "place", "problem"),
    [
        ([{"name": "a", "text": "x"}, {"name": "a", "text": "y"}], "[1].name", "an earlier pin has this name"),
        ([{"name": "a"}], "[0]", "needs one of text, messages, token_ids; it has none"),
        ([{"name": "a", "text": "x", "token_ids": [1]}], "[0]", "it has text and token_ids"),
        ([{"text": "x"}], "[0].name", "is required"),
        ([{"name": "a", "txt": "x"}], "[0].txt", "unknown key (did you mean 'text'?)"),
    ],
)
def test_a_malformed_pin_is_refused_without_a_model(pins: list[dict[str, Any]], place: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(sections={"cache": {"pins": pins}}, env={})
    (said,) = [line for line in refused.value.problems if f"cache.pins{place}: " in line]
    assert problem in said


def test_a_share_of_nothing_pins_nothing(tiny_model: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"cache.pins\[0\]: pin 'a' of 1 tokens .* 0 are allowed; raise cache.pin_sh"):
        engine(tiny_model("llama"), [{"name": "a", "token_ids": [5]}], pin_share=0)


def test_a_prefix_of_chats_is_one_of_all_that_begin_so(tiny_model: Tiny) -> None:
    """After a user's turn the next is an assistant's; whatever the next says, the prefix is the beginning of it."""
    with Engine(str(tiny_model("llama")), cache={"tokens": 256}, engine={"threads": 1}) as made:
        turns = [SYSTEM, {"role": "user", "content": "Name a tree."}, {"role": "assistant", "content": "Oak."}]
        for count in (1, 2, 3):
            prefix = made.tokenizer.chat_prefix(turns[:count])
            role = "assistant" if count == 2 else "user"
            for said in ("Why?", "  so", "1", "\n"):
                chat = made.tokenizer.chat([*turns[:count], {"role": role, "content": said}])
                assert chat[: len(prefix)] == prefix
            assert turns[count - 1]["content"] in made.tokenizer.decode(prefix)
