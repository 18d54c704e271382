"""The drafter `grammar`: how forced text is cut, what is held back, what is remembered, and that outputs stay exact."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import pytest
import sampling_rig as rig
import torch
from drafting_rig import END, Vocabulary, ask

from phloem.drafts import Draft
from phloem.params import SamplingParams
from phloem.plugins.spec._memory import Memory
from phloem.plugins.spec._words import Words
from phloem.request import Request
from phloem.verifier import walk

torch.set_num_threads(1)
LETTERS = tuple("abcdefgh")


def words(vocabulary: Vocabulary) -> Words:
    return Words(vocabulary.tokenizer, vocabulary.spec)


def spelled(vocabulary: Vocabulary, before: str, text: str) -> list[str]:
    """Pieces of a text after one other piece."""
    cut = words(vocabulary).cut(tuple(vocabulary.ids(before)), text.encode())
    return [vocabulary.pieces[token] for token in cut]


# --- how a text is cut


def test_forced_text_is_cut_with_what_stands_before() -> None:
    """A tokenizer that puts a space before every text, as SentencePiece does: alone, `abcde` would begin with it."""
    space = {"type": "Prepend", "prepend": "\u2581"}
    vocabulary = Vocabulary(*LETTERS, "\u2581", "\u2581a", "\u2581h", "abc", "de", "\u2581abcde", normalizer=space)
    assert vocabulary.tokenizer.encode("abcde") == vocabulary.ids("\u2581abcde")
    assert spelled(vocabulary, "h", "abcde") == ["abc", "de"]


def test_a_written_token_is_never_taken_back() -> None:
    """`}` was written and `,` is forced, where the tokenizer has `},`: the longest match goes on from what is there."""
    vocabulary = Vocabulary("}", ",", " ", '"', "},", ' "', ', "', "a")
    assert spelled(vocabulary, "}", ', "a') == [', "', "a"]
    assert spelled(vocabulary, "a", '},"') == ["},", '"']


@pytest.mark.parametrize(
    ("text", "cut"),
    [("né世", ["n", "é", "世"]), ("🙂n", ["🙂", "n"]), ("n世é", ["n", "世é"])],
)
def test_characters_of_many_bytes(text: str, cut: list[str]) -> None:
    assert spelled(Vocabulary("n", "é", "世", "🙂", "世é"), "n", text) == cut


def test_half_a_character_is_not_spelled() -> None:
    """The rest of it is not known: `\\xc3` begins `é` and `è`."""
    vocabulary = Vocabulary("n", "é", "è")
    assert words(vocabulary).cut((1,), "né".encode()[:2]) == tuple(vocabulary.ids("n"))
    assert words(vocabulary).cut((1,), b"\xc3") == ()
    assert words(vocabulary).cut((1,), "é".encode()[1:]) == ()  # nor the second half without the first


@pytest.mark.parametrize("normalizer", [{"type": "Lowercase"}, {"type": "NFKC"}])
def test_a_tokenizer_that_normalises(normalizer: dict[str, Any]) -> None:
    """decode(encode(x)) is not x: the bytes are forced, so the longest match spells them."""
    vocabulary = Vocabulary("N", "a", "m", "n", "na", "Na", "f", "i", "\ufb01", normalizer=normalizer)
    assert spelled(vocabulary, "a", "Nam\ufb01") == ["Na", "m", "\ufb01"]
    assert spelled(vocabulary, "a", "nam") == ["na", "m"]


def test_a_special_token_spelled_out_is_text() -> None:
    vocabulary = Vocabulary("<", "end", ">", "a", "<end")
    assert spelled(vocabulary, "a", "<end>") == ["<end", ">"]


def test_what_no_token_spells_is_left() -> None:
    assert spelled(Vocabulary("a", "b"), "a", "abxab") == ["a", "b"]


# --- what is proposed


def test_forced_text_is_proposed_as_a_chain_and_the_matcher_stays() -> None:
    vocabulary = Vocabulary(*LETTERS, "abc", "de")
    matcher = vocabulary.matcher("aabcde[fg]h", "a")
    draft = ask(vocabulary.drafter(), matcher, vocabulary.ids("h", "a"))
    assert draft == Draft.chain(vocabulary.ids("abc", "de"))
    assert matcher.forced() == b"abcde"


class Long:
    """A matcher of one text that is long."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self.pieces, self.text = [piece.encode() for piece in vocabulary.pieces], text.encode()
        self.ends = [0]

    def forced(self) -> bytes:
        return self.text[self.ends[-1] :]

    def accept(self, token: int) -> bool:
        end = self.ends[-1] + len(self.pieces[token])
        fits = self.text[self.ends[-1] : end] == self.pieces[token]
        self.ends += [end] * fits
        return fits

    def rollback(self, tokens: int) -> None:
        del self.ends[len(self.ends) - tokens :]


