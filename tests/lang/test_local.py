"""Programs on an engine of this process: tokens, stops, selections, what is computed, and what is left behind."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phloem.lang as pl
from phloem import Engine, SamplingParams
from phloem.choosing import Choice
from phloem.errors import AbortedError, EngineDeadError, RequestError
from phloem.lang.backends.local import LocalBackend, LocalPath

GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def engine(lang_model: Path) -> Iterator[Engine]:
    """One engine for all; it must end as it began."""
    with Engine(str(lang_model), cache={"tokens": 16384}, engine={"threads": 1}) as made:
        yield made
        made.check()
        assert made.stats()["groups"][0]["leased"] == 0


@pytest.fixture
def path(engine: Engine) -> LocalPath:
    """An empty path."""
    made = LocalBackend.of(engine).start()
    assert isinstance(made, LocalPath)
    return made


def tokens_of(path: LocalPath) -> list[int]:
    """A path's tokens, all text of it tokenised."""
    return list(path._commit())


def direct(engine: Engine, prompt: list[int], continuation: list[int]) -> list[float]:
    """The continuation's log-probabilities as those of a prompt."""
    result = engine.generate([*prompt, *continuation], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert result.prompt_logprobs is not None
    return [one.logprob for one in result.prompt_logprobs[len(prompt) :] if one is not None]


def test_generated_tokens_are_never_tokenised_again(engine: Engine, path: LocalPath) -> None:
    """A random model writes what no tokenizer would: the next prompt begins with exactly what was generated."""

    async def main() -> None:
        path.append("One root, ")
        prompt = tokens_of(path)
        expected = engine.generate(prompt, GREEDY)
        assert (await path.generate(GREEDY)).texts == [expected.text]
        written = [*prompt, *expected.token_ids]
        assert path._text.tokens == written
        path.append(" many branches")
        assert tokens_of(path)[: len(written)] == written
        assert engine.tokenizer.encode(engine.tokenizer.decode(written), add_special=False) != written
        await path.close()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(6))
def test_after_a_stop_the_state_holds_the_text_and_no_more(engine: Engine, path: LocalPath, seed: int) -> None:
    """Tokens that lie behind the text, and the part of a token that a stop cut off, are not in the path."""
    params = SamplingParams(max_tokens=60, seed=seed, stop=["e", "\n", " t"])

    async def main() -> None:
        path.append("When in the course of ")
        before = tokens_of(path)
        made = await path.generate(params)
        decoded = engine.tokenizer.decode(path._text.tokens[len(before) :])
        assert decoded + path._text.tail == made.texts[0]
        assert made.meta[0]["stop_reason"] in params.stop or made.meta[0]["finish_reason"] == "length"
        await path.close()

    asyncio.run(main())


def test_text_is_tokenised_as_a_whole_between_results(engine: Engine) -> None:
    """However it was cut into appends and forks, the text before a gen has the tokens of the whole text."""
    text = "The quick brown fox jumps over the lazy dog, naïve café 你好 🙂 " * 40

    async def main() -> None:
        root = LocalBackend.of(engine).start()
        root.append(text[:700])
        root.append(text[700:1703])
        (child,) = root.fork(1)
        child.append(text[1703:])
        assert isinstance(child, LocalPath)
        assert len(child._text.tokens) > 100  # tokenised once for all forks
        assert tokens_of(child) == engine.tokenizer.encode(text)

    asyncio.run(main())


def test_a_conversation_has_the_tokens_of_the_chat_template(engine: Engine) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a tree."},
        {"role": "assistant", "content": "Oak."},
        {"role": "user", "content": "And one more?"},
    ]

    @pl.function
    def program(s: Any) -> None:
        for message in messages:
            s += getattr(pl, message["role"])(message["content"])
        s += pl.assistant(pl.gen("x", max_tokens=1))

    state = program.run(backend=engine)
    assert state.messages()[:-1] == messages
    assert state.get_meta_info("x")["prompt_tokens"] == len(engine.tokenizer.chat(messages))
    expected = engine.tokenizer.decode(engine.tokenizer.chat(messages), skip_special_tokens=False)
    assert state.text().startswith(expected)


def test_the_end_of_a_message_stops_an_answer(engine: Engine) -> None:
    """Though the model's files name another token as the end: the template's is added."""
    end = engine.tokenizer.encode("<|im_end|>", add_special=False)
    assert len(end) == 1

    @pl.function
    def program(s: Any) -> None:
        s += pl.user("Hi")
        s += pl.assistant(pl.gen("x", max_tokens=8, logit_bias={end[0]: 100.0}))

    state = program.run(backend=engine)
    assert state["x"] == ""
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": end[0]}
    assert state.text().count("<|im_end|>") == 2


