"""Text of a growing output: no character torn, no stop leaked, whatever the tokens and however it is taken."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from phloem.errors import RequestError
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.request import Request
from phloem.text import MATCH_WINDOW, Detokenizer, StopFinder, TextStream
from phloem.writer import write

BROKEN = "\ufffd"
SPECIAL = ["<|end|>", "<|other|>"]
WORDS = [
    "hello",
    " world",
    "the",
    " a",
    "  ",
    "\n",
    "世界",
    "é",
    "👩‍👩‍👧",
    "don",
    "'t",
    " .",
    "STOP",
    "ab",
    "<",
    "/think>",
]


class Toy:
    """Any `tokenizers` backend as the decoder that TextStream wants, counting the tokens it is given."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id(self, piece: str) -> int:
        token = self.backend.token_to_id(piece)
        assert token is not None, piece
        return token


def byte_level() -> Toy:
    """GPT-2's kind: 256 byte tokens, and some longer ones that begin and end inside characters."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    spelled = [to_bytes(word.encode()) for word in WORDS]
    torn = [
        to_bytes(raw)
        for raw in (b"\x96\xe4", b"\x98\x80\xf0\x9f", b" \xe4\xb8", b"a\xf0", b"\x80b", b"\xb8\x96\xe4\xb8")
    ]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*sorted(alphabet), *spelled, *torn]))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Toy(backend)


def to_bytes(raw: bytes) -> str:
    """GPT-2's spelling of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in printable)}
    return "".join(table[byte] for byte in raw)


def byte_fallback() -> Toy:
    """SentencePiece's kind, as Llama's and Gemma's: `▁` for spaces, <0xE4> for bytes, a stripped leading space."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *(chr(i) for i in range(33, 127))]
    pieces += [word.replace(" ", "▁") for word in WORDS]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Toy(backend)


def wordpiece() -> Toy:
    """BERT's kind, whose decoder cleans up spaces before punctuation."""
    pieces = [
        "[UNK]",
        "hello",
        "##s",
        "world",
        ".",
        ",",
        "don",
        "'",
        "t",
        "n't",
        "!",
        "世",
        "##界",
        "ab",
        "##STOP",
        "é",
    ]
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Toy(backend)


def metaspace() -> Toy:
    """T5's kind: one leading space is dropped by the decoder itself."""
    pieces = ["<unk>", *(word.replace(" ", "▁") for word in WORDS), *(chr(i) for i in range(33, 127)), "▁"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in dict.fromkeys(pieces)], 0, False))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Toy(backend)


TOYS = {make.__name__: make() for make in (byte_level, byte_fallback, wordpiece, metaspace)}


def byte_ids(toy: str, text: str) -> list[int]:
    """The text in byte tokens only."""
    if toy == "byte_level":
        return [TOYS[toy].id(to_bytes(bytes([byte]))) for byte in text.encode()]
    return [TOYS[toy].id(f"<0x{byte:02X}>") for byte in text.encode()]


def stream(toy: str, ids: Sequence[int], cuts: Sequence[int] = (), **params: Any) -> tuple[list[str], str | None]:
    """The deltas when text is taken after every token whose index is in `cuts`, and at the end; and what stopped."""
    made = TextStream(TOYS[toy], SamplingParams(**params))
    deltas = []
    for i, token in enumerate(ids):
        made.push(token)
        if i in cuts:
            deltas.append(made.take())
        if made.stopped is not None:
            break
    deltas.append(made.take(final=True))
    assert made.take(final=True) == ""
    return deltas, made.stopped


def whole(toy: str, ids: Sequence[int], **params: Any) -> str:
    return "".join(stream(toy, ids, range(len(ids)), **params)[0])


# --- detokenisation


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["byte_level", "byte_fallback"]), st.text(max_size=30), st.sets(st.integers(0, 100)))
@example("byte_level", "A 世界ab", {0, 1, 2, 3, 4, 5})
@example("byte_fallback", "👩‍👩‍👧 é", set(range(30)))
@example("byte_level", "x\ufffdy", set(range(9)))
def test_any_text_in_single_bytes(toy: str, text: str, cuts: set[int]) -> None:
    """Concatenated deltas are the text; a delta never ends inside a character."""
    expected = TOYS[toy].decode(byte_ids(toy, text))
    deltas, _ = stream(toy, byte_ids(toy, text), sorted(cuts))
    assert "".join(deltas) == expected
    for i in range(len(deltas)):
        assert expected.startswith("".join(deltas[: i + 1]))
    if BROKEN not in text:
        assert not any(BROKEN in delta for delta in deltas)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(TOYS)), st.lists(st.integers(0, 10**6), max_size=40), st.sets(st.integers(0, 39)))
