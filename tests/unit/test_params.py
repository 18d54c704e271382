"""Sampling parameters: every wrong value is refused with the parameter's name and what it should have been."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phloem.errors import RequestError
from phloem.params import SamplingParams


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -0.1}, "must be in [0, 100], got -0.1"),
        ({"temperature": math.nan}, "must be a finite number, got nan"),
        ({"temperature": "1"}, "must be a finite number, got '1'"),
        ({"temperature": True}, "must be a finite number, got True"),
        ({"top_p": 0.0}, "must be in (0, 1], got 0.0"),
        ({"min_p": 1.5}, "must be in [0, 1]"),
        ({"frequency_penalty": 2.1}, "must be in [-2, 2]"),
        ({"presence_penalty": -math.inf}, "must be a finite number"),
        ({"repetition_penalty": 0}, "must be in (0, 10]"),
        ({"max_tokens": 0}, "must be at least 1, got 0"),
        ({"max_tokens": 1.0}, "must be an integer, got 1.0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 exceeds max_tokens 4"),
        ({"top_k": -2}, "must be at least -1"),
        ({"n": 0}, "must be between 1 and 128"),
        ({"n": None}, "must be an integer, got None"),
        ({"logprobs": 129}, "must be between 0 and 128"),
        ({"logprobs": True}, "must be an integer"),
        ({"prompt_logprobs": -1}, "must be between 0 and 128"),
        ({"logprobs_mode": "cooked"}, "must be raw or processed"),
        ({"seed": 2**64}, "must fit in 64 bits"),
        ({"stop": "end"}, "must be a list of strings"),
        ({"stop": [""]}, "must not contain an empty string"),
        ({"stop": ["x"] * 65}, "has 65 entries, at most 64"),
        ({"stop_regex": [5]}, "must be a list of strings"),
        ({"stop_token_ids": 5}, "Expected `array`, got `int`"),
        ({"stop_token_ids": [-1]}, "must be non-negative integers"),
        ({"include_stop": 1}, "Expected `bool`, got `int`"),
        ({"ignore_eos": "yes"}, "Expected `bool`, got `str`"),
        ({"skip_special_tokens": None}, "Expected `bool`, got `null`"),
        ({"logit_bias": [5]}, "Expected `object | null`, got `array`"),
        ({"logit_bias": {"5": 1.0}}, "Expected `int`, got `str` - at `key`"),
        ({"logit_bias": {True: 1.0}}, "Expected `int`, got `bool` - at `key`"),
        ({"logit_bias": {5: math.nan}}, "of token 5 must be in [-100, 100], got nan"),
        ({"regex": 5}, "Expected `str | null`, got `int`"),
        ({"ebnf": ["root"]}, "Expected `str | null`"),
        ({"json_schema": 5}, "got `int`"),
        ({"choices": "yes"}, "Expected `array | null`, got `str`"),
        ({"choices": [5]}, "Expected `str`, got `int` - at `$[0]`"),
        ({"choices": []}, "must be a non-empty list"),
        ({"logits_processors": ["x"]}, "Expected `object | null`, got `array`"),
        ({"logits_processors": {"x": 5}}, "Expected `object`, got `int`"),
    ],
)
def test_a_wrong_value_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    name = next(iter(given))
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert words in caught.value.message
    assert caught.value.message.startswith(name)
    assert caught.value.param == name
    assert caught.value.status == 400


def test_two_constraints_are_one_too_many() -> None:
    with pytest.raises(RequestError, match="json_schema and regex are given together"):
        SamplingParams(json_schema={}, regex="a")


def test_edges_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1.0, n=128, seed=-(2**63), logprobs=0, stop=["x"] * 64)
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy
