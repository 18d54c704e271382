"""What a program writes: names, positions and defaults of SGLang's frontend, and what is refused, at its own line."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
from pydantic import BaseModel

import phloem.lang as pl
from phloem.errors import RequestError
from phloem.lang import ir
from phloem.lang.sampling import TYPES


def test_gen_keeps_what_was_given_under_phloems_names() -> None:
    made = pl.gen("x", 9, 1, 2, "end", [5], "a+", 0.5, 0.9, 3, 0.1, 0.2, 0.3, True)
    assert isinstance(made, ir.Gen)
    assert made.name == "x"
    assert made.given == {
        "max_tokens": 9,
        "min_tokens": 1,
        "n": 2,
        "stop": ["end"],
        "stop_token_ids": [5],
        "stop_regex": ["a+"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "ignore_eos": True,
    }


def test_every_sampling_parameter_can_be_given() -> None:
    made = pl.gen("x", seed=1, lark="start: /a/", think_end="</think>", repetition_penalty=1.1, logit_bias={3: 1.0})
    assert isinstance(made, ir.Gen)
    assert set(made.given) == {"seed", "lark", "think_end", "repetition_penalty", "logit_bias"}


def test_backends_are_classes_that_can_annotate() -> None:
    for made in (pl.Engine, pl.Runtime, pl.RuntimeEndpoint, pl.OpenAI):
        assert isinstance(made, type)
        assert callable(made.start)  # type: ignore[attr-defined]


def test_a_schema_may_be_a_class_of_pydantics() -> None:
    class Tree(BaseModel):
        height: int

    expected = Tree.model_json_schema()
    made = pl.gen("x", json_schema=Tree)
    assert isinstance(made, ir.Gen)
    assert made.given == {"json_schema": expected}
    with pytest.raises(RequestError, match="no schema of its own") as caught:
        pl.gen("x", json_schema=dict)
    assert "TypeAdapter" in str(caught.value)


def test_logprobs() -> None:
    made = pl.gen("x", return_logprob=True, top_logprobs_num=2, logprob_start_len=4, return_text_in_logprobs=True)
    assert isinstance(made, ir.Gen)
    assert made.given == {"logprobs": 2, "prompt_logprobs": 2}
    assert made.logprob_start == 4
    assert pl.gen("x", return_logprob=False, top_logprobs_num=2) == pl.gen("x")


def test_gen_int_and_gen_string_are_typed() -> None:
    for made, dtype in (
        (pl.gen_int("x", 4), "int"),
        (pl.gen_string("x", stop="z"), "str"),
        (pl.gen(dtype=bool), "bool"),
    ):
        assert isinstance(made, ir.Gen)
        assert made.dtype == dtype
        assert dtype in TYPES
    assert pl.gen_int("x", 4, 2, ["."]) == pl.gen("x", 4, n=2, stop=["."], dtype=int)


def test_choices_make_a_select() -> None:
    assert pl.gen("x", choices=["a", "b"]) == pl.select("x", ["a", "b"])
    made = pl.gen("x", choices=["a"], choices_method=pl.greedy_token_selection, temperature=0.5)
    assert made == pl.select("x", ["a"], 0.5, pl.greedy_token_selection)
    assert isinstance(made, ir.Select)
    assert made.method == "greedy_token_selection"


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: pl.gen("x", max_token=3), "(?s)max_token'.*did you mean 'max_tokens'"),
        (lambda: pl.gen("x", temperature=-1), "temperature"),
        (lambda: pl.gen("x", regex="("), "regex"),
        (lambda: pl.gen("x", dtype=list), "dtype 'list'"),
        (lambda: pl.gen("x", regex="a", ebnf='root ::= "a"'), "given together"),
        (lambda: pl.gen("x", dtype=int, regex="a"), "dtype and regex"),
        (lambda: pl.gen("x", choices=["a"], regex="a"), "regex and choices"),
        (lambda: pl.gen("x", choices_method="greedy_token_selection"), "needs choices"),
        (lambda: pl.gen(3), "name"),  # type: ignore[arg-type]
        (lambda: pl.select("x", []), "at least one"),
        (lambda: pl.select("x", "ab"), "list of texts"),
        (lambda: pl.select("x", ["a", ""]), r"choices\[1\] is ''"),
        (lambda: pl.select("x", ["a"], choices_method="best"), "choices_method 'best'"),
        (lambda: pl.select("x", ["a"], temperature=-1), "temperature"),
        (lambda: pl.function(num_api_spec_tokens=3), "num_api_spec_tokens"),
        (lambda: pl.function(lambda: None), "first argument"),
    ],
)
def test_what_is_wrong_is_said_where_it_is_written(make: Any, names: str) -> None:
    with pytest.raises(RequestError, match=names):
        make()


def test_roles_are_lists_of_a_beginning_and_an_end() -> None:
    whole = pl.user("a" + pl.gen("x") + 3)
    assert [part.kind for part in whole.parts()] == ["role_begin", "constant", "gen", "constant", "role_end"]
    assert pl.system() == pl.system_begin() + pl.system_end()
    assert pl.assistant("x") == pl.assistant_begin() + "x" + pl.assistant_end()
    assert pl.user_begin() + pl.user_end() == pl.user()
    with pytest.raises(TypeError, match="cannot append list"):
        pl.user(["a"])  # type: ignore[arg-type]


def test_media_and_reasoning_are_expressions() -> None:
    assert pl.image("a.png").kind == pl.video("a.mp4", 4).kind == "media"
    made = pl.separate_reasoning(pl.gen("x") + "y", model_type="qwen3")
    assert isinstance(made, ir.SeparateReasoning)
    assert made.parser == "qwen3"
    assert [part.kind for part in made.inner] == ["gen", "constant"]


def test_programs_bind_and_tell_their_arguments() -> None:
    @pl.function
    def program(s: Any, a: int, *, b: int = 2) -> None:
        """What it does."""

    assert program.arg_names == ["a", "b"]
    assert program.__name__ == "program"
    assert program.__doc__ == "What it does."
    assert program.bind(a=1).bind(b=3).bound == {"a": 1, "b": 3}
    with pytest.raises(RequestError, match="no argument 'c'"):
        program.bind(c=1)
    assert isinstance(pl.function()(program.func), pl.Program)


@pl.function
def of_module(s: Any, a: int, b: int = 2) -> None:
    """A program that can be found by its name."""


def test_programs_look_like_their_functions_and_travel_to_other_processes() -> None:
    assert str(inspect.signature(of_module)) == "(s: 'Any', a: 'int', b: 'int' = 2) -> 'None'"
    assert of_module.__module__ == __name__
    assert pickle.loads(pickle.dumps(of_module)) is of_module
    bound = pickle.loads(pickle.dumps(of_module.bind(a=1).bind(b=3)))
    assert (bound.func, bound.bound) == (of_module.func, {"a": 1, "b": 3})
    assert copy.deepcopy(of_module) is of_module
    assert pl.function(functools.partial(of_module.func, b=1)).__name__ == "program"


def test_signatures_are_sglangs() -> None:
    """Positions and defaults that programs rely on."""
    positions = list(inspect.signature(pl.gen).parameters)
    assert positions[:6] == ["name", "max_tokens", "min_tokens", "n", "stop", "stop_token_ids"]
    assert positions[19:23] == ["choices", "choices_method", "regex", "json_schema"]
    assert list(inspect.signature(pl.select).parameters) == ["name", "choices", "temperature", "choices_method"]
    assert list(inspect.signature(pl.State.fork).parameters)[1:] == ["size", "position_ids_offset"]
    assert list(inspect.signature(pl.State.text_async_iter).parameters)[1:] == ["var_name", "return_meta_data"]
    assert list(inspect.signature(pl.StateGroup.join).parameters)[1:] == ["mode"]


def test_expressions_refuse_none() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        pl.gen("x") + None  # type: ignore[operator]