def test_when_text_is_taken_changes_nothing(toy: str, numbers: list[int], cuts: set[int]) -> None:
    """what-breaks 47: Any tokens, broken ones too: the same text whether taken always, never or sometimes."""
    ids = [number % TOYS[toy].backend.get_vocab_size() for number in numbers]
    params = {"stop": ["ab", "世", "\ufffd\ufffd\ufffd"], "stop_regex": ["b+c", r"\s{2}"]}
    for arguments in ({}, params):
        once, reason = stream(toy, ids, (), **arguments)
        for chosen in (range(len(ids)), sorted(cuts)):
            deltas, again = stream(toy, ids, chosen, **arguments)
            assert "".join(deltas) == "".join(once)
            assert again == reason


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["byte_level", "wordpiece", "metaspace"]), st.lists(st.integers(0, 10**6), max_size=40))
def test_text_is_what_decoding_everything_gives(toy: str, numbers: list[int]) -> None:
    """For any tokens at all, torn characters and special tokens included."""
    ids = [number % TOYS[toy].backend.get_vocab_size() for number in numbers]
    for skip in (True, False):
        assert whole(toy, ids, skip_special_tokens=skip) == TOYS[toy].decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*WORDS, "a", "世", "é", "👍🏽", " "]), max_size=20), st.randoms(use_true_random=False))
def test_byte_fallback_text_is_what_decoding_everything_gives(parts: list[str], rng: random.Random) -> None:
    """For any mixture of words and of characters spelled in byte tokens."""
    toy, ids = TOYS["byte_fallback"], []
    for part in parts:
        token = toy.backend.token_to_id(part.replace(" ", "▁"))
        ids += [token] if token is not None and rng.random() < 0.7 else byte_ids("byte_fallback", part)
    assert whole("byte_fallback", ids) == toy.decode(ids)


def test_a_character_is_held_back_until_it_is_whole() -> None:
    for toy in ("byte_level", "byte_fallback"):
        deltas, _ = stream(toy, byte_ids(toy, "é世👍!"), range(99))
        assert deltas == ["", "é", "", "", "世", "", "", "", "👍", "!", ""]


def test_what_precedes_a_torn_character_is_shown_at_once() -> None:
    toy = TOYS["byte_level"]
    deltas, _ = stream("byte_level", [toy.id(to_bytes(b"a\xf0")), *byte_ids("byte_level", "👍")[1:]], range(9))
    assert deltas == ["a", "", "", "👍", ""]


def test_broken_bytes_are_shown_as_soon_as_they_are_known_to_be_broken_or_at_the_end() -> None:
    lead, letter = byte_ids("byte_level", "世")[0], byte_ids("byte_level", "x")[0]
    assert stream("byte_level", [lead, letter, lead], range(9))[0] == ["", BROKEN + "x", "", BROKEN]
    lead, letter = byte_ids("byte_fallback", "世")[0], TOYS["byte_fallback"].id("x")
    assert stream("byte_fallback", [lead, letter, lead], range(9))[0] == ["", BROKEN + "x", "", BROKEN]


def test_a_wrong_byte_after_good_ones_takes_nothing_back() -> None:
    """The decoder breaks the whole run of byte tokens; what was shown stays, and the rest is right."""
    ids = [*byte_ids("byte_fallback", "世界"), *byte_ids("byte_fallback", "世")[:1], TOYS["byte_fallback"].id("x")]
    assert TOYS["byte_fallback"].decode(ids) == BROKEN * 7 + "x"
    assert whole("byte_fallback", ids) == "世界" + BROKEN + "x"


