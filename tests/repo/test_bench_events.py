"""The bench of cache events measures what it says: on sizes that take no time."""

from __future__ import annotations

from bench import events


def test_requests_share_what_they_should_and_the_pool_is_too_small() -> None:
    texts = list(events.prompts(9))
    assert {len(text) for text in texts} == {events.PROMPT}
    assert texts[0][: events.PROMPT // 2] == texts[7][: events.PROMPT // 2] != texts[8][: events.PROMPT // 2]
    assert len({text[events.PROMPT // 2] for text in texts}) == 9
    cache, pool = events.tree(9)
    for text in texts:
        events.serve(cache, pool, text)
    assert cache.peek(texts[8], events.PROMPT, events.SPACE) == events.PROMPT
    assert cache.peek(texts[1], events.PROMPT, events.SPACE) < events.PROMPT


def test_figures() -> None:
    without, listened = (events.requests(4, listened=listened) for listened in (False, True))
    assert without.keys() == {"request_us"}
    assert listened["feed_us_a_block"] > 0
    latency = events.latencies(20)
    assert 0 < latency["latency_p50_ms"] <= latency["latency_p99_ms"]
    shot = events.snapshot(100)
    assert shot["blocks"] == 2 * (events.PROMPT // events.BLOCK)
    assert shot["megabytes"] * 1e6 > shot["blocks"] * (16 + events.BLOCK)
