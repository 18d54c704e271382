"""Pinned prefixes: they stay, within a limit that is said at arrival, and nothing else is kept from its slots."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phloem import Engine, SamplingParams
from phloem.errors import ConfigError, PhloemError, RequestError

Tiny = Callable[[str], Path]
SHORT = SamplingParams(max_tokens=4, temperature=0)


@contextmanager
def engine(tiny_model: Tiny, *, share: float = 0.25, page: int = 1, **cache: Any) -> Iterator[Engine]:
    """An engine with 256 slots that proves its slot accounting after every step."""
    with Engine(
        str(tiny_model("llama")),
        cache={"tokens": 256, "pin_share": share, "page_size": page, **cache},
        engine={"check": True, "threads": 1},
    ) as made:
        yield made
        made.check()


def text(first: int, length: int) -> list[int]:
    return [first, *((first * 7 + i) % 250 + 3 for i in range(length - 1))]


def crowd(made: Engine) -> None:
    """Requests enough to evict whatever may be evicted."""
    for first in range(40, 52):
        made.generate(text(first, 150), SHORT)
    assert made.stats()["evicted_tokens"] > 0


def cached(made: Engine, prompt: list[int], **call: Any) -> int:
    return made.generate([*prompt, 9, 8, 7], SHORT, **call).usage.cached_tokens


@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_pin_outlives_pressure_and_flush(tiny_model: Tiny, page: int) -> None:
    prefix = text(5, 50)
    whole = 50 // page * page
    with engine(tiny_model, page=page) as made:
        assert made.pin("system", prefix) == whole
        crowd(made)
        made.flush_cache()
        assert cached(made, prefix) == whole
        made.flush_cache()
        assert made.stats()["groups"][0]["protected"] == whole
        assert made.stats()["pins"] == {"count": 1, "tokens": whole, "limit": 64, "named": {"system": whole}}
        assert made.unpin("system")
        assert not made.unpin("system")
        made.flush_cache()
        assert made.stats()["groups"][0]["free"] == 256
        assert cached(made, prefix) == 0


@pytest.mark.parametrize("arch", ["gemma3", "mistral"])
@pytest.mark.parametrize("page", [1, 4])
def test_pins_hold_windows_too(tiny_model: Tiny, arch: str, page: int) -> None:
    """Where layers see a window only, its slots at the pin's end stay with it."""
    prefix = text(5, 50)
    with Engine(
        str(tiny_model(arch)),
        cache={"use": "swa", "tokens": 256, "pin_share": 0.25, "page_size": page},
        schedule={"max_running": 2, "max_tokens_per_step": 64},
        engine={"check": True, "threads": 1},
    ) as made:
        whole = made.pin("a", prefix)
        made.pin("b", [*prefix[:8], *text(6, 4)])
        crowd(made)
        made.flush_cache()
        assert cached(made, prefix) == whole == 50 // page * page
        made.unpin("a")
        made.unpin("b")
        made.flush_cache()
        assert all(group["free"] == group["total"] for group in made.stats()["groups"])


def test_what_is_cached_already_is_not_computed_again(tiny_model: Tiny) -> None:
    prefix = text(5, 50)
    with engine(tiny_model) as made:
        made.generate(prefix, SHORT)
        before = made.stats()["prefill_tokens"]
        made.pin("a", prefix)
        assert made.stats()["prefill_tokens"] == before + 1  # the last token is always run


def test_outputs_do_not_change(tiny_model: Tiny) -> None:
    prompt = [*text(5, 50), 11, 12]
    with engine(tiny_model, share=0) as made:
        plain = made.generate(prompt, SHORT).token_ids
    with engine(tiny_model) as made:
        made.pin("a", text(5, 50))
        assert made.generate(prompt, SHORT).token_ids == plain


@pytest.mark.parametrize("page", [1, 4])
def test_the_limit_counts_shared_tokens_once(tiny_model: Tiny, page: int) -> None:
    with engine(tiny_model, page=page) as made:
        made.pin("a", text(5, 40))
        made.pin("b", [*text(5, 40), *text(6, 20)])
        assert made.stats()["pins"]["tokens"] == 60
        with pytest.raises(RequestError) as refused:
            made.pin("c", text(7, 8))
        assert refused.value.message == "pin 'c' of 8 tokens would make 68 pinned tokens, 64 are allowed"
        assert refused.value.hint == "raise cache.pin_share, or unpin one of: a, b"
        made.pin("c", text(7, 4))
        made.unpin("a")  # all of it belongs to b, too
        assert made.stats()["pins"]["tokens"] == 64
        assert cached(made, text(5, 40)) == 40
        made.unpin("b")
        made.pin("a", text(8, 60))


def test_a_later_pin_of_the_same_name_replaces_it(tiny_model: Tiny) -> None:
    with engine(tiny_model) as made:
        made.pin("a", text(5, 60))
        made.pin("a", text(6, 60))  # not 120
        made.flush_cache()
        assert (cached(made, text(5, 60)), cached(made, text(6, 60))) == (0, 60)
        with pytest.raises(RequestError, match="would make 65 pinned tokens"):
            made.pin("a", text(7, 65))
        assert made.stats()["pins"]["named"] == {"a": 60}, "a refused one replaces nothing"