def test_special_tokens_are_skipped_or_shown() -> None:
    toy = TOYS["byte_fallback"]
    ids = [toy.id(SPECIAL[0]), toy.id("hello"), toy.id(SPECIAL[1]), toy.id("▁world"), toy.id(SPECIAL[0])]
    assert whole("byte_fallback", ids) == "hello world"
    assert whole("byte_fallback", ids, skip_special_tokens=False) == "<|end|>hello<|other|> world<|end|>"


@pytest.mark.parametrize("toy", ["byte_level", "byte_fallback", "metaspace"])
def test_work_per_token_is_bounded(toy: str) -> None:
    """Long outputs, endless special tokens and endless broken bytes decode a short window each time."""
    made = TOYS[toy]
    size = made.backend.get_vocab_size()
    rng = random.Random(0)
    runs = [[rng.randrange(size) for _ in range(2000)], [made.id(SPECIAL[0])] * 2000, [size + 5] * 2000]
    if toy != "metaspace":
        runs += [[byte_ids(toy, "世")[0]] * 2000, [byte_ids(toy, "世")[1]] * 2000, byte_ids(toy, "世界👍" * 200)]
    if toy == "byte_level":
        runs.append([made.id(to_bytes(b"\xb8\x96\xe4\xb8")), made.id(to_bytes(b"\x96\xe4"))] * 1000)
    for ids in runs:
        made.decoded = 0
        detokenizer = Detokenizer(made, True)
        for token in ids:
            detokenizer.push(token)
        assert made.decoded < 45 * len(ids), ids[:3]


def test_a_space_survives_after_many_tokens_without_text() -> None:
    toy = TOYS["byte_fallback"]
    nothing = toy.backend.get_vocab_size() + 1
    ids = [toy.id("hello"), *[nothing] * 40, *[toy.id(SPECIAL[0])] * 40, toy.id("▁world")]
    assert whole("byte_fallback", ids) == "hello world"
    assert whole("byte_fallback", [toy.id("▁"), toy.id("▁world")]) == toy.decode([toy.id("▁"), toy.id("▁world")])


