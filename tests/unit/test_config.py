"""The configuration: layers, exact types, errors with places, capabilities, secrets, a trip to another process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_plugins import policy_file

from phloem.config import Config, load_config
from phloem.config_sections import AttentionPair
from phloem.config_sizes import parse_size
from phloem.errors import ConfigError
from phloem.plugins.command._target import load_target


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`write(text)` makes engine.yaml in the current folder, beside toy.py."""
    monkeypatch.chdir(tmp_path)
    policy_file(tmp_path)

    def make(text: str) -> str:
        Path("engine.yaml").write_text(text)
        return "engine.yaml"

    return make


def problems(*args: Any, **kwargs: Any) -> list[str]:
    """What load_config complains of."""
    kwargs.setdefault("env", {})
    with pytest.raises(ConfigError) as error:
        load_config(*args, **kwargs)
    return error.value.problems


# --- layers


def test_defaults() -> None:
    config = load_config(env={})
    assert (config.model.use, config.model.path) == ("auto", "smollm2-135m")
    assert (config.cache.use, config.cache.page_size, config.cache.eviction.use) == ("auto", 1, "lru")
    assert (config.schedule.use, config.schedule.chunk, config.grammar.use) == ("lpm", 512, "xgrammar")
    assert config.server.apis == ("openai", "native", "program")
    assert [section.use for section in config.spec] == ["grammar"]  # absent: jump-forward, and nothing else
    assert load_config(sections={"spec": []}, env={}).spec == config.observers == config.samplers == ()


def test_precedence(write: Any) -> None:
    path = write("cache: {page_size: 2}\nschedule: {max_running: 2, chunk: 2, max_waiting: 2}\n")
    env = {"PHLOEM_SCHEDULE__MAX_RUNNING": "3", "PHLOEM_SCHEDULE__CHUNK": "3", "PHLOEM_SCHEDULE__MAX_WAITING": "3"}
    sections = {"schedule": {"chunk": 4, "max_waiting": 4}}
    config = load_config(path, sets=["schedule.max_waiting=5"], sections=sections, env=env)
    assert config.cache.page_size == 2
    assert (config.schedule.max_running, config.schedule.chunk, config.schedule.max_waiting) == (3, 4, 5)
    assert [config.origin(("schedule", n))[0] for n in ("max_running", "chunk", "max_waiting")] == [
        "env",
        "argument",
        "set",
    ]
    assert config.origin(("cache", "page_size"))[1].place == "engine.yaml:1:9"  # type: ignore[union-attr]
    assert config.origin(("cache", "use")) == ("default", None)


def test_short_forms(write: Any) -> None:
    path = write(
        "cache: chunk\nmodel: ./weights\nobservers: [jsonl, {use: jsonl, path: b.jsonl}]\nschedule:\nengine: {}\n"
    )
    config = load_config(path, env={"PHLOEM_GRAMMAR": "none"})
    assert (config.cache.use, config.model.path) == ("chunk", "./weights")
    assert [o.path for o in config.observers] == ["steps.jsonl", "b.jsonl"]  # type: ignore[attr-defined]


def test_a_partial_override_keeps_the_rest(write: Any) -> None:
    path = write("cache: {use: radix, page_size: 8}\n")
    config = load_config(path, env={"PHLOEM_CACHE__TOKENS": "1k"})
    assert (config.cache.page_size, config.cache.tokens) == (8, 1024)


