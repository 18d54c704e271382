"""The OpenAI routes: shapes, streams, usage, and the refusal of what cannot be honoured."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

Run = Callable[..., Any]
USER = [{"role": "user", "content": "a tree of tokens"}]


def events(response: httpx.Response) -> list[Any]:
    """Payloads of a stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def post(run: Run, path: str, body: Any, **options: Any) -> httpx.Response:
    """One request on a fresh application."""

    async def test(client: httpx.AsyncClient, *_: Any) -> httpx.Response:
        return await client.post(path, json=body)

    response: httpx.Response = run(test, **options)
    return response


def refused(response: httpx.Response, param: str | None, *words: str, status: int = 400) -> None:
    """The response is an error in OpenAI's shape that names the parameter and says these words."""
    error = response.json()["error"]
    assert response.status_code == status, response.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert all(word in error["message"] for word in words), error["message"]


def test_completion(run: Run) -> None:
    body = post(run, "/v1/completions", {"prompt": "The sugar a leaf", "max_tokens": 4}).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "echo"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "The ", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 16,
        "completion_tokens": 4,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_completion_defaults_to_sixteen_tokens(run: Run) -> None:
    assert post(run, "/v1/completions", {"prompt": "a"}).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("the sugar", ["the sugar"]),
        (["the sugar", "a tree"], ["the sugar", "a tree"]),
        ([69, 70], ["bcbc"]),
        ([[69, 70], [71]], ["bcbc", "dddd"]),
    ],
)
def test_prompt_forms(run: Run, prompt: Any, texts: list[str]) -> None:
    body = post(run, "/v1/completions", {"prompt": prompt, "max_tokens": 4, "n": 2}).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(texts)))
    for index, choice in enumerate(body["choices"]):
        assert choice["text"] == texts[index // 2][:4]
    assert body["usage"]["completion_tokens"] == 8 * len(texts)


def test_echo_with_logprobs(run: Run) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "echo": True, "logprobs": 2}
    choice = post(run, "/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "abca"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "a"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) == 2
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


def test_offsets_count_characters_not_tokens(run: Run) -> None:
    body = {"prompt": "é🙂b", "max_tokens": 8, "echo": True, "logprobs": 0}
    choice = post(run, "/v1/completions", body).json()["choices"][0]
    once = [0, 0, 1, 1, 1, 1, 2]  # two bytes of é, four of 🙂, one of b: a token each
    assert choice["logprobs"]["text_offset"] == [*once, *(3 + offset for offset in once), 6]
    streamed = events(post(run, "/v1/completions", body | {"stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [o for part in parts if part for o in part["text_offset"]] == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs(run: Run, path: str, stream: bool) -> None:
    base = {"messages": [{"role": "user", "content": "é"}]} if "chat" in path else {"prompt": "éa"}
    response = post(run, path, base | {"max_tokens": 2, "prompt_logprobs": 1, "stream": stream})
    bodies = events(response) if stream else [response.json()]
    (found,) = [c["prompt_logprobs"] for body in bodies for c in body["choices"] if "prompt_logprobs" in c]
    assert found[0] is None
    assert found[1]["logprob"] == -0.5
    assert len(found[1]["top_logprobs"]) == 1
    if "chat" not in path:
        assert [entry["bytes"] for entry in found[1:]] == [[0xA9], [ord("a")]]


def test_scoring_a_prompt_without_output(run: Run) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = post(run, "/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0


def test_completion_stream(run: Run) -> None:
    body = {"prompt": ["abc", "a tree"], "max_tokens": 5, "n": 2, "stream": True, "echo": True, "logprobs": 1}
    body["stream_options"] = {"include_usage": True}
    chunks = events(post(run, "/v1/completions", body))
    whole = post(run, "/v1/completions", {k: v for k, v in body.items() if "stream" not in k}).json()
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index, choice in enumerate(whole["choices"]):
        parts = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        joined = [token for part in parts for token in (part["logprobs"] or {"tokens": []})["tokens"]]
        assert joined == choice["logprobs"]["tokens"]
        offsets = [offset for part in parts for offset in (part["logprobs"] or {"text_offset": []})["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_stream_without_usage_has_none(run: Run) -> None:
    chunks = events(post(run, "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}))
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


def test_chat(run: Run) -> None:
    body = post(run, "/v1/chat/completions", {"messages": USER, "max_completion_tokens": 4, "n": 2}).json()
    assert body["object"] == "chat.completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "use", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 8


def test_chat_uses_the_template_with_the_answer_opened(run: Run) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        ids = (await client.post("/tokenize", json={"messages": USER})).json()["tokens"]
        text = (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
        assert text == "<|im_start|>user\na tree of tokens<|im_end|>\n<|im_start|>assistant\n"

    run(test)


def test_chat_logprobs_carry_exact_bytes(run: Run) -> None:
    body = {"messages": [{"role": "user", "content": "🙂"}], "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    choice = post(run, "/v1/chat/completions", body).json()["choices"][0]
    items = choice["logprobs"]["content"]
    assert len(items) == 12
    assert all(len(item["top_logprobs"]) == 2 for item in items)
    raw = b"".join(bytes(item["bytes"]) for item in items if not item["token"].startswith("<|"))
    assert "🙂" in raw.decode("utf-8", "replace")
    assert choice["logprobs"]["refusal"] is None


def test_chat_stream_has_role_content_finish_and_usage_chunks(run: Run) -> None:
    """what-breaks 51: usage at the end of a stream."""
    body = {"messages": USER, "max_tokens": 6, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(run, "/v1/chat/completions", body))
    whole = post(run, "/v1/chat/completions", {"messages": USER, "max_tokens": 6, "n": 2}).json()
    for index in (0, 1):
        parts = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in parts[1:])
        assert "".join(p["delta"].get("content", "") for p in parts) == whole["choices"][index]["message"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert parts[-1]["delta"] == {}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_chat_stream_logprobs_cover_every_token(run: Run) -> None:
    body = {"messages": [{"role": "user", "content": "🙂🌳"}], "max_tokens": 12, "stream": True, "logprobs": True}
    chunks = events(post(run, "/v1/chat/completions", body))
    entries = [e for c in chunks for p in c["choices"] if p["logprobs"] for e in p["logprobs"]["content"]]
    assert len(entries) == 12


def test_a_stop_string_is_reported_and_not_leaked(run: Run) -> None:
    body = {"prompt": "The sugar a leaf", "max_tokens": 16, "stop": "gar a"}
    choice = post(run, "/v1/completions", body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The su", "stop", "gar a")
    chunks = events(post(run, "/v1/completions", body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "The su"


def test_text_parts_are_joined_and_developer_means_system(run: Run) -> None:
    parts = [{"type": "text", "text": "a tree "}, {"type": "text", "text": "of tokens"}]
    for messages, same in (
        ([{"role": "user", "content": parts}], USER),
        ([{"role": "developer", "content": "x"}], [{"role": "system", "content": "x"}]),
    ):
        got = post(run, "/tokenize", {"messages": messages}).json()
        assert got == post(run, "/tokenize", {"messages": same}).json()


def test_models_and_unknown_model(run: Run) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["id"] == "echo"
        assert model["object"] == "model"
        assert (await client.get("/v1/models/echo")).json() == model
        refused(await client.get("/v1/models/gpt-5"), "model", "gpt-5", "'echo'", status=404)
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": USER})):
            response = await client.post(path, json=body | {"model": "gpt-5"})
            refused(response, "model", "gpt-5", status=404)
            assert response.json()["error"]["code"] == "model_not_found"
            assert (await client.post(path, json=body | {"model": "echo", "max_tokens": 1})).status_code == 200

    run(test)


def test_tokenize_round_trip(run: Run) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        made = (await client.post("/tokenize", json={"prompt": "naïve 🙂"})).json()
        assert made["count"] == len(made["tokens"])
        assert made["max_model_len"] == 256
        back = await client.post("/detokenize", json={"tokens": made["tokens"]})
        assert back.json() == {"prompt": "naïve 🙂"}
        refused(await client.post("/detokenize", json={"tokens": [260]}), "tokens", "260", "vocabulary")
        refused(await client.post("/tokenize", json={}), "prompt", "either prompt or messages")

    run(test)


INERT = [
    ("/v1/completions", {"user": "me", "suffix": None, "best_of": 1, "logprobs": None, "stop": None}),
    (
        "/v1/chat/completions",
        {
            "user": "me",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "prompt_cache_key": "k",
            "reasoning_effort": None,
            "prediction": {"type": "content", "content": "x"},
            "logprobs": False,
            "temperature": None,
        },
    ),
]


@pytest.mark.parametrize(("path", "extra"), INERT)
def test_what_cannot_change_the_output_is_accepted(run: Run, path: str, extra: dict[str, Any]) -> None:
    base = {"max_tokens": 2} | ({"messages": USER} if "chat" in path else {"prompt": "a"})
    response = post(run, path, base | extra)
    assert response.status_code == 200, response.text


REFUSED = [
    ({"temprature": 1.0}, "temprature", "did you mean 'temperature'"),
    ({"guided_regex": "a"}, "guided_regex", "guided_regex cannot be honoured: no grammar"),
    ({"grammar": "a"}, "grammar", "use ebnf or lark"),
    ({"zzz": 1}, "zzz", "unknown parameter 'zzz'"),
    ({"functions": [{"name": "f"}]}, "functions", "give them as tools"),
    ({"function_call": {"name": "f"}}, "function_call", "give tools and tool_choice"),
    ({"store": True}, "store", "stores nothing"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "valid boolean"),
    ({"service_tier": "priority"}, "service_tier", "cannot be honoured"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "cannot be honoured"),
    ({"modalities": ["audio"]}, "modalities", "cannot be honoured"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 129}, "logprobs", "between 0 and 128"),
    ({"logprobs": 1}, "logprobs", "valid boolean"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**30}, "max_tokens", "less than"),
    ({"max_tokens": 1000}, "prompt", "exceeds the limit of 256"),
    ({"temperature": -1}, "temperature", "[0, 100]"),
    ({"temperature": "warm"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"n": 0}, "n", "between 1 and 128"),
    ({"n": 1000}, "n", "between 1 and 128"),
    ({"n": True}, "n", "valid integer"),
    ({"seed": 2**64}, "seed", "less than"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": ["a"] * 65}, "stop", "65 entries"),
    ({"stop": {"a": 1}}, "stop", "valid string or input should be a valid list"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
    ({"stream_options": {"include_usge": True}}, "stream_options.include_usge", "did you mean 'include_usage'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object', 'json_schema' or"),
    ({"response_format": {"type": "json_object"}}, "response_format", "response_format cannot be honoured: no gr"),
    ({"response_format": {"type": "json_object"}, "json_schema": True}, "response_format", "together"),
    ({"regex": "a", "choices": ["b"]}, "choices", "given together"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": [5]}, "messages[0]", "input should be a JSON object"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'system'"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name", "shows no names"),
    (
        {"messages": [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        "messages[1].content",
        "takes text only",
    ),
]


@pytest.mark.parametrize(
    ("extra", "param", "words"), REFUSED, ids=[f"{next(iter(e))}-{i}" for i, (e, *_) in enumerate(REFUSED)]
)
def test_what_cannot_be_honoured_is_refused_by_name(run: Run, extra: dict[str, Any], param: str, words: str) -> None:
    refused(post(run, "/v1/chat/completions", {"messages": USER} | extra), param, words)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "is missing"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": [[]]}, "prompt", "is empty"),
        ({"prompt": ["a", ""]}, "prompt", "is empty"),
        ({"prompt": None}, "prompt", "valid string or input should be a valid list"),
        ({"prompt": [1, "a"]}, "prompt", "valid string"),
        ({"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        ({"prompt": "a", "best_of": 2}, "best_of", "only best_of equal to n, which is 1"),
        ({"prompt": "a", "suffix": "x"}, "suffix", "does not fill in the middle"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "a b" * 3000}, "prompt", "exceeds the limit of 256"),
    ],
)
def test_completion_refusals(run: Run, body: dict[str, Any], param: str, words: str) -> None:
    refused(post(run, "/v1/completions", body), param, words)


def test_a_refused_stream_has_its_own_status(run: Run) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": USER})):
        refused(post(run, path, body | {"stream": True, "max_tokens": 1000}), "prompt", "exceeds")
