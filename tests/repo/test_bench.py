"""The benchmark's own arithmetic: least prefill, pairing, tables; and a driver that survives a peer that fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import attack, compiling, grammar, jump_time, lookup, pairs, report, run
from bench.documents import judge
from bench.pairs import in_turns
from bench.process import PeerSpec, Worker, WorkerError
from bench.stopwatch import Stopwatch
from bench.waves import Call
from bench.workloads import Tokens, least_prefill, load
from bench.workloads import run as run_workload
from phloem import SamplingParams


class Echo:
    """Writes the number of calls so far."""

    def __init__(self) -> None:
        self.calls = 0

    def generate(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        outputs = []
        for _ in prompts:
            self.calls += 1
            outputs.append([100_000 + self.calls] * max_tokens)
        return outputs


def test_least_prefill_counts_distinct_prefixes_and_a_last_token_each() -> None:
    shared = [1, 2, 3, 4]
    assert least_prefill([([[*shared, 5], [*shared, 6]], [[9], [9]])]) == 4 + 1 + 1
    assert least_prefill([([shared, shared], [[9], [9]])]) == 4 + 1  # the same prompt again still runs its last token


def test_least_prefill_of_a_second_turn_includes_the_last_sampled_token() -> None:
    first, written = [1, 2, 3], [7, 8]
    second = [*first, *written, 4, 5]
    assert least_prefill([([first], [written]), ([second], [[9]])]) == 3 + 1 + 2  # 7 is cached; 8, 4 and 5 are run


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("W1", 256),
        ("W2", 32 * 128),
        ("W3", 1024 + 64 * 32),
        ("W4", 8 * (64 + 3 * 65)),
        ("W5", 4 * 256 + 16 * 8 + 32 * 8 + 16),
    ],
)
def test_workloads_ask_what_their_table_says(name: str, least: int) -> None:
    metrics, waves = run_workload(name, Echo(), load(name, 1))
    assert abs(least_prefill(waves) - least) <= 0.02 * least  # texts repeat a little by chance
    assert metrics["out_tok"] == sum(len(ids) for _, outputs in waves for ids in outputs)


def test_a_wrong_output_length_is_an_error() -> None:
    class Short(Echo):
        def generate(
            self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None
        ) -> list[Tokens]:
            return [[1] * (max_tokens - 1) for _ in prompts]

    with pytest.raises(ValueError, match="asked for 128 tokens each, got \\[127\\]"):
        run_workload("W2", Short(), load("W2", 1))


def test_peer_spec_reads_the_command_line() -> None:
    spec = PeerSpec.parse("vllm@other/python:folder=models/x,share=false,kv_gib=3")
    assert (spec.adapter, spec.python) == ("vllm", "other/python")
    assert spec.options == {"folder": "models/x", "share": False, "kv_gib": 3}
    with pytest.raises(ValueError, match="expected key=value"):
        PeerSpec.parse("hf:static")


def entry(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """A result as the driver makes it."""
    rounds = [
        {
            "ours": {"metrics": {"s": a, "out_tok_s": 1 / a}, "counters": {}},
            "theirs": {"metrics": {"s": b, "out_tok_s": 1 / b}},
        }
        for a, b in zip(ours, theirs, strict=True)
    ]
    return {"workload": "W2", "peer": "hf-static", "rounds": rounds}


def test_ratio_is_the_median_of_pairs_not_the_ratio_of_medians() -> None:
    row = report.markdown([entry([1.0, 2.0, 4.0], [3.0, 2.0, 8.0])]).splitlines()[-1]
    assert "| 2.00 | 3.00 |" in row  # medians of seconds
    assert "2.00 (1.50 to 2.50, n=3)" in row  # ratios 3, 1, 2


def test_docs_table_is_replaced_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "DOCS", page)
    machine = {"processor": "p", "cores": 2, "memory_gib": 1.0, "flags": [], "versions": {"torch": "1"}}
    report.write_docs({"results": [entry([1.0], [2.0])], "when": "now", "machine": machine})
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert "2.00 (2.00 to 2.00, n=1)" in text


def test_report_says_where_time_goes() -> None:
    times = {f"decode_{part}_s": 0.015 for part in ("plan", "build", "forward", "sample", "commit")}
    shares = {"decode_host_share": 0.6, "host_share": 0.5, "cache_share": 0.001, "steps": 40}
    machine = {"processor": "p", "cores": 2, "memory_gib": 1.0, "flags": [], "versions": {}}
    made = {
        "when": "now",
        "machine": machine,
        "profile": {"decode_steps": 15, "decode_batch": 64, **times, **shares},
        "tree": {"nodes": 100_000, "match": 98_734.2, "evict": 1_000.0},
    }
    text = report.markdown([entry([1.0], [2.0])], made)
    assert "15 decode steps of 64 requests: host time 60.00 % of the step (milliseconds: plan 1.00," in text
    assert "the cache's methods 0.100 %" in text
    assert "Radix tree of 100,000 nodes, operations per second: match 98,734, evict 1,000." in text


def test_worker_reports_a_peer_that_cannot_start() -> None:
    with pytest.raises(WorkerError, match="ended with code 1"):
        Worker(PeerSpec("no_such_engine"))


def test_patience_ends_the_rounds_of_a_slow_peer() -> None:
    class Fake:
        def __init__(self, seconds: float) -> None:
            self.seconds, self.asked = seconds, 0

        def ask(self, **command: Any) -> dict[str, Any]:
            self.asked += 1
            return {"metrics": {"s": self.seconds}, "counters": {}}

    fast, slow = Fake(1.0), Fake(10.0)
    done = run.pairs(fast, slow, "W2", 3, patience=5.0)  # type: ignore[arg-type]
    assert len(done) == 1
    assert (fast.asked, slow.asked) == (2, 2)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def test_documents_are_valid_cut_or_wrong() -> None:
    texts = [('{"a": 1}', 5), ('{"a": ', 8), ('{"b": 1}', 5), ("prose", 3)]
    found = judge(texts, SCHEMA, most=8, seconds=3.0)
    assert [found[kind] for kind in ("documents", "valid", "cut", "wrong")] == [4, 1, 1, 2]
    assert (found["s_valid"], found["tokens_a_document"]) == (3.0, 5.25)


def test_constrained_runs_are_compared_by_valid_documents() -> None:
    """The peer is faster, but a third of what it wrote is of use."""
    made = entry([2.0], [1.5])
    made["workload"] = "W6g"
    schema = {"required": ["a"]}
    made["rounds"][0]["ours"]["metrics"] |= judge([('{"a": 1}', 4)] * 3, schema, 9, 2.0)
    made["rounds"][0]["theirs"]["metrics"] |= judge([('{"a": 1}', 4), ("x", 9), ("{}", 2)], schema, 9, 1.5)
    machine = {"processor": "p", "cores": 2, "memory_gib": 1.0, "flags": [], "versions": {}}
    text = report.markdown([made], {"when": "now", "machine": machine})
    assert "2.25 (2.25 to 2.25, n=1)" in text  # 1.5 s a document over 2/3 s
    assert "| W6g | hf-static | 1 / 1 / 1 | 5.0 | 1.500 |" in text


def test_turns_alternate() -> None:
    order: list[str] = []
    done = in_turns(3, lambda i: order.append(f"a{i}"), lambda i: order.append(f"b{i}"))
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert len(done) == 3


def test_each_way_is_first_in_its_turn_and_ratios_are_of_one_round() -> None:
    asked: list[str] = []

    def way(name: str, speeds: list[float]) -> lookup.Way:
        def run(call: Call, salt: str) -> lookup.Run:
            asked.append(name)
            return lookup.Run(speeds[call.prompt[0]], [call.prompt[0]])

        return run

    ways = {
        ("phloem", "none"): way("a", [10, 100]),
        ("phloem", "suffix"): way("b", [30, 200]),
        ("llama.cpp", "none"): way("c", [20, 100]),
    }
    runs = lookup.measure(ways, [Call([i], SamplingParams()) for i in range(2)], "set")
    assert "".join(asked) == "abcbca"
    suffix = lookup.rows("code", runs)[1]
    assert "| suffix | 115.0 (72.5 to 157.5, n=2) | 2.50 (2.25 to 2.75, n=2) | 1.75 (1.62 to 1.88, n=2) |" in suffix
    assert suffix.endswith("| 2 of 2 |")


def test_nested_calls_are_timed_once() -> None:
    watch = Stopwatch()
    inner = watch.timed(lambda: time.sleep(0.01), "inner")
    watch.timed(lambda: inner(), "outer")()
    assert set(watch.seconds) == {"outer"}
    inner()
    assert watch.seconds["inner"] >= 0.01


Bench = Callable[..., int]


@pytest.mark.parametrize(
    ("bench", "arguments", "expected"),
    [
        (grammar.main, "--batch 2 --rounds 1 --tokens 6", "masks and matchers: **"),
        (jump_time.main, "--documents 2 --batch 1,2 --rounds 1 --tokens 6", "| 2 | W6 |"),
        (compiling.main, "--requests 2 --rounds 1 --tokens 3", "| each | "),
        pytest.param(
            attack.main,
            "--kind deep --rounds 1 --seconds 1 --rate 3 --tokens 2 --vocabulary 512",
            "| deep | ",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["grammar", "jump_time", "compiling", "attack"],
)
def test_grammar_benches_run(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: Bench, arguments: str,
    expected: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(pairs, "RESULTS", tmp_path)
    shown: list[str] = []
    assert bench([str(tiny_model("llama")), *arguments.split()], shown.append) == 0
    assert expected in "\n".join(shown)
    kept = json.loads(next(tmp_path.iterdir()).read_text())
    assert expected in kept["text"]


def test_a_peer_that_does_not_start_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    options = run.arguments(["--workloads", "W1,W6g"])
    results = run.compare(None, [PeerSpec("no_such_engine"), PeerSpec("hf", "no/such/python")], options)  # type: ignore[arg-type]
    assert [entry["workload"] for entry in results] == ["W1", "W6g"] * 2
    assert all("error" in entry for entry in results)
    assert "| W6g | no_such_engine | failed:" in capsys.readouterr().out
