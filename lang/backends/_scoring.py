"""Selecting on servers that score no choices: by echoed prompts, or by what the model writes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from phloem.choosing import METHODS, choose
from phloem.errors import RequestError

from ._answers import Echoed
from .base import Generation, Selection

Echo = Callable[[list[str]], Awaitable[list[Echoed] | None]]


async def scored_by_echo(
    echo: Echo, text: str, choices: Sequence[str], method: str, temperature: float
) -> Selection | None:
    """Score text + choice for every choice, each tokenised as a whole; None where the server does not echo.

    One request, whose prompts share what the server's cache shares. `unconditional_likelihood_normalized` takes a
    second one, of the choices alone. Raises RequestError where a choice alone is cut into other tokens.
    """
    texts = [text, *(text + choice for choice in choices)]
    found = await echo(texts)
    if found is None:
        return None
    tokens = [one.tokens for one in found]
    same = min(*(agreement(tokens[0], one) for one in tokens[1:]), min(map(len, tokens[1:])) - 1)
    if same < 1:
        raise RequestError("no token comes before the choices", hint="append some text first", param="choices")
    scores = [one.values[same:] for one in found[1:]]
    bare = None
    if method == METHODS[2]:
        alone = [whole[one.offsets[same] :] for whole, one in zip(texts[1:], found[1:], strict=True)]
        bare = await _bare(echo, alone, [one[same:] for one in tokens[1:]])
        if bare is None:
            return None
    chosen = choose(method, scores, bare)
    index = chosen.drawn(temperature)
    return Selection(index, choices[index], chosen.scores, scores, {"method": method})


def agreement(one: Sequence[str], other: Sequence[str]) -> int:
    """How many elements (characters, tokens) two sequences have in common from their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


async def _bare(echo: Echo, alone: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]] | None:
    """Log-probabilities of the choices' tokens without the prompt; a first token counts 0."""
    found = await echo(list(alone))
    if found is None:
        return None
    rows = []
    for text, tokens, one in zip(alone, continuations, found, strict=True):
        if one.tokens[-len(tokens) :] != list(tokens):
            raise RequestError(
                f"choice {text!r} alone is cut into other tokens, so it cannot be scored without the prompt",
                hint="take another choices_method, or RuntimeEndpoint",
                param="choices_method",
            )
        rows.append([0.0, *one.values[-len(tokens) :][1:]])
    return rows


def greedy_match(made: Generation, choices: Sequence[str]) -> Selection:
    """The choice that agrees longest with what the model wrote at temperature 0; the first of equals.

    SGLang's way on OpenAI's servers, on text instead of tokens. Scores are characters in agreement. Raises
    RequestError where the model wrote none of the choices' beginnings.
    """
    written = made.texts[0]
    agree = [agreement(written, choice) for choice in choices]
    if not any(agree):  # blanks before the answer do not tell choices apart
        agree = [agreement(written.lstrip(), choice.lstrip()) for choice in choices]
    index = max(range(len(choices)), key=lambda i: (agree[i], -len(choices[i])))
    if not agree[index]:
        raise RequestError(
            f"the model wrote {written[:60]!r}, with which none of the choices begins",
            hint="ask so that it answers with a choice at once, or use a server that scores choices",
            param="choices",
        )
    meta = {**(made.meta[0] if made.meta else {}), "method": "greedy_matching"}
    return Selection(index, choices[index], [float(n) for n in agree], [[] for _ in choices], meta)
