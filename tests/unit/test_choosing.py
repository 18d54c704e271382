"""Choices: joint tokenisation with the text before them, and the three ways to choose."""

from __future__ import annotations

import math
import random

import pytest
import support
from gguf_files import write_sentencepiece

from phloem.choosing import LONG_TAIL, METHODS, bare_calls, choose, encode_after, join, unconditional
from phloem.errors import RequestError
from phloem.plugins.model._source import open_source
from phloem.plugins.model._source.gguf_file import GgufFile
from phloem.plugins.model._source.gguf_tokenizer import tokenizer_from_gguf
from phloem.tokenizer import Tokenizer

MEAN, GREEDY, UNCONDITIONAL = METHODS
WORDS = ["The sugar", " a leaf", " makes", "travels", "\n", "\n\n", " 你好", "é", "  ", "1", ". ", "<|im_end|>", "ing"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(open_source(support.real_path("smollm2-135m")).tokenizer())


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary that marks the beginning of a text with a space of its own."""
    file = write_sentencepiece(tmp_path_factory.mktemp("marked") / "model.gguf", arch="llama")
    return Tokenizer(tokenizer_from_gguf(GgufFile(file)))


def bytes_of(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, tokens))


def test_a_continued_text_is_whole_and_leaves_what_was_before(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    same = 0
    for _ in range(300):
        parts = ["".join(rng.choices(WORDS, k=rng.randint(1, 5))) for _ in range(2)]
        before = tokenizer.encode(parts[0])
        after = encode_after(tokenizer, before, parts[1])
        assert bytes_of(tokenizer, before + after) == "".join(parts).encode()
        same += before + after == tokenizer.encode("".join(parts))
    assert same > 150  # where nothing merges across, as the model would see it


def test_a_continued_text_gets_no_beginning_of_its_own(marked: Tokenizer) -> None:
    before = marked.encode("hello")
    assert bytes_of(marked, marked.encode("world", add_special=False)) == b" world"
    after = encode_after(marked, before, "world")
    assert bytes_of(marked, after) == b"world"
    assert bytes_of(marked, encode_after(marked, before, " world")) == b" world"


def test_the_beginning_has_the_special_tokens_of_one(marked: Tokenizer) -> None:
    assert encode_after(marked, [], "hello") == marked.encode("hello")
    assert encode_after(marked, marked.encode("hello"), "") == []


def test_choices_are_scored_whole(tokenizer: Tokenizer) -> None:
    """Also where they begin alike: what they share is a part of them."""
    joint = join(tokenizer, [], "The capital is", [" New York", " New Delhi", " New"])
    assert joint.prompt == tokenizer.encode("The capital is")
    assert [tokenizer.decode(tokens) for tokens in joint.continuations] == [" New York", " New Delhi", " New"]


@pytest.mark.parametrize("choices", [["travels", "s", ""], ["ing", "é"], ["你好", "好", "🙂"], ["\n", "\n\n", "a"]])
@pytest.mark.parametrize("tail", ["The sugar mak", "A leaf ", "x\n", "a 你", "is 1"])
def test_a_choice_that_merges_with_the_text_is_scored_as_the_model_sees_it(
    tokenizer: Tokenizer, tail: str, choices: list[str]
) -> None:
    joint = join(tokenizer, [], tail, choices)
    for choice, tokens in zip(choices, joint.continuations, strict=True):
        assert tokens
        assert joint.prompt + tokens == tokenizer.encode(tail + choice)


def test_tokens_before_stay(tokenizer: Tokenizer) -> None:
    before = tokenizer.encode("The sugar mak")
    joint = join(tokenizer, before, "", ["es", "ing"])
    assert joint.prompt == before
    assert [bytes_of(tokenizer, tokens) for tokens in joint.continuations] == [b"es", b"ing"]


def test_an_empty_choice_takes_the_token_before(tokenizer: Tokenizer) -> None:
    before = tokenizer.encode("One two")
    joint = join(tokenizer, before, "", ["", " three"])
    assert joint.prompt == before[:-1]
    assert joint.continuations == [before[-1:], [before[-1], *tokenizer.encode(" three")]]


def test_a_long_text_is_joined_like_a_short_one(tokenizer: Tokenizer) -> None:
    tail = "A tree of tokens grows the same way: one root, many branches.\n" * 40 + "Answer: mak"
    assert len(tail) > LONG_TAIL
    joint = join(tokenizer, [], tail, ["ing", "es", " up"])
    for choice, tokens in zip(["ing", "es", " up"], joint.continuations, strict=True):
        assert joint.prompt + tokens == tokenizer.encode(tail + choice)


@pytest.mark.parametrize("choices", [[], ["a"]])
def test_nothing_to_choose_from_and_nothing_before_is_refused(tokenizer: Tokenizer, choices: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        join(tokenizer, [], "", choices)
    assert error.value.param == "choices"


def test_mean() -> None:
    assert choose(MEAN, [[-1.0, -3.0], [-1.5], [-1.5]]).index == 1
    assert choose(MEAN, [[-1.0, -3.0], [-1.5]]).scores == [-2.0, -1.5]
    assert choose(MEAN, [[-math.inf], [-9.0]]).index == 1


def test_greedy_follows_the_best_token() -> None:
    assert choose(GREEDY, [[-0.1, -9.0], [-0.2, -0.1]]).index == 0
    assert choose(GREEDY, [[-0.1, -9.0], [-0.1, -0.1], [-5.0]]).index == 1


def test_greedy_extends_a_prefix_by_its_own_mean() -> None:
    """` New` beside ` New York`: the longer one wins if its further tokens are likelier than the shorter one's mean."""
    assert choose(GREEDY, [[-0.5], [-0.5, -0.1]]).index == 1
    assert choose(GREEDY, [[-0.5], [-0.5, -0.9]]).index == 0
    assert choose(GREEDY, [[-0.5], [-0.5]]).index == 0


def test_unconditional_likelihood_is_taken_off() -> None:
    conditional = [[-1.0, -1.0], [-1.2, -1.2]]
    assert choose(MEAN, conditional).index == 0
    decided = choose(UNCONDITIONAL, conditional, [[0.0, -0.5], [0.0, -2.0]])
    assert decided.index == 1
    assert decided.scores == pytest.approx([-0.75, -0.2])


def test_the_calls_without_a_prompt() -> None:
    continuations = [[5, 6, 7], [8], [5, 9], [10, 11]]
    calls = bare_calls(continuations)
    assert [(call.prompt, call.score, call.members) for call in calls] == [
        ([5], [[6, 7], [9]], [0, 2]),
        ([10], [[11]], [3]),
    ]
    scores = unconditional(continuations, calls, [[[-1.0, -2.0], [-3.0]], [[-4.0]]])
    assert scores == [[0.0, -1.0, -2.0], [0.0], [0.0, -3.0], [0.0, -4.0]]
    assert bare_calls([[1], [2]]) == []


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(RequestError, match="token_length_normalized") as error:
        choose("best", [[-1.0]])
    assert error.value.param == "method"
