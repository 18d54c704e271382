"""Pins over HTTP, on a server with a model process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Live

SYSTEM = "The sugar a leaf makes travels down the stem in the phloem, and the water goes up in the xylem. "


@pytest.fixture(scope="module")
def live(tiny_model: Callable[[str], Path]) -> Iterator[Live]:
    pins = "cache.pins=[{name: start, messages: [{role: system, content: You are a leaf.}], salt: mine}]"
    with Live(tiny_model("llama"), "cache.tokens=256", "cache.pin_share=0.25", pins) as server:
        yield server


def post(live: Live, path: str, **body: Any) -> Any:
    answer = live.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(live: Live, text: str, **body: Any) -> int:
    answer = post(live, "/generate", text=text, sampling_params={"max_tokens": 2}, **body)
    found: int = answer["meta_info"]["cached_tokens"]
    return found


def test_what_the_configuration_pins_is_there_and_can_go(live: Live) -> None:
    """The first request finds it; over HTTP the same messages pin the same tokens."""
    chat = {"messages": [{"role": "system", "content": "You are a leaf."}, {"role": "user", "content": "Why?"}]}
    post(live, "/flush_cache")
    made = post(live, "/v1/chat/completions", max_tokens=1, cache_salt="mine", **chat)
    found = made["usage"]["prompt_tokens_details"]["cached_tokens"]
    live.until(lambda: live.metrics().get("phloem_pinned_tokens") == found > 0)
    assert post(live, "/unpin", name="start") == {"unpinned": True}
    again = post(live, "/pin", name="start", messages=chat["messages"][:1], salt="mine", routing_key="a")
    assert (again["prompt_tokens"], again["cached_tokens"]) == (found, found - 1)
    assert post(live, "/unpin", name="start") == {"unpinned": True}
    answer = live.http.post("/pin", json={"name": "a", "messages": chat["messages"], "text": "b"})
    assert answer.json()["error"]["param"] == "messages"


def test_a_pinned_text_survives_a_flush(live: Live) -> None:
    made = post(live, "/pin", name="system", text=SYSTEM)
    assert made["cached_tokens"] == 0
    tokens = made["prompt_tokens"]
    assert 20 < tokens <= 64
    post(live, "/flush_cache")
    assert cached(live, SYSTEM + "Why?") >= tokens - 1  # the last token may merge with what follows
    assert cached(live, SYSTEM + "Why?", salt="other") == 0
    live.until(lambda: live.metrics().get("phloem_pinned_tokens") == tokens)
    assert live.metrics()["phloem_pins"] == 1
    assert post(live, "/unpin", name="system") == {"unpinned": True}
    assert post(live, "/unpin", name="system") == {"unpinned": False}
    post(live, "/flush_cache")
    live.until(live.all_slots_back)
    assert cached(live, SYSTEM + "Why?") == 0


def test_more_than_the_share_is_refused(live: Live) -> None:
    answer = live.http.post("/pin", json={"name": "long", "input_ids": [5] * 65})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "name"
    assert "pin 'long' of 65 tokens would make 65 pinned tokens, 64 are allowed" in error["message"]
    assert "raise cache.pin_share" in error["message"]


def test_ids_and_namespaces(live: Live) -> None:
    post(live, "/pin", name="ids", input_ids=[5, 6, 7, 8], salt="mine")
    post(live, "/flush_cache")
    answers = [
        post(live, "/generate", input_ids=[5, 6, 7, 8, 9], sampling_params={"max_tokens": 1}, salt=salt)
        for salt in ("mine", "yours")
    ]
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [4, 0]
    assert post(live, "/unpin", name="ids") == {"unpinned": True}