@pytest.mark.parametrize(
    "choices",
    [
        [" sleep", " sleeps", " sleeping", " slept"],  # share prefixes
        [" a", " a tree", " a tree of tokens"],  # prefixes of each other
        ["s", "y", "'s tail"],  # merge with the text before them
        ["é", "ß", "你好", "привет", "🙂", "🌳"],
        [" one"],
        [" same", " same"],
    ],
    ids=["shared", "prefixes", "merging", "non-ascii", "single", "equal"],
)
def test_select_scores_are_those_of_direct_scoring(engine: Engine, choices: list[str]) -> None:
    """One tree over the shared prefix gives what scoring every choice by itself as a prompt gives."""
    text = "The quick brown fox jumps over the lazy dog"

    @pl.function
    def program(s: Any) -> None:
        s += text + pl.select("x", choices)

    state = program.run(backend=engine)
    report = state.get_meta_info("x")
    whole = [engine.tokenizer.encode(text + choice) for choice in choices]
    same = min(
        sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*whole, strict=False))),
        *(len(tokens) - 1 for tokens in whole),
    )
    for choice, got in zip(choices, report["token_logprobs"], strict=True):
        tokens = engine.tokenizer.encode(text + choice)
        expected = direct(engine, tokens[: len(tokens) - len(got)], tokens[len(tokens) - len(got) :])
        assert got == pytest.approx(expected, abs=1e-4)
        assert len(tokens) - len(got) <= max(same, len(engine.tokenizer.encode(text)))
    means = [sum(row) / len(row) for row in report["token_logprobs"]]
    assert report["scores"] == pytest.approx(means)
    assert state["x"] == choices[max(range(len(choices)), key=means.__getitem__)]
    assert state.text() == text + state["x"]


def test_select_runs_in_one_pass_over_the_shared_prefix(engine: Engine) -> None:
    choices = [f" {word} tree" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]

    @pl.function
    def program(s: Any) -> None:
        s += "Of all the trees there is only " + pl.select("x", choices)

    engine.flush_cache()
    before = engine.stats()
    state = program.run(backend=engine)
    after = engine.stats()
    assert after["steps"] - before["steps"] == 1
    assert after["prefill_tokens"] - before["prefill_tokens"] == state.get_meta_info("x")["prompt_tokens"]
    nodes = len({tuple(t[: i + 1]) for t in map(engine.tokenizer.encode, choices) for i in range(len(t))})
    assert after["scored_tokens"] - before["scored_tokens"] <= nodes


@pytest.mark.parametrize("method", ["greedy_token_selection", "unconditional_likelihood_normalized"])
def test_other_methods_choose_by_the_same_numbers(engine: Engine, method: str) -> None:
    choices = [" leaf", " stem", " water goes up", " sugar"]

    @pl.function
    def program(s: Any) -> None:
        s += "In the phloem there is" + pl.select("x", choices, choices_method=method)

    state = program.run(backend=engine)
    report = state.get_meta_info("x")
    assert state["x"] == choices[report["index"]]
    rows = report["token_logprobs"]
    if method == "greedy_token_selection":
        assert rows[report["index"]][0] >= max(row[0] for row in rows) - 1e-4
        return
    prompt = engine.tokenizer.encode("In the phloem there is")
    for choice, row, score in zip(choices, rows, report["scores"], strict=True):
        tokens = engine.tokenizer.encode("In the phloem there is" + choice)[len(prompt) :]
        bare = [0.0, *direct(engine, tokens[:1], tokens[1:])] if len(tokens) > 1 else [0.0]
        expected = sum(a - b for a, b in zip(row, bare, strict=True)) / len(row)
        assert score == pytest.approx(expected, abs=1e-3)


def test_a_select_with_temperature_draws_by_its_scores(engine: Engine) -> None:
    """Chi-squared over 300 draws from a selection's scores, at a level that fails once in 10,000 runs."""
    choices = [" a", " b", " c"]

    @pl.function
    def program(s: Any) -> None:
        s += "A tree" + pl.select("x", choices, temperature=4.0)

    state = program.run(backend=engine)
    assert state["x"] in choices
    scores = state.get_meta_info("x")["scores"]
    weights = [math.exp(score / 4.0) for score in scores]
    expected = [300 * weight / sum(weights) for weight in weights]
    drawn = [Choice(0, scores).drawn(4.0) for _ in range(300)]
    counts = [drawn.count(index) for index in range(3)]
    assert sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True)) < 18.4


