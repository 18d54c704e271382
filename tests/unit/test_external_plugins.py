"""Plugins from other distributions, installed beside the environment and chosen by YAML; and from a plain file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
NAMES = ("phloem-short-first", "phloem-lfuda", "phloem-private-tail", "phloem-phrasebook", "phloem-slowlog")
INSTALLED = (*NAMES, "phloem-trunk-window")  # for models with windows only
PROGRAM = """
import json, logging, sys
from phloem.config import load_config
from phloem.hooks import ObserverSet
from phloem.batch import StepStats
from phloem.interfaces import PluginContext
from phloem.registry import build
from phloem.testing import FakeEvictionNode
from phloem.testing.plugin import TOY_SPEC
from phloem.testing.schedule import waiting_request

logging.basicConfig(stream=sys.stderr, format="%(message)s")
config = load_config(sys.argv[1], env={})
policy = build("schedule", config.schedule, PluginContext("schedule", "x", model=TOY_SPEC))
rule = build("eviction", config.cache.eviction, PluginContext("eviction", "x"))
observers = ObserverSet(
    [(s.use, build("observer", s, PluginContext("observer", s.use))) for s in config.observers]
)
observers.step(StepStats(step=1, forward_s=99.0))
requests = [waiting_request(0, prompt=900), waiting_request(1, prompt=10)]
print(json.dumps({
    "order": [r.arrival for r in policy.order(requests)],
    "key": rule.key(FakeEvictionNode(hits=99, level=5.0)),
    "patience": config.schedule.patience,
    "use": [config.schedule.use, config.cache.eviction.use, config.cache.key.use, config.spec[-1].use,
        config.observers[0].use],
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, installed into a folder that only the subprocess looks at."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    folders = [str(EXAMPLES / name) for name in INSTALLED]
    subprocess.run([*command, "--target", str(target), *folders], check=True, capture_output=True, text=True)
    return target


def run(config: Path, path: Path | None) -> tuple[dict[str, Any], str]:
    """What the program prints with `path` on PYTHONPATH, and what it logs."""
    env = {"PATH": "", **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-c", PROGRAM, str(config)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_distributions_chosen_by_yaml(installed: Path) -> None:
    result, log = run(EXAMPLES / "engine.yaml", installed)
    assert result == {
        "order": [1, 0],
        "key": 205.0,
        "patience": 200,
        "use": ["short-first", "lfuda", "private-tail", "phrasebook", "slowlog"],
    }
    assert "step 1 took 99.00 s" in log


ENGINE = """
import json, logging, sys
from phloem import Engine, SamplingParams

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
model, *sets = sys.argv[1:]
prompts = [[i % 50 + 3] * 40 + [9, 8, 7] for i in range(8)] + [[4, 5]]
with Engine(model, **json.loads(sets[0])) as engine:
    results = engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0))
    engine.check()
    print(json.dumps([[r.token_ids for r in results], engine.stats()["evicted_tokens"]]))
"""


def test_an_engine_runs_on_them(installed: Path, tiny_model: Callable[[str], Path]) -> None:
    own = {"cache": {"tokens": 128}, "schedule": {"max_running": 2}, "engine": {"threads": 1, "check": True}}
    strange = {
        **own,
        "cache": {
            "tokens": 128,
            "eviction": {"use": "lfuda", "weight": 2},
            "key": {"use": "private-tail", "marker": "<|im_end|>"},
        },
        "schedule": {"max_running": 2, "use": "short-first"},
        "spec": [{"use": "phrasebook", "phrases": ["The quick brown fox jumps", "and everything sleeps"], "match": 1}],
        "observers": [{"use": "slowlog", "step_s": 0, "first_token_s": 0}],
    }
    env = {"PATH": "", "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    outputs, logs = [], []
    for sections in (own, strange):
        command = [sys.executable, "-c", ENGINE, str(tiny_model("llama")), json.dumps(sections)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        tokens, evicted = json.loads(done.stdout.splitlines()[-1])
        assert evicted > 0
        outputs.append(tokens)
        logs.append(done.stderr)
    assert outputs[0] == outputs[1]
    assert "9 slow requests" in logs[1]
    assert "slow requests" not in logs[0]


def test_installed_ones_are_listed_and_checked(installed: Path) -> None:
    env = {"PATH": "", "PYTHONPATH": str(installed)}
    listing = [sys.executable, "-m", "phloem", "plugins", "list", str(EXAMPLES / "engine.yaml"), "--json"]
    rows = json.loads(subprocess.run(listing, env=env, capture_output=True, text=True, check=True).stdout)
    strangers = {row["distribution"]: row["status"] for row in rows if row["distribution"] != "phloem"}
    assert strangers == dict.fromkeys(NAMES, "selected") | {"phloem-trunk-window": "ok"}
    for checked in (["lfuda"], ["trunk-window", "--set", "examples=2"]):
        checking = [sys.executable, "-m", "phloem", "plugins", "check", *checked]
        done = subprocess.run(checking, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_installing_activates_nothing(installed: Path) -> None:
    program = (
        "import sys; from phloem.config import load_config as load; print(load(env={}).schedule.use, *sys.modules)"
    )
    command = [sys.executable, "-c", program]
    env = {"PATH": "", "PYTHONPATH": str(installed)}
    words = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert words[0] == "lpm"
    assert not [word for word in words if word.startswith(tuple(name.replace("-", "_") for name in NAMES))]


def test_without_them_the_configuration_says_so() -> None:
    command = [sys.executable, "-m", "phloem", "config", "check", str(EXAMPLES / "engine.yaml")]
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "engine.yaml:2:12: schedule.use: no schedule plugin is named 'short-first'" in done.stderr
    assert "engine.yaml:5:14: cache.eviction.use: no eviction plugin is named 'lfuda'" in done.stderr
    assert "engine.yaml:6:9: cache.key.use: no key plugin is named 'private-tail'" in done.stderr
    assert "observers[0].use: no observer plugin is named 'slowlog'" in done.stderr


CLIENTS = """
import sys
from phloem import Engine, SamplingParams

with Engine.from_yaml(sys.argv[1]) as engine:
    system = engine.tokenizer.encode("You are a tree.<|im_end|>")
    for client in ("a", "a", "b"):
        prompt = [*system, 7, 8, 9, 10, 11]
        result = engine.generate(prompt, SamplingParams(max_tokens=2), routing_key=client)
        print(result.usage.cached_tokens - len(system))
    engine.check()
"""


def test_clients_share_the_system_prompt_only(
    installed: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    config = tmp_path / "private.yaml"
    config.write_text(
        f"model: {tiny_model('llama')}\n"
        "cache: {tokens: 512, key: private-tail}\n"
        "engine: {threads: 1, check: true}\n"
    )
    env = {"PATH": "", "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CLIENTS, str(config)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.splitlines()[1:]] == [4, 0], "the first request finds nothing"


def test_plain_files_beside_the_configuration(tmp_path: Path) -> None:
    for name in NAMES:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text((EXAMPLES / name / f"{module}.py").read_text())
    config = tmp_path / "local.yaml"
    config.write_text(
        "schedule: {use: ./phloem_short_first.py:ShortFirst, patience: 7}\n"
        "cache: {eviction: ./phloem_lfuda.py:Lfuda}\n"
        "observers: [./phloem_slowlog.py:Slowlog]\n"
    )
    result, log = run(config, None)
    assert (result["patience"], result["key"]) == (7, 105.0)
    assert result["use"][-1] == f"{tmp_path}/phloem_slowlog.py:Slowlog"
    assert "step 1 took" in log
