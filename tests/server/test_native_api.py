"""POST /generate: forms, batches, streams, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_openai_api import events, post, refused

Run = Callable[..., Any]


def test_text(run: Run) -> None:
    body = {"text": "The sugar a leaf", "sampling_params": {"max_tokens": 3, "logprobs": 1}, "rid": "mine"}
    answer = post(run, "/generate", body).json()
    assert answer["text"] == "The"
    assert len(answer["output_ids"]) == 3
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == "length"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (16, 3, 1)
    assert [item["token"] for item in meta["logprobs"]] == ["T", "h", "e"]


def test_token_ids_and_batches(run: Run) -> None:
    assert post(run, "/generate", {"input_ids": [69], "sampling_params": {"max_tokens": 2}}).json()["output_ids"] == [
        69,
        69,
    ]
    body = {
        "input_ids": [[69], [70]],
        "rid": ["x", "y"],
        "sampling_params": [{"max_tokens": 1}, {"max_tokens": 2, "n": 2}],
    }
    answers = post(run, "/generate", body).json()
    assert [answer["output_ids"] for answer in answers] == [[69], [70, 70], [70, 70]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y", "y"]
    assert [answer["meta_info"]["choice"] for answer in answers] == [0, 0, 1]


def test_a_batch_of_one_is_a_list(run: Run) -> None:
    answers = post(run, "/generate", {"text": ["a"], "sampling_params": {"max_tokens": 1}}).json()
    assert isinstance(answers, list)
    assert len(answers) == 1


def test_stream_deltas_join_to_the_whole(run: Run) -> None:
    body = {"text": ["naïve 🙂 tree", "a leaf"], "sampling_params": {"max_tokens": 9, "n": 2}}
    whole = post(run, "/generate", body).json()
    chunks = events(post(run, "/generate", body | {"stream": True}))
    for place in (0, 1):
        for choice in (0, 1):
            parts = [c for c in chunks if (c["index"], c["meta_info"]["choice"]) == (place, choice)]
            answer = whole[2 * place + choice]
            assert "".join(part["text"] for part in parts) == answer["text"]
            assert [t for part in parts for t in part["output_ids"]] == answer["output_ids"]
            assert parts[-1]["meta_info"]["finish_reason"] == "length"
            assert parts[-1]["meta_info"]["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "text", "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text", "either text or input_ids"),
        ({"text": ""}, "text", "is empty"),
        ({"text": []}, "text", "is empty"),
        ({"input_ids": [[1], []]}, "input_ids", "is empty"),
        ({"text": "a", "rid": ["x", "y"]}, "rid", "1 prompts"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "without repeats"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params", "2 sampling_params for 1 prompts"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1}}, "max_new_tokens", "use max_tokens"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature", "did you mean 'temperature'"),
        ({"text": "a", "sampling_params": {"max_tokens": "1"}}, "max_tokens", "`int"),
        ({"text": "a", "sampling_params": {"max_tokens": 10**30}}, None, "ints"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [1, "a"]}}, "stop_token_ids", "`int`"),
        ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias", "`int`"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "top_p", "(0, 1]"),
        ({"text": "a", "return_logprob": True}, "return_logprob", "use sampling_params.logprobs"),
        ({"prompt": "a"}, "prompt", "use text"),
    ],
)
def test_refusals(run: Run, body: dict[str, Any], param: str | None, words: str) -> None:
    refused(post(run, "/generate", body), param, words)


def test_pin_and_unpin(run: Run) -> None:
    body = {"name": "system", "text": "The sugar a leaf"}
    assert post(run, "/pin", body).json() == {"name": "system", "prompt_tokens": 16, "cached_tokens": 1}
    assert post(run, "/pin", {"name": "ids", "input_ids": [69, 70]}).json()["prompt_tokens"] == 2
    assert post(run, "/unpin", {"name": "system"}).json() == {"unpinned": False}, "each run has a server of its own"


def test_pins_are_refused(run: Run) -> None:
    refused(post(run, "/pin", {"name": "a"}), "text")
    refused(post(run, "/pin", {"text": "a"}), "name")
    refused(post(run, "/pin", {"name": "a", "text": "a", "max_tokens": 3}), "max_tokens")