def test_another_plugin_drops_the_options_of_the_one_below(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = write("schedule: {use: './toy.py:Policy', depth: 5, chunk: 64}\n")
    with caplog.at_level(logging.WARNING, logger="phloem.config"):
        config = load_config(path, sets=["schedule.use=fcfs"], env={})
    assert (config.schedule.use, config.schedule.chunk) == ("fcfs", 64)
    assert "engine.yaml:1:36: depth was an option of" in caplog.text
    assert "since 'fcfs' is used" in caplog.text
    higher = {"schedule": {"use": f"{Path.cwd()}/toy.py:Other", "width": 2}}
    other = load_config(path, sections=higher, env={})
    assert (other.schedule.depth, other.schedule.width) == (3, 2)  # type: ignore[attr-defined]


def test_a_list_replaces_a_list(write: Any) -> None:
    path = write("observers: [jsonl, jsonl]\n")
    assert len(load_config(path, sets=["observers=[jsonl]"], env={}).observers) == 1
    assert load_config(path, env={"PHLOEM_OBSERVERS": "[]"}).observers == ()


def test_attention_pair(write: Any) -> None:
    config = load_config(write("attention: {prefill: torch, decode: {use: './toy.py:Kernel'}}\n"), env={})
    assert isinstance(config.attention, AttentionPair)
    assert config.attention.prefill.use == "torch"
    assert config.attention.decode.use.endswith("toy.py:Kernel")
    half = load_config(write("attention: {decode: torch}\n"), env={})
    assert half.attention.prefill.use == "auto"  # type: ignore[union-attr]
    single = load_config("engine.yaml", sets=["attention.use=torch"], env={})
    assert single.attention.use == "torch"  # type: ignore[union-attr]
    both = problems(write("attention: {use: torch, decode: torch}\n"))
    assert both == ["engine.yaml:1:13: attention.use: give either one kernel or {prefill, decode}, not both"]


def test_nested_eviction_options(write: Any) -> None:
    lru = "cache: {eviction: {use: lru, foo: 1}}\n"
    assert problems(write(lru)) == ["engine.yaml:1:30: cache.eviction.foo: unknown key (did you mean 'use'?)"] or (
        problems("engine.yaml") == ["engine.yaml:1:30: cache.eviction.foo: unknown key (known: use)"]
    )


def test_target_is_a_file_or_a_model(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in __import__("os").environ if name.startswith("PHLOEM_")]:
        monkeypatch.delenv(name)
    assert load_target(write("cache: chunk\n")).cache.use == "chunk"
    assert load_target("some/folder", sets=["cache.use=chunk"]).model.path == "some/folder"
    assert load_target(None).model.path == "smollm2-135m"


# --- errors


TEN = """\
model: {pth: x}
cache:
  page_sise: 3
  size: 2GB
  eviction: lfru
cache: {}
schedule: {chunk: 4k, max_running: 0}
engine: {threads: 0, overlap: maybe}
attentoin: {}
observers: [jsnl]
server: {api_key: hunter2, port: 99999}
"""


def test_ten_mistakes_are_ten_messages(write: Any) -> None:
    found = problems(write(TEN), env={"PHLOEM_PROT": "1"}, sets=["engine.seed=x"])
    expected = [
        "engine.yaml:1:9: model.pth: unknown key (did you mean 'path'?)",
        "engine.yaml:3:3: cache.page_sise: unknown key (did you mean 'page_size'?)",
        "engine.yaml:4:3: cache.size: must be a whole number, or one with a suffix such as 16k or 2GiB "
        "(powers of 1024), got '2GB'",
        "engine.yaml:5:3: cache.eviction.use: no eviction plugin is named 'lfru' (did you mean 'lru'?)",
        "engine.yaml:6:1: cache: duplicate key, first given in line 2",
        "engine.yaml:7:23: schedule.max_running: must be greater than or equal to 1, got 0",
        "engine.yaml:8:10: engine.threads: must be auto, or at least 1, got 0",
        "engine.yaml:8:22: engine.overlap: must be 'auto', 'on' or 'off', got 'maybe'",
        "engine.yaml:9:1: attentoin: unknown section (did you mean 'attention'?)",
        "engine.yaml:10:13: observers[0].use: no observer plugin is named 'jsnl' (did you mean 'jsonl'?)",
        "engine.yaml:11:10: server.api_key: a secret is never written out: say {env: NAME} or {file: path}",
        "engine.yaml:11:28: server.port: must be less than or equal to 65535, got 99999",
        "PHLOEM_PROT: unknown variable (did you mean 'PHLOEM_SERVER__PORT'?)",
        "--set engine.seed=x: engine.seed: must be a valid integer, unable to parse string as an integer, got 'x'",
    ]
    assert sorted(found) == sorted(expected)
    assert not any("hunter2" in problem for problem in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache: {use: [", "engine.yaml:1:15: not valid YAML: expected the node content, but found '<stream end>'"),
        ("- a\n", "engine.yaml:1:1: the configuration must be a mapping of sections"),
        (
            "cache: &a {}\nserver: *a\n",
            "engine.yaml:1:8: server: anchors and aliases are not supported; write the value out",
        ),
        (
            "cache: !!python/object:os.x {}\n",
            "engine.yaml:1:8: cache: the tag tag:yaml.org,2002:python/object:os.x is not",
        ),
        ("cache: !mine {}\n", "engine.yaml:1:8: cache: the tag !mine is not supported"),
        ("? [a]\n: 1\n", "engine.yaml:1:3: a key must be a word"),
        ("cache: 5\n", "engine.yaml:1:1: cache: must be a plugin's name or a mapping, got 5"),
        ("cache: {use: 5}\n", "engine.yaml:1:1: cache: use: must be a plugin's name, got 5"),
        ("engine: 5\n", "engine.yaml:1:1: engine: must be a valid dictionary or instance of EngineSection, got 5"),
        ("observers: jsonl\n", "engine.yaml:1:1: observers: must be a list of plugins"),
        ("observers: [{path: x}]\n", "engine.yaml:1:13: observers[0].use: is required"),
        ("observers: [5]\n", "engine.yaml:1:13: observers[0]: must be a plugin's name or a mapping, got 5"),
        (
            "samplers: ['phloem.testing.sampler:FakeProcessor', {use: 'phloem.testing.sampler:FakeProcessor'}]\n",
            "engine.yaml:1:52: samplers[1]: 'FakeProcessor' is given twice",
        ),
        ("spec: [ngram, {use: ngram, max_tokens: 4}]\n", "engine.yaml:1:15: spec[1]: 'ngram' is given twice"),
        ("cache: none\n", "engine.yaml:1:1: cache.use: no cache plugin is named 'none'"),
        ("server: {apis: [opnai]}\n", "engine.yaml:1:17: server.apis[0]: no api plugin is named 'opnai' (did you mean"),
        ("schedule: {chunk: true}\n", "engine.yaml:1:12: schedule.chunk: must be a whole number, or one with"),
        ("schedule: {chunk: 1.5}\n", "engine.yaml:1:12: schedule.chunk: must be a whole number, got 1.5"),
        ("server: {drain_s: .nan}\n", "engine.yaml:1:10: server.drain_s: must be a valid number, unable to parse"),
        (
            "model: {dtype: float8}\n",
            "engine.yaml:1:9: model.dtype: must be 'auto', 'float32', 'bfloat16' or 'float16'",
        ),
        ("schedule: './toy.py:Old'\n", "engine.yaml:1:1: schedule.use: schedule plugin "),
        ("schedule: './toy.py:Reserved'\n", "declares the option 'chunk', which is the core's own"),
        ("schedule: {use: './toy.py:Policy', depth: 13}\n", "engine.yaml:1:1: schedule: depth 13 brings bad luck"),
    ],
)
def test_one_mistake(write: Any, text: str, message: str) -> None:
    found = problems(write(text))
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{chunk: 0}", "schedule.chunk: must be greater than or equal to 1, got 0"),
        ("{max_running: 0}", "schedule.max_running: must be greater than or equal to 1, got 0"),
        ("{max_tokens_per_step: 0}", "schedule.max_tokens_per_step: must be greater than or equal to 1, got 0"),
        (
            "{chunk: 4096}",
            "schedule: chunk 4096 > max_tokens_per_step 2048: a chunk must fit in one step; "
            "lower chunk to 2048 or raise max_tokens_per_step to 4096",
        ),
    ],
)
def test_impossible_schedules(write: Any, text: str, message: str) -> None:
    """what-breaks 18: limits that can never work hang in silence."""
    found = problems(write(f"schedule: {text}\n"))
    assert [problem.partition(": ")[2] for problem in found] == [message]