def test_requests_never_count_on_the_slots_of_pins(tiny_model: Tiny) -> None:
    """The longest request that is let in fits beside all pins, so it cannot wait for ever."""
    with engine(tiny_model) as made:
        made.pin("a", text(5, 64))
        most = SamplingParams(max_tokens=92, temperature=0, ignore_eos=True)
        assert len(made.generate(text(9, 100), most).token_ids) == 92
        with pytest.raises(PhloemError, match=r"exceeds the limit of 192 tokens .*256 tokens, 64 of them for pins"):
            made.generate(text(9, 101), most)
        crowd(made)
        assert cached(made, text(5, 64)) == 64


def test_namespaces_have_pins_of_their_own(tiny_model: Tiny) -> None:
    with engine(tiny_model) as made:
        made.pin("a", text(5, 30), salt="x")
        made.pin("b", text(5, 30))
        assert made.stats()["pins"]["tokens"] == 60
        made.unpin("b")
        made.flush_cache()
        assert (cached(made, text(5, 30)), cached(made, text(5, 30), salt="x")) == (0, 30)


def test_an_aborted_pin_leaves_nothing(tiny_model: Tiny) -> None:
    """Its reservation goes, and the older pin of its name stays."""
    with engine(tiny_model) as made:
        made.pin("a", text(5, 30))
        call = made._call(text(6, 40), SHORT, stream=False)
        call.pin = "a"

        def submit_and_abort(core: Any) -> None:
            core._admit(call)
            with pytest.raises(RequestError, match="pin 'a' is being computed"):
                core.pins.reserve(core._calls[call.call_id][0])
            core.abort_now(call.call_id)

        made.invoke(submit_and_abort).result()
        assert made.stats()["pins"]["named"] == {"a": 30}
        made.pin("a", text(6, 64))


@pytest.mark.parametrize(
    ("options", "prompt", "problem"),
    [
        ({"share": 0}, text(5, 30), "would make 30 pinned tokens, 0 are allowed"),
        ({"page": 16}, text(5, 15), "a prompt of 15 tokens is less than a page of 16 tokens"),
        ({"use": "chunk", "share": 0}, text(5, 30), "this cache shares no prefixes"),
    ],
)
def test_what_cannot_be_pinned_is_refused(
    tiny_model: Tiny, options: dict[str, Any], prompt: list[int], problem: str
) -> None:
    with engine(tiny_model, **options) as made, pytest.raises(RequestError, match=problem):
        made.pin("a", prompt)


@pytest.mark.parametrize(("arch", "use", "page"), [("llama", "radix", 1), ("llama", "radix", 4), ("gemma3", "swa", 4)])
def test_any_order_of_pins(tiny_model: Tiny, arch: str, use: str, page: int) -> None:
    """Pins, unpins, requests and flushes at random: what is locked is what the names say, and the limit holds."""
    rng = random.Random(page)
    named: dict[str, list[int]] = {}
    with Engine(
        str(tiny_model(arch)),
        cache={"use": use, "tokens": 256, "pin_share": 0.3, "page_size": page},
        schedule={"max_running": 3, "max_tokens_per_step": 64},
        engine={"check": True, "threads": 1},
    ) as made:
        limit = made.stats()["pins"]["limit"]
        for _ in range(30):
            name = rng.choice("abcd")
            prompt = [
                *text(rng.randrange(3, 6), rng.randrange(1, 50)),
                *text(rng.randrange(6, 9), rng.randrange(1, 12)),
            ]
            wanted = {**named, name: prompt}
            match rng.choice(["pin", "pin", "unpin", "run", "flush"]):
                case "pin" if len(prompt) >= page:
                    if distinct(wanted, page) <= limit:
                        made.pin(name, prompt)
                        named = wanted
                    else:
                        with pytest.raises(RequestError, match="are allowed"):
                            made.pin(name, prompt)
                case "unpin":
                    assert made.unpin(name) == (named.pop(name, None) is not None)
                case "run":
                    made.generate([prompt, [*prompt, 5], text(9, 40)], SHORT)
                case "flush":
                    made.flush_cache()
                    assert made.stats()["groups"][0]["protected"] == distinct(named, page)
            assert made.stats()["pins"]["tokens"] == distinct(named, page)
            assert all(cached(made, tokens) >= len(tokens) // page * page for tokens in named.values())


def distinct(named: dict[str, list[int]], page: int) -> int:
    """Tokens of all whole pages of these prefixes, counted one by one."""
    return page * len({tuple(p[:end]) for p in named.values() for end in range(page, len(p) + 1, page)})


def test_a_scoring_pins_nothing(tiny_model: Tiny) -> None:
    with engine(tiny_model) as made:
        call = made._scoring(text(5, 30), [[6], [7]])
        call.pin = "a"
        with pytest.raises(RequestError, match="a call that scores"):
            made._run([call])
        assert made.stats()["pins"]["count"] == 0


def test_a_share_that_leaves_nothing_is_refused_at_start(tiny_model: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"cache.pin_share 0.01 of 64 tokens = 0 for pins, 64 for requests"):
        Engine(str(tiny_model("llama")), cache={"tokens": 64, "pin_share": 0.01, "page_size": 16})
