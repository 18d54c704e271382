"""The loop turned by hand: aborts and memory pressure at every single step, where a thread would only hit some."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from equivalence.harness import TOYS, assert_same, greedy, pairwise, prompts, tiny_reference
from phloem import SamplingParams
from phloem.batch import Plan
from phloem.config import load_config
from phloem.executor import Launched
from phloem.inputs import future_rows
from phloem.loop import EngineCore
from phloem.messages import Event, GenerateCall

DOOMED, OTHER = prompts(2, low=12, high=14, shared=6)


class Stepper:
    """An engine core without its thread; slots are checked after every step."""

    def __init__(self, folder: Path, *, drafter: str | None = None, texts: Sequence[Any] = (), **sections: Any) -> None:
        sections["engine"] = {"check": True, "threads": 1, **sections.get("engine", {})}
        sections["cache"] = {"tokens": 512, **sections.get("cache", {})}
        sections["model"] = {"path": str(folder)}
        if drafter:
            sections["spec"] = [{"use": f"{TOYS}:{drafter}", "texts": texts}]
        self.core = EngineCore.from_config(load_config(sections=sections))
        self.events: list[Event] = []

    def submit(self, call_id: str, prompt: list[int], params: SamplingParams, **call: Any) -> None:
        self.core.submit(GenerateCall(call_id=call_id, prompt=prompt, params=params, **call))
        self.core._drain(block=False)

    def step(self) -> None:
        self.core._drain(block=False)
        self.core.step()
        self.core._flush(self.events.extend)
        self.core.check()

    def finish(self) -> None:
        for _ in range(2000):
            if not self.core.busy and self.core._ahead is None:
                return
            self.step()
        raise AssertionError("the queue does not drain")

    def of(self, call_id: str) -> list[Event]:
        return [event for event in self.events if event.call_id == call_id]

    def tokens(self, call_id: str) -> list[int]:
        return [token for event in self.of(call_id) for token in event.token_ids]

    def all_free(self) -> bool:
        self.core.flush_cache()
        return all(group["free"] == group["total"] for group in self.core.stats()["groups"])


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.mark.parametrize(
    ("overlap", "page", "drafter"), [("off", 1, None), ("on", 1, None), ("off", 4, "Tree"), ("on", 4, "Right")]
)
def test_abort_after_any_step(llama: Path, overlap: str, page: int, drafter: str | None) -> None:
    """what-breaks 26: waiting, at every chunk of its prefill, at every token, and after its end; what-breaks 14."""
    reference = tiny_reference(llama)
    truth = {"doomed": reference.greedy(DOOMED, 8), "other": reference.greedy(OTHER, 8)}
    texts = [[*DOOMED, *truth["doomed"][0]], [*OTHER, *truth["other"][0]]]
    sections = {"cache": {"page_size": page}, "schedule": {"chunk": 4}, "engine": {"overlap": overlap}}
    bench = Stepper(llama, drafter=drafter, texts=texts, **sections)
    seen = set()
    for steps in range(18):
        bench.events.clear()
        bench.submit("other", OTHER, greedy(8))
        bench.submit("doomed", DOOMED, greedy(8))
        for _ in range(steps):
            bench.step()
        ended = any(event.finish_reason for event in bench.of("doomed"))
        bench.core.abort("doomed")
        bench.core.abort("doom")  # no such call
        bench.finish()
        last = bench.of("doomed")[-1]
        assert last.finish_reason == ("length" if ended else "abort")
        assert [bool(event.finish_reason) for event in bench.of("doomed")].count(True) == 1
        assert truth["doomed"][0][: len(bench.tokens("doomed"))] == bench.tokens("doomed")
        assert_same(bench.tokens("other"), *truth["other"])
        seen.add((last.finish_reason, min(len(bench.tokens("doomed")), 1)))
        assert bench.all_free()
    assert seen == {("abort", 0), ("abort", 1), ("length", 1)}


@pytest.mark.parametrize(("overlap", "drafter"), [("on", None), ("on", "Right"), ("off", "Tree")])
def test_a_retraction_between_steps_leaves_the_step_under_way_alone(
    llama: Path, overlap: str, drafter: str | None
) -> None:
    """Whoever else is in that step goes on as if nothing had been; who was retracted begins anew."""
    texts = prompts(3, low=12, high=14)
    reference = tiny_reference(llama)
    truth = [reference.greedy(text, 12) for text in texts]
    written = [[*text, *tokens] for text, (tokens, _) in zip(texts, truth, strict=True)]
    sections = {"schedule": {"chunk": 8}, "engine": {"overlap": overlap}}
    bench = Stepper(llama, drafter=drafter, texts=written, **sections)
    for steps, who in itertools.product(range(1, 8), range(3)):
        bench.events.clear()
        for i, text in enumerate(texts):
            bench.submit(f"{i}", text, greedy(12), salt=f"{steps} {who}")
        for _ in range(steps):
            bench.step()
        retracted = [request for request in bench.core.scheduler.running if request.call.call_id == f"{who}"]
        for request in retracted:
            bench.core.scheduler.retract(request)
        bench.finish()
        for i, (tokens, margins) in enumerate(truth):
            assert_same(bench.tokens(f"{i}"), tokens, margins, f"{i}, {who} retracted after {steps} steps")
        assert bench.all_free()
    assert bench.core.scheduler.retractions > 10


def test_who_has_a_drawn_draft_under_way_cannot_be_retracted(llama: Path) -> None:
    """Some draws' verdicts would count and others' not."""
    bench = Stepper(llama)
    bench.submit("drawn", DOOMED, greedy(8))
    bench.step()
    [request] = bench.core.scheduler.running
    request.drawn = True
    with pytest.raises(AssertionError, match="a drawn draft under way"):
        bench.core.scheduler.retract(request)
    request.drawn = False
    bench.finish()
    assert bench.all_free()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_prompt_logprobs_of_a_request_retracted_in_its_prefill(llama: Path, overlap: str) -> None:
    """what-breaks 45: what was scored before the retraction is scored again, not twice."""
    params = greedy(2, prompt_logprobs=0)
    calm = Stepper(llama)
    calm.submit("scored", DOOMED, params)
    calm.finish()
    tight = Stepper(llama, cache={"tokens": 40}, schedule={"chunk": 1}, engine={"overlap": overlap})
    tight.submit("grows", OTHER, greedy(40 - len(OTHER)))
    for _ in range(len(OTHER) + 2):
        tight.step()
    # Admission keeps back a part of what `grows` may still write; without that, the two meet in the prefill.
    tight.core.scheduler.foresight.demand = lambda requests: 0  # type: ignore[method-assign]
    tight.submit("scored", DOOMED, params)
    tight.finish()
    assert tight.core.stats()["retractions"] > 0
    assert tight.tokens("scored") == calm.tokens("scored")
    expected, got = (next(e.prompt_logprobs for e in s.of("scored") if e.prompt_logprobs) for s in (calm, tight))
    assert [e and e.token_id for e in got] == [None, *DOOMED[1:]]
    assert [e.logprob for e in got[1:]] == pytest.approx([e.logprob for e in expected[1:]], abs=1e-3)


def test_running_ahead_never_pauses_for_the_host(llama: Path) -> None:
    """Every decode step but the first is launched while its input token is still on the device."""
    stepper = Stepper(llama, engine={"overlap": "on"})
    unknown: list[int] = []
    launch = stepper.core.parts.executor.launch

    def watched(plan: Plan) -> Launched:
        unknown.append(len(future_rows(plan)[0]))
        return launch(plan)

    stepper.core.parts.executor.launch = watched  # type: ignore[method-assign]
    for name, prompt in (("a", DOOMED), ("b", OTHER)):
        stepper.submit(name, prompt, greedy(12))
    stepper.finish()
    assert unknown[1:12] == [2] * 11
    for name, prompt in (("a", DOOMED), ("b", OTHER)):
        assert_same(stepper.tokens(name), *tiny_reference(llama).greedy(prompt, 12))


@pytest.mark.parametrize(
    ("drafter", "chunk", "overlap", "page"), pairwise(["Right", "Tree", "Wrong"], [1, 5, 64], ["off", "on"], [1, 4])
)
def test_a_draft_is_verified_with_the_end_of_the_prompt(
    llama: Path, drafter: str, chunk: int, overlap: str, page: int
) -> None:
    """The first tokens come with the step that ends the prompt, cold and from the cache; drafts are no prefill."""
    truth = tiny_reference(llama).greedy(DOOMED, 9)
    engine = {"overlap": overlap, "draft_size": "fixed"}  # wrong drafts must not get shorter
    sections = {"cache": {"page_size": page}, "schedule": {"chunk": chunk}, "engine": engine}
    stepper = Stepper(llama, drafter=drafter, texts=[[*DOOMED, *truth[0]]], **sections)
    for warm in (False, True):
        before = stepper.core.stats()
        stepper.submit(f"warm {warm}", DOOMED, greedy(9))
        for _ in range(100):
            stepper.step()
            if stepper.of(f"warm {warm}"):
                break
        ran = len(DOOMED) if not warm else len(DOOMED) - (len(DOOMED) - 1) // page * page
        now = stepper.core.stats()
        steps = -(-ran // chunk)
        assert now["steps"] - before["steps"] == steps
        assert now["prefill_tokens"] - before["prefill_tokens"] == ran
        assert now["draft_tokens"] - before["draft_tokens"] >= 4
        assert now["accepted_tokens"] - before["accepted_tokens"] == {"Right": 4, "Wrong": 0}.get(drafter, 2)
        assert len(stepper.tokens(f"warm {warm}")) == 1 + now["accepted_tokens"] - before["accepted_tokens"]
        stepper.finish()
        assert_same(stepper.tokens(f"warm {warm}"), *truth)
    assert stepper.all_free()


@pytest.mark.parametrize("drafter", ["Right", "Tree"])
@pytest.mark.parametrize("chunk", [4, 64])
def test_prompt_logprobs_of_a_chunk_with_a_draft(llama: Path, drafter: str, chunk: int) -> None:
    """what-breaks 45: the rows that score the prompt and those that verify the draft are told apart."""
    params = greedy(7, prompt_logprobs=1, logprobs=1)
    truth = tiny_reference(llama).greedy(DOOMED, 7)
    seen = []
    for name in (None, drafter):
        stepper = Stepper(llama, drafter=name, texts=[[*DOOMED, *truth[0]]], schedule={"chunk": chunk})
        stepper.submit("scored", DOOMED, params)
        stepper.submit("other", OTHER, greedy(3))
        stepper.finish()
        assert_same(stepper.tokens("scored"), *truth)
        (scores,) = (event.prompt_logprobs for event in stepper.of("scored") if event.prompt_logprobs)
        output = [entry for event in stepper.of("scored") for entry in event.logprobs or []]
        seen.append([(entry.token_id, entry.logprob) for entry in [*scores[1:], *output]])
    plain, drafting = seen
    assert [token for token, _ in drafting] == [token for token, _ in plain]
    assert [value for _, value in drafting] == pytest.approx([value for _, value in plain], abs=1e-3)
