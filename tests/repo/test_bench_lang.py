"""The language's benchmark: its data, its arithmetic, its table, and its ways against each other on a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.lang import __main__ as bench
from bench.lang import table
from bench.lang.minimum import Note, least_prefill
from bench.lang.programs import PROGRAMS
from bench.lang.ways import Run, through_calls
from bench.lang.worker import in_process, scoring, unshared
from bench.report import DOCS
from phloem import Engine


class Scripted:
    """Calls that write their number, and choose the last choice."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []

    async def complete(self, prompt: Any, max_tokens: int, **_: Any) -> str:
        self.prompts.append(prompt)
        await asyncio.sleep(0)
        return f" text {len(self.prompts)}"

    async def choose(self, prompt: str, choices: Sequence[str]) -> str:
        self.prompts += [prompt] * len(choices)
        return choices[-1]


def test_least_prefill_counts_what_was_written_only_once_it_is() -> None:
    first, written = [1, 2, 3], [7, 8]
    begin, end = Note(first, None), Note(first, written)
    after = Note([1, 2, 3, 7, 8, 9], None)
    assert least_prefill([begin, end, after]) == 3 + 2  # 7 is known; 8, which was sampled last, and 9 are not
    assert least_prefill([begin, after, end]) == 3 + 3
    assert least_prefill([begin, begin]) == 3 + 1  # a prompt's last token is always run


@pytest.mark.parametrize("name", PROGRAMS)
def test_cases_are_the_same_every_time_and_differ_among_each_other(name: str) -> None:
    cases = PROGRAMS[name].cases(4)
    assert cases == PROGRAMS[name].cases(4)
    assert cases[:2] == PROGRAMS[name].cases(2)
    assert all(case != other for i, case in enumerate(cases) for other in cases[:i])


@pytest.mark.parametrize(("name", "calls"), [("judge", 6 + 3), ("tree", 3 + 6 + 6 * 3 + 1), ("agents", 3 * 3 + 2)])
def test_plain_programs_make_the_calls_that_their_structure_says(name: str, calls: int) -> None:
    scripted = Scripted()
    run = asyncio.run(through_calls(name, 1, scripted))
    assert len(scripted.prompts) == calls
    assert len(run.outputs) == 1
    assert run.seconds > 0


def test_the_table_has_medians_of_pairs_and_shares_of_equal_texts() -> None:
    counters = {"prefill_tokens": 102.0, "scored_tokens": 7.0, "least_prefill": 100.0, "calls": 9.0}
    engine = [Run(1.0, [["a", "b"]], counters), Run(2.0, [["a", "b"]], counters)]
    server = [Run(1.0, [["a", "c"]], counters), Run(1.0, [["a", "c"]], counters)]
    calls = [Run(2.0, [["x", "y"]], counters), Run(4.0, [["x", "y"]], counters)]
    text = table.markdown({"judge": {"engine": engine, "server": server, "calls": calls}})
    rates, work = [line for line in text.splitlines() if line.startswith("| judge")]
    assert rates.startswith("| judge * | 1 | 0.75 | 1.00 | 0.38 | 3.00 (2.50 to 3.50, n=2) |")
    assert "| 9 | 100 | 102 | 1.020 | 102 | 1.020 | 102 | 1.020 | 7 | 1 of 2 | 0 of 2 |" in work


def test_docs_get_the_tables_between_their_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "DOCS", page)
    table.write_docs("new")
    assert page.read_text() == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    assert table.BEGIN in DOCS.read_text()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown ways: magic"):
        bench.main(["--ways", "magic"])
    with pytest.raises(SystemExit):
        bench.main(["--program", "magic"])


def test_the_language_and_transformers_agree_and_prefill_is_least(tiny_model: Callable[[str], Path]) -> None:
    """Where no text is tokenised again, both must write the same; the minimum is reached with forks and without."""
    model = str(tiny_model("llama"))
    theirs = unshared(model)
    with Engine(model, cache={"tokens": 8192}, engine={"check": True}) as engine:
        ours, scored = in_process(engine), scoring(engine)
        for name in ("mmlu", "select8", "judge", "skeleton"):
            run = ours(name, 2)
            assert run.counters["calls"] >= 2
            assert run.counters["prefill_tokens"] <= 1.02 * run.counters["least_prefill"], name
            if name in ("mmlu", "select8"):
                assert run.outputs == theirs(name, 2).outputs, name
            if name == "select8":
                assert run.outputs == scored(name, 2, together=True).outputs
                assert run.outputs == scored(name, 2, together=False).outputs
                assert run.counters["scored_tokens"] > 0


@pytest.mark.timeout(600)  # three processes that load a model: on a busy machine that takes minutes
def test_a_run_of_three_ways_prints_and_keeps_both_tables(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.pairs.RESULTS", tmp_path)
    shown: list[str] = []
    what = ["--program", "chat-short", "--size", "1", "--rounds", "1", "--ways", "engine,server,calls"]
    assert bench.main([*what, "--model", str(tiny_model("llama"))], shown.append) == 0
    rates, work = [line.split(" | ") for line in shown[1].splitlines() if line.startswith("| chat-short")]
    assert all(float(cell) > 0 for cell in rates[2:5])
    assert work[-2] == "4 of 4"  # the server writes what the engine writes
    results, _ = table.kept(list(tmp_path.glob("lang-*.json")))
    assert table.markdown(results) == shown[1]