def test_impossible_caches(write: Any) -> None:
    assert "must be greater than or equal to 1, got 0" in problems(write("cache: {page_size: 0}\n"))[0]
    assert problems(write("cache: {page_size: 16, tokens: 100}\n")) == [
        "engine.yaml:1:1: cache: tokens 100 = 6 pages of page_size 16 + 4: use 96 or 112"
    ]
    assert problems(sets=["cache.tokens=10", "cache.page_size=16"]) == [
        "--set cache.tokens=10, --set cache.page_size=16: cache: tokens 10 = 0 pages of page_size 16 + 10: use 16"
    ]


def test_a_list_that_is_none(write: Any) -> None:
    assert problems(write("server: {apis: openai}\n")) == [
        "engine.yaml:1:10: server.apis: must be a list, got 'openai'"
    ]
    assert problems(sets=["observers.0.path=x"]) == ["--set observers.0.path=x: observers: must be a list of plugins"]


def test_a_small_step_lowers_the_default_chunk(write: Any) -> None:
    assert load_config(write("schedule: {max_tokens_per_step: 64}\n"), env={}).schedule.chunk == 64


def test_missing_file_and_bad_set() -> None:
    assert problems("nowhere.yaml") == ["nowhere.yaml: cannot read the configuration: No such file or directory"]
    assert problems(sets=["cache"]) == ["--set cache: expected section.option=value"]
    assert problems(sets=["cache.use=["])[0].startswith("--set cache.use=[: not valid YAML")
    assert problems(sections={"cahce": {}}) == ["argument cahce: cahce: unknown section (did you mean 'cache'?)"]
    assert problems(sections={"cache": {"page_sise": 1}}) == [
        "argument cache: cache.page_sise: unknown key (did you mean 'page_size'?)"
    ]