def test_what_follows_a_select_continues_its_tokens(engine: Engine) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "The dog" + pl.select("x", ["s", " sleeps"]) + pl.gen("y", max_tokens=4, temperature=0)

    state = program.run(backend=engine)
    prompt = engine.tokenizer.encode("The dog" + state["x"])
    assert state["y"] == engine.generate(prompt, SamplingParams(max_tokens=4, temperature=0)).text


def test_every_prefix_of_nested_forks_is_computed_once(engine: Engine) -> None:
    """Declared, not found: all branches start at once, before anything of their prefixes has been computed."""
    root_text = "One root, many branches, and whatever two requests share. " * 3
    branch_text = " The branch of number {} "

    @pl.function
    def program(s: Any) -> None:
        s += root_text
        forks = s.fork(4)
        for i, child in enumerate(forks):
            child += branch_text.format(i)
            leaves = child.fork(3)
            leaves += lambda j: f"leaf {j}:" + pl.gen("x", max_tokens=2)
            leaves.join()
        forks.join()

    engine.flush_cache()
    before = engine.stats()
    state = program.run(backend=engine)
    encode = engine.tokenizer.encode
    whole = [encode(root_text + branch_text.format(i) + f"leaf {j}:") for i in range(4) for j in range(3)]
    minimum = len({tuple(tokens[: n + 1]) for tokens in whole for n in range(len(tokens))})
    after = engine.stats()
    assert after["prefill_tokens"] - before["prefill_tokens"] == minimum
    assert [len(values) for values in state["x"]] == [3] * 4


def test_a_batch_computes_what_its_items_share_once(engine: Engine) -> None:
    """Also the few tokens beyond the examples that two questions happen to share."""
    shots = "Question: what is stored once? Answer: whatever two requests share. " * 3

    @pl.function
    async def program(s: Any, i: int) -> None:
        s += shots + f"Question: number {i} of many? Answer:" + pl.select("x", [" A", " B", " C"])

    engine.flush_cache()
    before = engine.stats()["prefill_tokens"]
    states = program.run_batch([{"i": i} for i in range(30)], backend=engine)
    prompts = [engine.tokenizer.encode(state.text().removesuffix(state["x"])) for state in states]
    minimum = len({tuple(tokens[: n + 1]) for tokens in prompts for n in range(len(tokens))})
    assert engine.stats()["prefill_tokens"] - before <= minimum


def test_holds_are_released(engine: Engine) -> None:
    @pl.function
    def program(s: Any, fail: bool) -> None:
        s += "A tree of tokens grows the same way" + pl.gen("x", max_tokens=2)
        forks = s.fork(3)
        forks += " and" + pl.gen("y", max_tokens=2)
        assert forks[0]["y"] is not None
        assert engine.stats()["holds"]["count"] >= 1
        if fail:
            raise ZeroDivisionError

    program.run(False, backend=engine)
    assert engine.stats()["holds"]["count"] == 0
    with pytest.raises(ZeroDivisionError):
        program.run(True, backend=engine)
    assert engine.stats()["holds"]["count"] == 0
    engine.check()


def test_what_is_committed_early_is_computed_early(engine: Engine) -> None:
    @pl.function
    def program(s: Any) -> int:
        s += "While a tool runs, the state is computed."
        s.commit()
        s.sync()
        before = engine.stats()["prefill_tokens"]
        s += pl.gen("x", max_tokens=1)
        s.sync()
        return int(engine.stats()["prefill_tokens"] - before)

    engine.flush_cache()
    assert program.run(backend=engine).ret_value <= 1


def test_a_cancelled_branch_stops_its_request(engine: Engine) -> None:
    @pl.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: f"A tree {i}" + pl.gen("x", max_tokens=900 if i else 1, ignore_eos=True)
        assert forks[0]["x"] is not None
        forks.cancel(keep=forks[0])
        forks.join()

    state = program.run(backend=engine)
    assert state["x"][1] is None
    assert engine.stats()["running"] == 0