# --- stop strings


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(c for c in set(cuts) if 0 < c < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def find(
    parts: Sequence[str], stops: Sequence[str] = (), patterns: Sequence[str] = (), keep: bool = False
) -> list[Any]:
    """What is released after each part, then what at the end, then what was found."""
    finder = StopFinder(stops, patterns)
    out: list[Any] = []
    for part in parts:
        out.append(finder.push(part, search=True, keep_stop=keep))
        if finder.found:
            break
    return [*out, finder.rest(), finder.found]


def every_split(text: str) -> list[list[str]]:
    cuts = range(1, len(text))
    return [pieces(text, chosen) for n in range(len(text)) for chosen in itertools.combinations(cuts, n)]


@pytest.mark.parametrize(
    ("text", "stops", "expected", "found"),
    [
        ("say STOP now", ["STOP"], "say ", "STOP"),
        ("x</think>y", ["</think>"], "x", "</think>"),
        ("aaab", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("xabcd", ["abcd", "bc"], "xa", "bc"),
        ("xabc", ["bc", "abc"], "x", "abc"),
        ("no stop", ["stopp"], "no stop", None),
        ("a\n\nb", ["\n\n"], "a", "\n\n"),
    ],
)
def test_stop_strings_split_in_every_way(text: str, stops: list[str], expected: str, found: str | None) -> None:
    """what-breaks 49: stop strings over several tokens are missed or leaked."""
    for parts in every_split(text):
        *released, reason = find(parts, stops)
        assert ("".join(released), reason) == (expected, found), parts
        *released, reason = find(parts, stops, keep=True)
        assert ("".join(released), reason) == (expected + (found or "") if found else text, found), parts


@pytest.mark.parametrize(
    ("text", "patterns", "expected", "found"),
    [
        ("a12b", [r"\d+"], "a", r"\d+"),
        ("xx--y", [r"-{2}"], "xx", r"-{2}"),
        ("call(foo)!", [r"\([^)]*\)"], "call", r"\([^)]*\)"),
        ("a.*z no", [r"\.\*z"], "a", r"\.\*z"),
        ("1.2.3", [r"(?<=\.)\d"], "1.", r"(?<=\.)\d"),
        ("foo bar", [r"\bbar"], "foo ", r"\bbar"),
        ("foobar", [r"foo(?=bar)"], "", r"foo(?=bar)"),
        ("axxb", [r"xb", r"xx"], "a", "xx"),
        ("nothing", [r"z"], "nothing", None),
        ("AbC", [r"(?i)bc"], "A", r"(?i)bc"),
        ("one\ntwo", [r"^two"], "one\ntwo", None),
        ("one\ntwo", [r"(?m)^two"], "one\n", r"(?m)^two"),
    ],
)
def test_stop_regexes_split_in_every_way(text: str, patterns: list[str], expected: str, found: str | None) -> None:
    for parts in every_split(text):
        *released, reason = find(parts, (), patterns)
        assert ("".join(released), reason) == (expected, found), parts


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab<>", max_size=14),
    st.lists(st.text(alphabet="ab<>", min_size=1, max_size=4), max_size=3),
    st.lists(st.sampled_from(["a+b", "<[ab]*>", "b{2}", "(ab|ba)<", "a.b"]), max_size=2),
    st.lists(st.integers(1, 13), max_size=8),
)
def test_stops_against_a_reference(text: str, stops: list[str], patterns: list[str], cuts: list[int]) -> None:
    """Character by character, the first length at which anything matches; then the longest of what ends there."""
    expected: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        hits = [(end - len(s), s) for s in stops if text[:end].endswith(s)]
        hits += [(m.start(), p) for p in patterns if (m := re.compile(p).search(text[:end]))]
        if hits:
            start, name = min(hits, key=lambda hit: hit[0])
            expected = (text[:start], name)
            tied = {n for s, n in hits if s == start}
            break
    *released, found = find(pieces(text, cuts), stops, patterns)
    assert "".join(released) == expected[0]
    assert found == expected[1] or found in tied


def test_no_more_is_held_back_than_may_become_a_stop() -> None:
    """Longest end of the text that begins a stop: the rest is shown at once."""
    assert find(["ab<", "/thi", "s is", " <<"], ["</think>"]) == ["ab", "", "</this is", " <", "<", None]
    assert find(["x = (1", ", 2", "\n"], (), [r"\([^)\n]*\)"]) == ["x = ", "", "(1, 2\n", "", None]


def test_what_a_regex_holds_back_is_bounded() -> None:
    """A match may span 256 characters; text further back is released."""
    parts = ["("] + ["x"] * 400
    released = list(itertools.accumulate(map(len, find(parts, (), [r"\(x*\)"])[:-2])))
    assert all(i + 1 - done < MATCH_WINDOW for i, done in enumerate(released))
    fits = "(" + "x" * (MATCH_WINDOW - 2) + ")"
    assert find(list(fits), (), [r"\(x*\)"])[-1] == r"\(x*\)"
    assert "".join(find(list(fits), (), [r"\(x*\)"])[:-1]) == ""
    longer = "(x" + fits[1:]
    *released_text, found = find(list(longer), (), [r"\(x*\)"])
    assert ("".join(released_text), found) == (longer, None)


# --- the stream


@pytest.mark.parametrize("toy", ["byte_level", "byte_fallback"])
def test_a_stop_over_many_tokens_is_never_leaked(toy: str) -> None:
    for stop in ("世界", "p é", "👍"):
        ids = byte_ids(toy, f"up é 世界 👍 {stop} tail")
        for cuts in (range(len(ids)), range(0, len(ids), 3), ()):
            deltas, found = stream(toy, ids, cuts, stop=[stop])
            text = "up é 世界 👍 "
            assert "".join(deltas) == text[: text.find(stop)]
            assert found == stop
            kept, _ = stream(toy, ids, cuts, stop=[stop], include_stop=True)
            assert "".join(kept) == text[: text.find(stop)] + stop


def test_held_text_is_released_at_the_end() -> None:
    assert stream("byte_level", byte_ids("byte_level", "a</thi"), range(9), stop=["</think>"])[0][-1] == "</thi"


def test_stops_are_not_looked_for_before_min_tokens() -> None:
    """Nor does a match reach back: `min_tokens` tokens are written in any case."""
    ids = byte_ids("byte_level", "ababab")
    assert whole("byte_level", ids, stop=["ab"], min_tokens=3) == "ab"
    assert whole("byte_level", ids, stop=["ba"], min_tokens=3) == "aba"
    assert whole("byte_level", ids, stop_regex=["a"], min_tokens=6) == "ababab"
    assert whole("byte_level", ids, stop=["ab"], min_tokens=2) == "ab"


def test_a_stop_in_the_last_broken_bytes_counts() -> None:
    lead = byte_ids("byte_level", "世")[0]
    deltas, found = stream("byte_level", [*byte_ids("byte_level", "ab"), lead], (), stop=[BROKEN])
    assert ("".join(deltas), found) == ("ab", BROKEN)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "stop_regex '(' is not a valid regular expression: missing ), unterminated subpattern at position 0"),
        ("a*", "stop_regex 'a*' can match the empty string, and so would stop at once"),
        (r"\b", r"stop_regex '\\b' can match the empty string, and so would stop at once"),
        ("(?=q)|b", "stop_regex '(?=q)|b' can match the empty string, and so would stop at once"),
        ("a{300}", "stop_regex 'a{300}' matches no less than 300 characters; a match may have 256"),
        ("b" * 1001, f"stop_regex '{'b' * 60}...' has 1001 characters, at most 1000 are allowed"),
        ("(?R)", "stop_regex '(?R)' is not a valid regular expression: unknown extension ?R at position 1"),
        ("a{99999999999999}", "the repetition number is too large"),
    ],
)
def test_bad_regexes_are_refused_at_arrival(pattern: str, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        TextStream(TOYS["byte_level"], SamplingParams(stop_regex=["x", pattern]))
    assert message in refusal.value.message
    assert refusal.value.param == "stop_regex"


@pytest.mark.parametrize("pattern", [r"(a|a)+$c", r"([a-z]+)*\d", r"(a+)+(b|a)+\d"])
def test_a_regex_that_backtracks_without_end_fails_its_own_request(pattern: str) -> None:
    """With an error, within a fraction of a second: the first slow search may be it, or many that are rather slow."""
    made = TextStream(TOYS["byte_level"], SamplingParams(stop_regex=["zz", pattern]))
    begin = time.thread_time()
    for token in byte_ids("byte_level", "a" * 300 + "!" * 10):
        made.push(token)
        if made.error is not None:
            break
    assert time.thread_time() - begin < 1.5
    assert made.error is not None
    assert made.error.message == f"stop_regex {pattern!r} takes too long on this output"
    assert made.error.param == "stop_regex"
    assert made.take(final=True) == ""


def test_the_error_of_a_regex_ends_the_request() -> None:
    params = SamplingParams(stop_regex=["(a|a)+$c"])
    request = Request(GenerateCall(call_id="x", prompt=[1], params=params), 0, seed=0, limit=999, arrival=0)
    request.text = TextStream(TOYS["byte_level"], params)
    write(request, byte_ids("byte_level", "a" * 200), None)
    assert request.finish_reason == "error"
    assert request.error is request.text.error is not None
    assert request.output_len < 200


def test_an_honest_regex_never_runs_out_of_time() -> None:
    made = TextStream(TOYS["byte_level"], SamplingParams(stop_regex=[r"\n(user|system):", r"```\w*\n.*?```"]))
    for token in byte_ids("byte_level", "some text\nuse `code` and ```py\nmore" * 100):
        made.push(token)
        assert made.error is None


def test_decoder_descriptions_are_what_they_say() -> None:
    """The toys are of the kinds they stand for."""
    kinds = {name: json.loads(toy.backend.to_str())["decoder"]["type"] for name, toy in TOYS.items()}
    assert kinds == {
        "byte_level": "ByteLevel",
        "byte_fallback": "Sequence",
        "wordpiece": "WordPiece",
        "metaspace": "Metaspace",
    }


def test_a_leading_space_in_bytes_breaks_no_character_after_it() -> None:
    """The decoder strips the space, and shows a whole run of byte tokens as U+FFFD until its last one is there."""
    ids = [*byte_ids("byte_fallback", " "), *byte_ids("byte_fallback", "👍🏽")]
    assert whole("byte_fallback", ids) == TOYS["byte_fallback"].decode(ids) == "👍🏽"