def test_unknown_variables() -> None:
    assert problems(env={"PHLOEM_CACH__PAGE_SIZE": "1"}) == [
        "PHLOEM_CACH__PAGE_SIZE: unknown variable (did you mean 'PHLOEM_CACHE__PAGE_SIZE'?)"
    ]
    assert problems(env={"PHLOEM_CACHE__PAGE_SISE": "1"}) == [
        "PHLOEM_CACHE__PAGE_SISE: cache.page_sise: unknown key (did you mean 'page_size'?)"
    ]
    assert problems(env={"PHLOEM_QQQ": "1"}) == ["PHLOEM_QQQ: unknown variable (expected PHLOEM_SECTION__OPTION)"]


def test_yaml_words_and_numbers(write: Any) -> None:
    config = load_config(write("engine: {overlap: off, seed: 010}\nserver: {drain_s: 1e1, host: '1'}\n"), env={})
    assert (config.engine.overlap, config.engine.seed) == ("off", 10)
    assert (config.server.drain_s, config.server.host) == (10.0, "1")


@pytest.mark.parametrize(
    ("text", "size"),
    [("16k", 16384), ("2GiB", 2 * 1024**3), ("1.5M", 1572864), ("7", 7), (7, 7), ("1 TiB", 1024**4), (3.0, 3)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["2GB", "k", "-1", "1.3", "", True, None, "1e3", "4i", float("nan"), float("inf")])
def test_bad_sizes(text: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        parse_size(text)


# --- secrets


def test_secret_from_env_and_file(write: Any) -> None:
    Path("key.txt").write_text("from-file\n")
    config = load_config(write("server: {api_key: {env: PHLOEM_API_KEY}}\n"), env={"PHLOEM_API_KEY": "from-env"})
    assert config.server.api_key is not None
    assert config.server.api_key.value.get_secret_value() == "from-env"
    for text in (str(config.dump()), json.dumps(config.to_dict()), repr(config), config.model_dump_json()):
        assert "from-env" not in text
    assert config.dump()["server"]["api_key"] == {"env": "PHLOEM_API_KEY"}
    env = {"PHLOEM_API_KEY": "from-env"}
    higher = load_config("engine.yaml", sets=["server.api_key={file: key.txt}"], env=env)
    assert higher.server.api_key.value.get_secret_value() == "from-file"  # type: ignore[union-attr]


def test_missing_secrets(write: Any) -> None:
    assert problems(write("server: {api_key: {env: NOPE}}\n")) == [
        "engine.yaml:1:10: server.api_key: the environment variable NOPE is not set"
    ]
    assert problems(write("server: {api_key: {file: nope.txt}}\n")) == [
        "engine.yaml:1:10: server.api_key: the file nope.txt cannot be read: No such file or directory"
    ]
    assert "a secret is never written out" in problems(write("server: {api_key: {}}\n"))[0]
    policy = "schedule: {use: './toy.py:Policy', key: {env: NOPE}}\n"
    assert problems(write(policy)) == ["engine.yaml:1:36: schedule.key: the environment variable NOPE is not set"]


# --- capabilities


def test_a_missing_capability_quotes_both_lines(write: Any) -> None:
    text = "schedule:\n  use: ./toy.py:Needy\nattention: ./toy.py:Kernel\n"
    (problem,) = problems(write(text))
    first, *quoted = problem.splitlines()
    assert first.startswith("engine.yaml:1:1: schedule: '")
    assert f"needs attention with teleport; attention '{Path.cwd()}/toy.py:Kernel' has none" in first
    assert [line.strip() for line in quoted] == [
        "engine.yaml:2:3: use: ./toy.py:Needy",
        "engine.yaml:3:1: attention: ./toy.py:Kernel",
    ]


def test_a_requirement_on_what_is_not_configured(write: Any) -> None:
    (problem,) = problems(write("schedule: ./toy.py:Lonely\n"))
    assert "needs spec with hidden; spec 'grammar' has none" in problem


def test_what_only_the_engine_knows_is_checked_then(write: Any) -> None:
    Path("fits.py").write_text(
        "from toy import *\nclass Fits(Needy):\n    requires = frozenset({'model:hidden_states'})\n"
    )
    sys.path.insert(0, str(Path.cwd()))
    try:
        config = load_config(write("schedule: ./fits.py:Fits\n"), env={})
    finally:
        sys.path.remove(str(Path.cwd()))
    config.check_requires("model", "native", frozenset({"hidden_states"}))
    with pytest.raises(ConfigError, match="needs model with hidden_states; model 'native' has none") as error:
        config.check_requires("model", "native", frozenset())
    assert "default: model: auto" in str(error.value)


# --- another process


def test_a_trip_to_another_process(write: Any) -> None:
    path = write("schedule: {use: './toy.py:Policy', depth: 4}\nserver: {api_key: {env: SECRET}}\n")
    config = load_config(path, sets=["cache.page_size=4"], env={"SECRET": "s"})
    data = json.loads(json.dumps(config.to_dict()))
    program = (
        "import json, sys; from phloem.config import Config; c = Config.from_dict(json.load(sys.stdin))\n"
        "print(json.dumps([c.dump(), c.server.api_key.value.get_secret_value(), str(c.origin(('cache','page_size')))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(data), capture_output=True, text=True, check=True,
        env={"SECRET": "s"}, cwd="/",
    )  # fmt: skip
    dump, secret, origin = json.loads(done.stdout)
    assert (dump, secret) == (config.dump(), "s")
    assert "--set cache.page_size=4" in origin
    assert isinstance(Config.from_dict(data, env={"SECRET": "t"}), Config)


def test_loading_imports_no_torch() -> None:
    program = "import sys; from phloem.config import load_config; load_config(env={}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_frozen() -> None:
    config = load_config(env={})
    with pytest.raises(ValueError, match="frozen"):
        config.cache.page_size = 3