def test_reports_and_logprobs(engine: Engine) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "The fox" + pl.gen("x", max_tokens=3, return_logprob=True, top_logprobs_num=2, logprob_start_len=1)

    report = program.run(backend=engine).get_meta_info("x")
    assert report["completion_tokens"] == len(report["output_token_logprobs"]) <= 3
    assert all(value <= 0 and isinstance(text, str) for value, _, text in report["output_token_logprobs"])
    assert all(len(best) == 2 for best in report["output_top_logprobs"])
    prompt = engine.tokenizer.encode("The fox")
    assert [token for _, token, _ in report["input_token_logprobs"]] == prompt[1:]


def test_a_stream_is_the_answer_in_pieces(engine: Engine) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "The sugar" + pl.gen("x", max_tokens=20, temperature=0) + " end"

    whole = program.run(backend=engine).text()
    state = program.run(backend=engine, stream=True)
    pieces = list(state.text_iter("x"))
    assert "The sugar" + "".join(pieces) + " end" == whole
    assert "".join(state.text_iter()) == whole


def test_types_hold_the_output(engine: Engine) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "n=" + pl.gen_int("n", 3) + " b=" + pl.gen("b", dtype=bool) + " f=" + pl.gen("f", 3, dtype=float)
        s += " s=" + pl.gen_string("s", 3)

    state = program.run(backend=engine)
    assert re.fullmatch(r"[-+]?[0-9]*", state["n"])
    assert re.fullmatch(r"[-+]?[0-9]*\.?[0-9]*", state["f"])
    assert state["b"] in ("True", "False")
    assert state["s"].startswith('"')


def test_errors_of_the_engine_name_the_parameter(engine: Engine) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("x")

    @pl.function
    def bad(s: Any) -> None:
        s += "x" + pl.gen("x", stop_regex="(")

    with pytest.raises(RequestError) as raised:
        bad.run(backend=engine)["x"]
    assert raised.value.param == "stop_regex"
    error = program.run(backend=engine).error()  # nothing to continue
    assert error is None or "empty" in str(error)


def test_thoughts_are_told_apart_and_leave_the_state(engine: Engine) -> None:
    """A grammar makes a random model think; the answer stays, and what follows does not see the thought."""

    @pl.function
    def program(s: Any) -> None:
        s += pl.user("Why?")
        s += pl.assistant(
            pl.separate_reasoning(pl.gen("x", max_tokens=24, regex="<think>hm</think>yes"), model_type="qwen3")
        )
        s += pl.user("And?")

    for stream in (False, True):
        state = program.run(backend=engine, stream=stream)
        assert state["x"] == "yes"
        assert state["x_reasoning_content"] == "hm"
        assert "think" not in state.text()
        assert state.messages()[1] == {"role": "assistant", "content": "yes"}


def test_an_unknown_reasoning_parser_is_refused(engine: Engine) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "x" + pl.separate_reasoning(pl.gen("x"), model_type="nobody")

    with pytest.raises(RequestError, match="no reasoning parser is named 'nobody'"):
        program.run(backend=engine)["x"]


def test_an_own_engine_is_closed_with_its_backend(lang_model: Path) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "The fox" + pl.gen("x", max_tokens=1)

    with pl.Engine(model_path=str(lang_model)) as backend:
        assert program.run(backend=backend).error() is None
        assert pl.get_server_info(backend)["max_total_tokens"] > 0
        assert pl.flush_cache(backend)
    assert isinstance(program.run(backend=backend).error(), EngineDeadError)
    with pytest.raises(EngineDeadError):
        pl.get_server_info(backend)


def test_an_engine_that_closes_ends_what_runs_on_it(lang_model: Path) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "The fox" + pl.gen("x", max_tokens=2) + pl.gen("y", max_tokens=900, ignore_eos=True)

    with pl.Engine(str(lang_model)) as backend:
        state = program.run(backend=backend, stream=True)
        next(state.text_iter("y"))
    with pytest.raises(AbortedError):
        state["y"]
    state.branch.closed.wait(20)
    assert isinstance(state.error(), AbortedError)


def test_the_default_models_format(smollm2_path: str) -> None:
    """On the model that comes with the package: its own system message, and a sensible choice."""

    @pl.function
    def program(s: Any) -> None:
        s += pl.user("What is the capital of France?")
        s += pl.assistant("The capital of France is" + pl.select("x", [" Berlin", " Paris", " Rome"]) + ".")

    with Engine(smollm2_path) as engine:
        state = program.run(backend=engine)
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = engine.tokenizer.decode(engine.tokenizer.chat(chat), skip_special_tokens=False)
    assert state["x"] == " Paris"
    assert state.text() == f"{prompt}The capital of France is Paris.<|im_end|>\n"
