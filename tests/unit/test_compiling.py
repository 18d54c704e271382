"""Compile processes: whatever a backend does to a constraint stays there, and ends when nobody waits for it."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from process_tree import computing, descendants, processes, until

from phloem.compile_worker import Answer, Choice, Setup, build_backends
from phloem.compiling import Compiled, Compilers, Job
from phloem.constraint import Constraint
from phloem.interfaces import TokenizerData
from phloem.testing.grammar import allowed, toy_tokenizer
from phloem.testing.plugin import TOY_SPEC

WILD = Path(__file__).with_name("wild_grammars.py")
MEMORY = 256 << 20
TICKS = os.sysconf("SC_CLK_TCK")


class Rig:
    """A pool over the wild backend, and its answers in the order in which they come."""

    def __init__(self, timeout_s: float = 20.0, use: str = f"{WILD}:Wild") -> None:
        self._others = set(descendants(os.getpid()))
        choices, tokenizer = [Choice("wild", use)], toy_tokenizer()
        setup = Setup(choices, TokenizerData(tokenizer._backend.to_str()), TOY_SPEC, MEMORY, timeout_s)
        self.pool = Compilers(setup, build_backends(choices, TOY_SPEC, tokenizer), 1)
        self.answers: queue.SimpleQueue[Compiled | Answer] = queue.SimpleQueue()

    def processes(self) -> dict[int, int]:
        """Those below this one that were not there before, and their CPU ticks."""
        return {pid: ticks for pid, ticks in descendants(os.getpid()).items() if pid not in self._others}

    def computing(self) -> list[int]:
        """Those at work on a constraint."""
        return computing(os.getpid(), self._others)

    def submit(self, regex: str) -> Job:
        job = Job(("wild",), Constraint(kind="regex", value=regex), self.answers.put)
        self.pool.submit(job)
        return job

    def next(self) -> Compiled | Answer:
        return self.answers.get(timeout=30)

    def compiled(self, regex: str) -> Compiled:
        self.submit(regex)
        made = self.next()
        assert isinstance(made, Compiled), made
        return made

    def refused(self, regex: str) -> Answer:
        self.submit(regex)
        answer = self.next()
        assert isinstance(answer, Answer)
        assert answer.error is not None
        return answer


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.pool.close()


def test_a_constraint_is_compiled_there_and_unpacked_here(rig: Rig) -> None:
    made = rig.compiled("ab?")
    assert (made.size, made.notes) == (3, [])
    assert made.matcher.accept(2)
    assert allowed(made.matcher) == [0, 3]


@pytest.mark.parametrize(
    ("deed", "words", "kind", "verdict"),
    [
        ("invalid", "this is no regex", "invalid_request_error", True),
        ("zero", "the grammar backend failed: ZeroDivisionError: division by zero", "internal_error", False),
        ("panic", "the grammar backend failed: Panic: index out of bounds", "internal_error", False),
        ("recurse", "this regex is nested too deeply", "invalid_request_error", True),
        ("crash", "ended its process (SIGSEGV): out of memory, or a fault", "invalid_request_error", False),
        ("exit", "ended its process (exit code 7): out of memory, or a fault", "invalid_request_error", False),
        ("eat", f"takes more memory than the {MEMORY} bytes allowed", "invalid_request_error", False),
    ],
)
def test_whatever_goes_wrong_is_the_job_s_own_error(rig: Rig, deed: str, words: str, kind: str, verdict: bool) -> None:
    answer = rig.refused(f"!{deed}")
    assert answer.error is not None
    assert words in answer.error.message
    assert (answer.error.kind, answer.verdict, answer.timeout) == (kind, verdict, False)
    assert rig.compiled("a").size == 1


def test_what_would_take_the_engine_too_long_is_found_out_here(rig: Rig) -> None:
    answer = rig.refused("slow")
    assert answer.error is not None
    assert re.fullmatch(r"wild takes 0\.[67] s for one token under this regex", answer.error.message)
    assert answer.verdict


IDLE = (19, os.SCHED_IDLE)


def niceness(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


def test_a_long_compilation_gives_way_to_the_engine(rig: Rig) -> None:
    job = rig.submit("!backtrack")
    try:
        until(lambda: rig.computing() != [])
        [pid] = rig.computing()
        until(lambda: niceness(pid) == 19, 60)
        until(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE, 60)
        parent = processes()[pid][0]
        assert niceness(parent) == niceness(os.getpid())
        # A session has its own share of the CPUs (autogroups): idle in another one is an equal.
        assert os.getsid(parent) == os.getsid(0)
        assert os.getpgid(parent) == parent
    finally:
        job.give_up()
        rig.next()


def test_small_ones_do_not_wait_for_large_ones() -> None:
    """A few catastrophes held the only queue for half a minute each."""
    others = set(descendants(os.getpid()))
    rig = Rig(timeout_s=3600)
    try:
        jobs = [rig.submit("!backtrack") for _ in range(4)]
        for _ in range(3):
            rig.submit("ab")
        assert [type(rig.next()) for _ in range(3)] == [Compiled] * 3
        until(partial(below, others, 1 + 2), 60)  # the process itself, and what may go on aside
        for left in (2, 2, 1, 0):
            jobs.pop().give_up()
            assert isinstance(rig.next(), Answer)
            until(partial(below, others, 1 + left))
        assert rig.compiled("a").size == 1
    finally:
        rig.pool.close()


def below(others: set[int], count: int) -> bool:
    return len(set(descendants(os.getpid())) - others) == count


def test_each_constraint_has_a_second_of_its_own_whatever_others_have_spent() -> None:
    """Once an attacker had spent what all shared, every new schema got only what the engine left over."""
    rig = Rig(timeout_s=3600)
    try:
        for _ in range(3):
            rig.submit("!backtrack")  # the first uses up the second that all share
        until(lambda: ways(rig) == [IDLE, IDLE], 120)
        rig.submit("!spin a")
        seen: set[tuple[int, int]] = set()
        until(lambda: bool(seen.update(ways(rig)) or not rig.answers.empty()), 60)
        assert isinstance(rig.next(), Compiled)
        assert {(19, os.SCHED_OTHER), IDLE} <= seen
    finally:
        rig.pool.close()


def ways(rig: Rig) -> list[tuple[int, int]]:
    """The niceness and the scheduler of what computes."""
    found = []
    for pid in rig.computing():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            found.append((niceness(pid), os.sched_getscheduler(pid)))
    return found


def test_a_process_waits_for_threads_that_a_constructor_started() -> None:
    rig = Rig(use=f"{WILD}:Threaded")
    try:
        assert rig.compiled("a").size == 1
    finally:
        rig.pool.close()


def test_what_takes_long_to_import_is_imported_before_the_fork() -> None:
    rig = Rig(use=f"{WILD}:Loaded")
    try:
        assert [rig.compiled(regex).size for regex in ("a", "ab")] == [1, 2]
    finally:
        rig.pool.close()


def test_errors_are_cut_where_they_quote_a_whole_constraint(rig: Rig) -> None:
    answer = rig.refused("!long")
    assert answer.error is not None
    assert len(answer.error.message) == 4000


def test_each_job_has_the_memory_limit_to_itself(rig: Rig) -> None:
    for _ in range(8):  # 50 MB each, of 256
        rig.compiled("!some a")


def test_what_libraries_print_or_read_does_not_reach_the_pipes(rig: Rig) -> None:
    assert rig.compiled("!chatter ab").size == 2
    assert rig.compiled("!stdin abc").size == 3


def test_a_process_killed_while_idle_is_replaced_and_no_job_fails(rig: Rig) -> None:
    rig.compiled("a")
    [worker] = rig.processes()
    os.kill(worker, signal.SIGKILL)
    assert rig.compiled("b").size == 1
    assert worker not in rig.processes()


def test_a_job_killed_from_outside_fails_alone(rig: Rig) -> None:
    rig.submit("!backtrack")
    until(lambda: len(rig.processes()) == 2)
    os.kill(max(rig.processes()), signal.SIGKILL)
    answer = rig.next()
    assert isinstance(answer, Answer)
    assert answer.error is not None
    assert "ended its process (SIGKILL)" in answer.error.message
    assert rig.compiled("a").size == 1


def test_too_slow_is_killed_in_time_and_no_verdict() -> None:
    rig = Rig(timeout_s=0.3)
    try:
        begin = time.monotonic()
        answer = rig.refused("!backtrack")
        assert answer.error is not None
        assert answer.error.message == "compiling this regex took longer than 0.3 s"
        assert answer.error.hint == "simplify it, or raise grammar.timeout_s"
        assert (answer.verdict, answer.timeout) == (False, True)
        assert time.monotonic() - begin < 10
        assert rig.compiled("a").size == 1
        until(lambda: rig.computing() == [], 5)
    finally:
        rig.pool.close()


def test_time_is_the_constraint_s_own_unless_it_takes_far_too_long() -> None:
    """On a busy machine honest constraints ran out of a time that they had not used."""
    rig = Rig(timeout_s=0.25)
    try:
        assert rig.compiled("!sleep a").size == 1
        answer = rig.refused("!doze")
        assert answer.error is not None
        assert answer.error.message == "compiling this regex was not through after 2.5 s on a busy machine"
        assert (answer.verdict, answer.timeout) == (False, True)
    finally:
        rig.pool.close()


def test_no_cpu_is_used_one_second_after_giving_up(rig: Rig) -> None:
    """what-breaks: a constraint that nobody waits for any more goes on burning a core."""
    job = rig.submit("!backtrack")
    until(lambda: rig.computing() != [])
    job.give_up()
    assert isinstance(rig.next(), Answer)
    time.sleep(1)
    before = rig.processes()
    time.sleep(0.5)
    after = rig.processes()
    assert sum(after.values()) - sum(before.values()) <= 1
    assert len(after) == 1  # the process itself, its imports kept
    assert rig.compiled("a").size == 1


def test_giving_up_at_any_moment_harms_no_other_job(rig: Rig) -> None:
    waiting = rig.submit("!sleep x"), rig.submit("!sleep y"), rig.submit("b")
    waiting[1].give_up()
    waiting[1].give_up()
    results = [rig.next() for _ in waiting]
    assert [isinstance(result, Compiled) for result in results] == [True, False, True]
    waiting[0].give_up()
    assert rig.compiled("a").size == 1
    for pause in (0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016):
        job = rig.submit("b")
        time.sleep(pause)
        job.give_up()
        rig.next()
        assert rig.compiled("a").size == 1


def test_idle_processes_use_no_cpu(rig: Rig) -> None:
    rig.compiled("a")
    before = rig.processes()
    time.sleep(0.5)
    assert rig.processes() == before


def test_closing_kills_what_is_under_way() -> None:
    others = set(descendants(os.getpid()))
    rig = Rig()
    rig.compiled("a")
    rig.submit("!backtrack")
    until(lambda: len(set(descendants(os.getpid())) - others) == 2)
    rig.pool.close()
    until(lambda: set(descendants(os.getpid())) == others, 5)


def test_a_process_that_cannot_start_says_why_each_time() -> None:
    rig = Rig(use=f"{WILD}:Unborn")
    try:
        for _ in range(2):
            answer = rig.refused("a")
            assert answer.error is not None
            assert "Unborn' failed to start: MemoryError: no room" in answer.error.message
            assert answer.error.status == 500
    finally:
        rig.pool.close()


ORPHANS = """
import os, sys, time
sys.path[:0] = sys.argv[1:]
import process_tree, test_compiling
rig = test_compiling.Rig()
rig.compiled("a")
rig.submit("!backtrack")
process_tree.until(lambda: len(process_tree.descendants(os.getpid())) == 2)
print(*process_tree.descendants(os.getpid()), flush=True)
if sys.stdin.readline():
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("violent", [True, False])
def test_no_process_outlives_the_engine(violent: bool) -> None:
    """Killed, or at the end of a script that closed nothing."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", ORPHANS, *folders]
    script = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    pids = [int(word) for word in script.stdout.readline().split()]
    assert len(pids) == 2
    script.communicate("die\n" if violent else "")
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5)


def test_a_worker_imports_no_torch_of_its_own() -> None:
    program = "import sys, phloem.compile_process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
