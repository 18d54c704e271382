"""Every program of examples/lang on the default model, one engine for all: the shape of what it returns.

What a model of this size says is not judged; what a constraint, a choice or the program's structure promises is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import phloem.lang as pl
from phloem import Engine

FOLDER = Path(__file__).parents[2] / "examples" / "lang"
FEW = 6  # tokens of a free generation
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def engine(smollm2_path: str) -> Iterator[Engine]:
    """The default backend of all examples."""
    with Engine(smollm2_path, engine={"check": True, "threads": 1}, cache={"tokens": 8192}) as made:
        pl.set_default_backend(made)
        yield made
        pl.set_default_backend(None)
        groups = made.stats()["groups"]
        assert all(group["protected"] == group["leased"] == 0 for group in groups), "an example left something locked"


@pytest.fixture
def example(engine: Engine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example that the test is named after: test_x is about x.py."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.node.name.removeprefix("test_"))


def test_multi_turn(example: ModuleType) -> None:
    messages = example.main(max_tokens=FEW)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert all(message["content"] for message in messages)


def test_few_shot(example: ModuleType, engine: Engine) -> None:
    before = engine.stats()
    rows = example.main(max_tokens=FEW)
    after = engine.stats()
    assert [plant for plant, _, _ in rows] == example.PLANTS
    assert {kind for _, kind, _ in rows} <= {"a tree", "a shrub", "an herb"}
    assert all("\n" not in fruit for _, _, fruit in rows)
    prompt = len(
        engine.tokenizer.encode("".join(f"Plant: {a}\nKind: {b}\nBears: {c}\n\n" for a, b, c in example.EXAMPLES))
    )
    ran = after["prefill_tokens"] - before["prefill_tokens"]
    assert prompt <= ran < 2 * prompt, "the examples of the prompt are computed once for all plants"


def test_react_tools(example: ModuleType) -> None:
    text, actions = example.main(max_tokens=FEW, steps=3)
    assert 1 <= len(actions) <= 3
    for action in actions:
        tool, _, argument = action.removeprefix("Action: ").removesuffix("]").partition("[")
        if tool == "height":
            assert f"{action}\nObservation: {example.HEIGHTS[argument]}\n" in text
        elif tool == "calculate":
            assert f"{action}\nObservation: {example.calculate(argument)}\n" in text
        else:
            assert tool == "finish"
            assert argument.isdigit()
            assert action == actions[-1]


def test_tree_of_thought(example: ModuleType) -> None:
    plans = example.main(max_tokens=FEW, depth=2, branches=3, keep=2)
    assert len(plans) == 2
    for last, text in plans:
        assert text.startswith(f"Task: {example.TASK}\n")
        assert text.count("Step 1:") == text.count("Step 2:") == 1
        assert f"Step 2:{last}.\n" in text
        assert "How useful" not in text


def test_skeleton_of_thought(example: ModuleType) -> None:
    points = example.main(max_tokens=FEW)
    assert len(points) == example.POINTS
    assert all(point[:1].isupper() and text for point, text in points)


def test_llm_judge(example: ModuleType) -> None:
    lines, grade = example.main(max_tokens=FEW)
    assert [line.partition(":")[0] for line in lines] == list(example.DIMENSIONS)
    assert grade in example.GRADES


def test_json_extraction(example: ModuleType) -> None:
    trees = example.main()
    assert len(trees) == len(example.NOTES)
    assert all(isinstance(tree, example.Tree) for tree in trees)


def test_self_consistency(example: ModuleType) -> None:
    winner, answers = example.main(max_tokens=FEW, chains=4)
    assert len(answers) == 4
    assert all(answer.isdigit() for answer in answers)
    assert answers.count(winner) == max(map(answers.count, answers))


def test_generative_agents(example: ModuleType) -> None:
    agents = example.main(max_tokens=FEW)
    assert [agent.name for agent in agents] == ["Ada", "Ben", "Cleo"]
    for agent in agents:
        assert len(agent.log) == len(example.EVENTS)
        assert all(1 <= weight <= 9 and action in example.ACTIONS for weight, action in agent.log)
        assert [event in agent.memory for event in example.EVENTS] == [True, True]
        assert "How much" not in agent.memory


def test_rag_pipeline(example: ModuleType) -> None:
    found: dict[str, Any] = example.main(max_tokens=FEW, passages=3)
    assert len(set(found["found"])) == 3
    assert found["source"] in found["found"]
    assert "\n" not in found["answer"]
    assert example.retrieve("growth rings in wood", 1) == ["growth rings"]


def test_character_sheet(example: ModuleType) -> None:
    sheet = example.main()
    assert list(sheet) == ["name", "folk", "trade", "strength", "wisdom", "alive"]
    assert sheet["folk"] in ("dryad", "faun", "gnome", "human")
    assert 1 <= sheet["strength"] <= 9
    assert isinstance(sheet["alive"], bool)


def test_every_example_has_a_test() -> None:
    names = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    here = vars(sys.modules[__name__])
    assert names
    assert not [name for name in names if f"test_{name}" not in here]
    listed = (FOLDER / "README.md").read_text()
    assert not [name for name in names if f"[{name}]({name}.py)" not in listed]
    long = [path.name for path in FOLDER.glob("*.py") if path.read_text().count("\n") > 80]
    assert not long