@pytest.mark.parametrize("text", ["abc de", "ab", "éab", "世é "])
def test_of_a_long_forced_text_only_what_there_is_room_for_is_cut(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary(*LETTERS, " ", "abc", " de", "é", "世", "世é", "éab")
    whole = text * 300_000
    wanted = vocabulary.tokenizer.encode(text * 20)[:16]
    lengths = []
    encode = vocabulary.tokenizer.encode

    def counted(text: str, **more: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **more)

    drafter = vocabulary.drafter()
    monkeypatch.setattr(vocabulary.tokenizer, "encode", counted)
    matcher = Long(vocabulary, whole)
    draft = ask(drafter, matcher, vocabulary.ids("h", "a"))  # type: ignore[arg-type]
    assert draft == Draft.chain(wanted)
    assert max(lengths) < 200
    assert matcher.ends == [0]


def test_nothing_without_a_grammar_or_without_forced_text() -> None:
    vocabulary = Vocabulary(*LETTERS)
    assert ask(vocabulary.drafter(), None, [1]) is None
    assert ask(vocabulary.drafter(), vocabulary.matcher("[ab]c?"), [1]) is None


def test_budget_and_option_bound_the_chain() -> None:
    vocabulary = Vocabulary(*LETTERS)
    matcher = vocabulary.matcher("abcdefgh[ab]")
    assert ask(vocabulary.drafter(), matcher, [1], 3) == Draft.chain(vocabulary.ids("a", "b", "c"))
    assert ask(vocabulary.drafter(max_tokens=2), matcher, [1]) == Draft.chain(vocabulary.ids("a", "b"))
    assert matcher.forced() == b"abcdefgh"


def test_a_token_that_alone_is_allowed_is_certain_though_no_byte_is_forced() -> None:
    """Of `ab` and `cd` the vocabulary can spell one, by one token; behind it text is forced again."""
    vocabulary = Vocabulary("ab", "c", "e", "f")
    matcher = vocabulary.matcher("(ab|xd)e[cf]")
    assert ask(vocabulary.drafter(), matcher, vocabulary.ids("f")) == Draft.chain(vocabulary.ids("ab", "e"))


def test_an_end_is_never_proposed() -> None:
    vocabulary = Vocabulary(*LETTERS)
    assert ask(vocabulary.drafter(), vocabulary.matcher("ab"), [1]) == Draft.chain(vocabulary.ids("a", "b"))
    assert ask(vocabulary.drafter(), vocabulary.matcher("ab", "a", "b"), [1, 1, 2]) is None


NAMES = Vocabulary('{"', "order", "orderId", "Id", "Name", '":', " ", "1", "2", "{", '"', *"orderIdNm")
KEYS = r'\{"(orderId|orderName)": [12]'


def test_the_edge_is_held_back_while_a_longer_token_may_stand_there() -> None:
    """After `{"` the bytes `order` are forced, but the model writes `orderId` as one token."""
    assert ask(NAMES.drafter(), NAMES.matcher(KEYS), NAMES.ids("1")) == Draft.chain(NAMES.ids('{"'))
    other = Vocabulary(*(piece for piece in NAMES.pieces[1:] if piece != "orderId"))
    drafted = ask(other.drafter(), other.matcher(KEYS), other.ids("1"))
    assert drafted == Draft.chain(other.ids('{"', "order"))
    only = r'\{"(orderName|orderNone)": [12]'  # the vocabulary has orderId, the grammar does not
    drafted = ask(NAMES.drafter(), NAMES.matcher(only), NAMES.ids("1"))
    assert drafted is not None
    assert drafted.tokens[:2] == tuple(NAMES.ids('{"', "order"))


def test_a_token_that_begins_inside_the_last_one_holds_it_back() -> None:
    """`ab` is forced and `bc` may follow `a`: the cut `ab` is not certain."""
    vocabulary = Vocabulary("a", "b", "c", "d", "ab", "bc")
    assert ask(vocabulary.drafter(), vocabulary.matcher("dab[cd]", "d"), vocabulary.ids("c", "d")) is None
    drafted = ask(vocabulary.drafter(), vocabulary.matcher("dab[da]", "d"), vocabulary.ids("c", "d"))
    assert drafted == Draft.chain(vocabulary.ids("ab"))


# --- what is remembered


def test_the_model_s_own_cut_is_remembered() -> None:
    vocabulary = Vocabulary("{", '"', '{"', "a", "b", "c")
    drafter, start = vocabulary.drafter(), vocabulary.matcher(r'\{"a[bc]')
    prompt = vocabulary.ids("c")
    assert ask(drafter, start, prompt) == Draft.chain(vocabulary.ids('{"', "a"))
    written = vocabulary.ids("{")  # what the model wrote instead
    assert ask(drafter, vocabulary.matcher(r'\{"a[bc]', "{"), prompt + written) == Draft.chain(vocabulary.ids('"', "a"))
    drafter.forget("a")
    assert ask(drafter, start, prompt, call="b") == Draft.chain(vocabulary.ids("{", '"', "a"))
    assert ask(drafter, start, prompt, call="c", salt="x") == Draft.chain(vocabulary.ids('{"', "a"))  # not another's


def test_the_edge_is_proposed_once_it_is_known() -> None:
    drafter, prompt = NAMES.drafter(), NAMES.ids("1")
    ask(drafter, NAMES.matcher(KEYS), prompt)
    ask(drafter, NAMES.matcher(KEYS, '{"', "orderId"), prompt + NAMES.ids('{"', "orderId"))
    drafted = ask(drafter, NAMES.matcher(KEYS), prompt, call="b")
    assert drafted == Draft.chain(NAMES.ids('{"', "orderId", '":', " "))


CHOICE = Vocabulary("a", "b", "c", "d", "x", "y", "z", *(chr(0x400 + i) for i in range(50)))


def test_a_choice_is_guessed_as_it_was_made_before_in_any_text() -> None:
    pattern = "a(x|y)bcd[ab]"
    drafter, prompt = CHOICE.drafter(), CHOICE.ids("d")
    assert ask(drafter, CHOICE.matcher(pattern), prompt) == Draft.chain(CHOICE.ids("a"))
    ask(drafter, CHOICE.matcher(pattern, "a", "y"), prompt + CHOICE.ids("a", "y"))
    assert ask(drafter, CHOICE.matcher(pattern), prompt, call="b") == Draft.chain(CHOICE.ids(*"aybcd"))
    assert ask(drafter, CHOICE.matcher(pattern), prompt, call="b", salt="x") == Draft.chain(CHOICE.ids("a"))


def test_a_guess_that_no_forced_text_follows_is_not_made() -> None:
    drafter, prompt = CHOICE.drafter(), CHOICE.ids("d")
    ask(drafter, CHOICE.matcher("a(x|y)[cd]"), prompt)
    ask(drafter, CHOICE.matcher("a(x|y)[cd]", "a", "y"), prompt + CHOICE.ids("a", "y"))
    assert ask(drafter, CHOICE.matcher("a(x|y)[cd]"), prompt) == Draft.chain(CHOICE.ids("a"))


def test_free_text_is_remembered_for_its_own_request_only() -> None:
    free = "[a-dx\u0400-\u0440]*y(z[ab]|z[cd])"
    text = CHOICE.ids("d", "a", "b", "c")
    end = CHOICE.ids("y")
    drafter = CHOICE.drafter()
    assert ask(drafter, CHOICE.matcher(free, "a", "b", "c"), text) is None
    ask(drafter, CHOICE.matcher(free, "a", "b", "c", "y"), text + end)
    assert ask(drafter, CHOICE.matcher(free, "a", "b", "c"), text) == Draft.chain(CHOICE.ids("y", "z"))
    assert ask(drafter, CHOICE.matcher(free, "a", "b", "c"), text, call="b") is None


def test_memory_keeps_to_its_bound_and_to_the_majority() -> None:
    memory = Memory(2)
    for key in ((1,), (2,), (1,), (3,)):
        memory.recall(key)
        memory.learn(key, 7)
    assert len(memory) == 2
    assert memory.recall((2,)) is None
    memory.learn((1,), 8)
    assert memory.recall((1,)) == 7  # twice against once
    memory.learn((1,), 8)
    assert memory.recall((1,)) == 8


# --- canonical


def test_canonical_forces_what_is_forced_and_nothing_else() -> None:
    drafter, prompt = NAMES.drafter(forcing="canonical"), NAMES.ids("1")
    drafted = ask(drafter, NAMES.matcher(KEYS), prompt)
    assert drafted is not None
    assert (drafted.tokens, drafted.forced) == (tuple(NAMES.ids('{"')), 1)
    ask(drafter, NAMES.matcher(KEYS, '{"', "orderId"), prompt + NAMES.ids('{"', "orderId"))
    drafted = ask(drafter, NAMES.matcher(KEYS), prompt)  # the edge is known now: proposed, and asked about
    assert drafted is not None
    assert (drafted.tokens[:2], drafted.forced) == (tuple(NAMES.ids('{"', "orderId")), 1)
    assert ask(NAMES.drafter(), NAMES.matcher(KEYS), prompt) == Draft.chain(NAMES.ids('{"'))  # `verified` forces none


# --- exactness

TOY = Vocabulary(*rig.TEXTS[1:])
MODEL = rig.toy_model()


def distribution(pattern: str, params: SamplingParams, drafter: Any | None) -> dict[tuple[int, ...], float]:
    """Every output of at most 6 tokens with its probability: all joint draws of the nodes of every draft."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    accepted = 0

    def follow(output: list[int], mass: float) -> None:
        nonlocal accepted
        request = rig.make_request(params, (1,))
        assert request.matcher is not None
        assert all(request.matcher.accept(token) for token in output)
        request.tokens.extend(output)
        draft = ask(drafter, request.matcher, request.tokens, 5 - len(output), call=f"{output}") if drafter else None
        for emitted, nodes, share in draws(request, draft):
            accepted += nodes
            if len(output) + len(emitted) >= 6 or emitted[-1] == END:
                found[tuple(output + emitted)[:6]] += mass * share
            else:
                follow(output + emitted, mass * share)

    follow([], 1.0)
    assert (accepted > 0) == (drafter is not None)
    return found


def draws(request: Request, draft: Draft | None) -> list[tuple[list[int], int, float]]:
    """What one step may emit, how many nodes it accepts, and the probability: one draw per node, by the real walk."""
    rows = []
    for node in range(-1, len(draft or ())):
        path = [draft.tokens[i] for i in draft.path(node)] if draft is not None else []
        matcher = request.matcher.fork() if request.matcher is not None else None
        assert matcher is not None
        assert all(matcher.accept(token) for token in path)
        allowed = {token for token in range(rig.VOCAB) if matcher.fork().accept(token)}
        logits = MODEL([*request.tokens, *path])
        rows.append(rig.reference_probabilities(logits, request, path, allowed))
    out: dict[tuple[int, ...], tuple[int, float]] = {}
    stack: list[tuple[list[int], float]] = [([], 1.0)]
    while stack:
        samples, mass = stack.pop()
        if len(samples) < len(rows):
            stack += [([*samples, token], mass * p) for token, p in enumerate(rows[len(samples)]) if p]
            continue
        emitted, nodes = walk(draft, samples, request.stop_ids)
        before = out.get(tuple(emitted), (0, 0.0))[1]
        out[tuple(emitted)] = len(nodes), before + mass
    return [(list(emitted), nodes, mass) for emitted, (nodes, mass) in out.items()]


@pytest.mark.parametrize("pattern", ["abc(d|e)abc", "(a|b)cabc(e|d)", "(abcd|abce)(ab)?"])
@pytest.mark.parametrize("params", [{}, {"temperature": 2.0, "top_p": 0.8}, {"repetition_penalty": 1.5}])
def test_outputs_have_the_distribution_of_masked_decoding(pattern: str, params: dict[str, Any]) -> None:
    given = SamplingParams(regex=pattern, **params)
    plain, drafter = distribution(pattern, given, None), TOY.drafter()
    for _ in range(2):  # the second time with memories
        drafted = distribution(pattern, given, drafter)
        assert set(drafted) == set(plain)
        assert all(math.isclose(drafted[output], plain[output], abs_tol=1e-9) for output in plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", ["(a?b?c)+d", "(abc(d|e)){3}", "((ab|c|d)ae)+"])
def test_seeded_outputs_are_those_without_drafts(pattern: str, temperature: float) -> None:
    """Through the real sampler, many requests that share one drafter's memory."""
    params = SamplingParams(regex=pattern, temperature=temperature)
    drafter, calls = TOY.drafter(), 0

    def propose(request: Request) -> Draft | None:
        nonlocal calls
        calls += 1
        return ask(drafter, request.matcher, request.tokens, 8, call=f"{request.seed}")

    def requests() -> list[Request]:
        return [rig.make_request(params, (1,), seed=seed) for seed in range(30)]

    plain = rig.decode(MODEL, requests())
    assert rig.decode(MODEL, requests(), drafter=propose) == plain
    assert calls < sum(map(len, plain))


def test_random_texts_leave_the_matcher_as_found() -> None:
    rng = random.Random(4)
    drafter = TOY.drafter()
    for turn in range(60):
        request = rig.make_request(SamplingParams(regex="(a?b?c)+d(abc|e)"), (1,))
        assert request.matcher is not None
        while not request.matcher.is_complete():
            before = rig.fill_masks([rig.segment_of(request)])
            ask(drafter, request.matcher, request.tokens, rng.randint(1, 6), call=f"{turn}")
            after = rig.fill_masks([rig.segment_of(request)])
            assert before is not None
            assert after is not None
            assert torch.equal(before.bits, after.bits)
            token = rng.choice(before.tokens([0])[0].tolist())
            request.matcher.accept(token)
            request.tokens.append(token)
