"""The bench of tiers: each way finds what its name says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench import tiers


def test_every_way_is_what_its_name_says(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    bench = tiers.Bench(str(tiny_model("llama")), 300, 1, tmp_path)
    lines = {line.way: line for line in bench.round([i * 7 % 490 + 5 for i in range(300)])}
    assert set(lines) >= {"cold", "cold, kept", "warm", "host", "disk"}
    assert lines["cold"].cached == lines["cold, kept"].cached == 0
    assert lines["warm"].cached == 299
    for way in ("host", "disk", "device"):
        assert way not in lines or (lines[way].cached == 256 and lines[way].loaded_bytes == 256 * 768)
    assert "MiB/s" in tiers.show(lines["host"])
    text = tiers.table([*lines.values()])
    assert "| cold |" in text
    assert "| 100.0% |" in text
