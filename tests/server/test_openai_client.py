"""The official client against a real server with a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live import Live

USER: list[Any] = [{"role": "user", "content": "What travels down the stem?"}]


@pytest.fixture(scope="module")
def live(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    disk = f"cache.disk={{path: {tmp_path_factory.mktemp('kv')}, size: 16MiB}}"
    with Live(tiny_model("llama"), "model.name=tiny", disk) as server:
        yield server
        server.until(server.all_slots_back)


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return live.openai


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").owned_by == "phloem"
    with pytest.raises(openai.NotFoundError, match="this server serves 'tiny'"):
        client.models.retrieve("gpt-5")


def test_chat_and_its_stream_agree(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**wanted)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_n_and_seed(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 12, "n": 3, "seed": 7}
    first = [c.message.content for c in client.chat.completions.create(**wanted).choices]
    assert [c.message.content for c in client.chat.completions.create(**wanted).choices] == first
    assert len(set(first)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**wanted, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == first


def test_logprobs(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 6, "temperature": 0}
    choice = client.chat.completions.create(**wanted, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None
    items = choice.logprobs.content
    assert items is not None
    assert len(items) == 6
    for item in items:
        assert item.logprob <= 0
        assert item.top_logprobs[0].logprob == item.logprob, "greedy takes the best"
        values = [top.logprob for top in item.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
    raw = b"".join(bytes(item.bytes or []) for item in items)
    assert (
        raw.decode("utf-8", "replace").rstrip("\ufffd").startswith((choice.message.content or "").rstrip("\ufffd")[:4])
    )


def test_completions_echo_and_legacy_logprobs(client: openai.OpenAI) -> None:
    prompt = "The sugar a leaf makes"
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text.startswith(prompt)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.tokens is not None
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + 3
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=2)
    assert again.choices[0].logprobs is not None
    assert again.choices[0].logprobs.token_logprobs is not None
    assert again.choices[0].logprobs.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-4)


def test_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b c"], max_tokens=4, n=2, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model="tiny", prompt="b c", max_tokens=4, temperature=0)
    assert answer.choices[2].text == answer.choices[3].text == alone.choices[0].text


def test_stop_and_bias(client: openai.OpenAI, live: Live) -> None:
    base: dict[str, Any] = {"model": "tiny", "prompt": "The sugar", "max_tokens": 16, "temperature": 0}
    plain = client.completions.create(**base).choices[0].text
    stop = plain[3:5]
    cut = client.completions.create(**base, stop=[stop]).choices[0]
    assert cut.text == plain[: plain.index(stop)]
    assert cut.finish_reason == "stop"
    (letter,) = live.http.post("/tokenize", json={"prompt": "x"}).json()["tokens"]
    biased = client.completions.create(**base, logit_bias={str(letter): 100}).choices[0]
    assert biased.text == "x" * 16


def test_extra_parameters(client: openai.OpenAI) -> None:
    base: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 8}
    extra = {"top_k": 1, "min_p": 0.1, "ignore_eos": True, "cache_salt": "mine", "repetition_penalty": 1.1}
    answer = client.chat.completions.create(**base, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0, "another salt shares nothing"


@pytest.mark.parametrize(
    ("extra", "kind", "words"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "gpt-5"),
        ({"temperature": 200}, openai.BadRequestError, "temperature must be in"),
        ({"max_tokens": 5000}, openai.BadRequestError, "= 50[0-9][0-9] exceeds the limit of 1024 tokens"),
        ({"max_tokens": 5000, "stream": True}, openai.BadRequestError, "exceeds the limit"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, openai.BadRequestError, "no name of a tool"),
        ({"extra_body": {"lark": "start: X"}}, openai.BadRequestError, "lark"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "outside the vocabulary of 512"),
        ({"extra_body": {"priority": 5}}, openai.BadRequestError, "priority 5 cannot be honoured"),
        ({"extra_body": {"logits_processors": {"x": {}}}}, openai.BadRequestError, "unknown logits processor 'x'"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, openai.BadRequestError, "exceeds the limit of 1024"),
    ],
)
def test_errors(client: openai.OpenAI, extra: dict[str, Any], kind: type[openai.APIStatusError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        client.chat.completions.create(**({"model": "tiny", "messages": USER} | extra))
    assert caught.value.type == "invalid_request_error"
    if "exceeds" in words:
        assert caught.value.code == "context_length_exceeded"


def test_wrong_token_ids_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="token 512 is outside the vocabulary of 512"):
        client.completions.create(model="tiny", prompt=[512])


def test_native_generate(live: Live) -> None:
    body = {"text": "The sugar", "sampling_params": {"max_tokens": 5, "temperature": 0}}
    answer = live.http.post("/generate", json=body).json()
    assert answer["text"] == live.complete(max_tokens=5, temperature=0).json()["choices"][0]["text"]
    assert len(answer["output_ids"]) == 5
    wrong = live.http.post("/generate", json=body | {"adapter": "a"})
    assert wrong.status_code == 400
    assert "adapter 'a' is not available" in wrong.json()["error"]["message"]


def test_flush_cache_and_metrics(live: Live) -> None:
    live.complete("a rather long prompt that is worth caching")
    live.until(lambda: live.metrics()["phloem_kv_slots/0/evictable"] > 0)
    assert live.http.post("/flush_cache").json() == {"flushed": True}
    live.until(lambda: live.metrics()["phloem_kv_slots/0/evictable"] == 0)
    metrics = live.metrics()
    assert metrics["vllm:generation_tokens_total"] > 0
    assert metrics["vllm:prompt_tokens_total"] > 0
    assert metrics["vllm:request_success_total/length"] > 0
    assert metrics["vllm:time_to_first_token_seconds_count"] > 0


def test_the_http_process_has_no_torch(live: Live) -> None:
    live.openai.chat.completions.create(model="tiny", messages=USER, max_tokens=1, extra_body={"choices": ["a"]})
    loaded = Path(f"/proc/{live.process.pid}/maps").read_text()
    assert "libtorch" not in loaded
    assert "xgrammar" not in loaded, "grammars are the model process's work"
    assert "libtorch" in Path(f"/proc/{live.model_pid}/maps").read_text()


def test_banner_config_and_health(live: Live) -> None:
    output = live.output
    for part in ("tiny", "float32", "bytes = ", "cache.radix 0.1.0", "storage.file 0.1.0", live.url, "curl "):
        assert part in output, output
    config = live.http.get("/config").json()
    assert config["cache"]["use"] == "auto"
    assert config["server"]["port"] == live.port
    live.openai.completions.create(model="tiny", prompt="a", max_tokens=1)
    live.until(lambda: live.http.get("/health").json()["steps"] > 0)  # told by heartbeats
    health = live.http.get("/health").json()
    assert health["healthy"]
    named = {section: health["plugins"][section] for section in ("cache", "model", "quant", "storage")}
    assert named == {"cache": "radix", "model": "native", "quant": "stored", "storage": "file"}
