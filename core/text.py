"""The text of a growing output: incremental detokenisation, stop strings and stop regexes.

Everything is decided when a token is pushed, never when text is taken: so the text, and where it stops, do not
depend on how a stream is cut into events.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from re import _parser as regex_parser  # type: ignore[attr-defined]
from typing import Protocol

import regex

from .errors import RequestError
from .params import SamplingParams

MATCH_WINDOW = 256  # most characters that a match of a stop regex spans
MAX_REGEX_LENGTH = 1000
_BUDGET_S = 0.05  # what searching for regexes may take at once: microseconds, unless one backtracks without end
_REFUND_S = 0.001  # what each token adds to it again, up to the same limit
_LOOKBEHIND = 64  # characters before the held text that a regex's lookbehind sees
_BROKEN = "\ufffd"
_MAX_OPEN = 3  # U+FFFD that may stand for the beginning of one character: of at most four bytes
_MAX_PENDING = 16  # tokens without a character's end after which the bytes are taken for broken
_LONG = 8  # tokens in the window before its older part is dropped


class Decoder(Protocol):
    """The part of `phloem.tokenizer.Tokenizer` that is needed here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Turns tokens into text that will not change, a token at a time, decoding a short window of tokens only.

    The window starts with some tokens whose text is known: decoders treat the start of a text apart (they strip a
    space), and byte tokens depend on the ones before. Where the window's text no longer begins with the known text
    (a decoder that breaks all of a run of byte tokens when one of them is wrong), the new tokens are decoded alone:
    what was shown stays.
    """

    def __init__(self, decoder: Decoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # the window
        self._known = ""  # text of its first `_mark` tokens: it ended with a whole character
        self._mark = 0
        self._shown = 0  # characters handed out beyond the known text
        self._open = ""  # what may still change

    def push(self, token: int) -> str:
        """Text that became certain with this token. One or two decodings of about ten tokens."""
        self._ids.append(token)
        text = self._decode(self._ids)
        joined = text.startswith(self._known)
        new = text[len(self._known) :] if joined else self._decode(self._ids[self._mark :])
        if not new and (self._known or self._special(token)):
            self._ids.pop()  # leaves no trace, so that any number of such tokens costs nothing
            return ""
        hopeless = len(self._ids) - self._mark > _MAX_PENDING
        certain = self._certain(new, _MAX_OPEN if hopeless else len(new))
        out = new[self._shown : certain]
        self._shown, self._open = max(self._shown, certain), new[certain:]
        if new and not self._open:
            self._advance(text if joined else None, new)
        elif hopeless:
            self._restart()
        return out

    def rest(self) -> str:
        """What is left when no token follows: bytes that make no character, as U+FFFD."""
        rest, self._open = self._open, ""
        return rest

    def _special(self, token: int) -> bool:
        """True for a token that is skipped, not one that only has no text at the start, like a space."""
        return not self._decode([token]) and bool(self._decoder.decode([token], skip_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip)

    @staticmethod
    def _certain(new: str, most: int) -> int:
        """Length of the beginning of `new` that later tokens cannot change: all but at most `most` U+FFFD at its end.

        One broken byte can turn a whole run of byte tokens into U+FFFD, so their number says nothing.
        """
        broken = len(new) - len(new.rstrip(_BROKEN))
        return len(new) - min(broken, most)

    def _advance(self, text: str | None, new: str) -> None:
        """All tokens so far end with a whole character: their text is known from now on."""
        if text is None:
            self._ids, self._known = self._ids[self._mark :], new
        elif len(self._ids) > _LONG:
            self._ids = self._ids[self._mark :]
            self._known = self._decode(self._ids)
        else:
            self._known = text
        self._mark, self._shown = len(self._ids), 0

    def _restart(self) -> None:
        """Give up on bytes that never end a character; the last tokens may still begin one."""
        self._ids, self._known, self._mark = self._ids[-_MAX_OPEN - 1 :], "", 0
        new = self._decode(self._ids)
        self._shown = self._certain(new, _MAX_OPEN)
        self._open = new[self._shown :]


class StopFinder:
    """Finds the first stop in a growing text and holds back exactly what may still become one.

    First is what ends first, character by character, and of those the longest; so the result does not depend on how
    the text was cut. Regexes have Python's `re` syntax and stop at their shortest match; the end of the text so far
    counts as an end. A match spans at most MATCH_WINDOW characters.
    """

    def __init__(self, stops: Sequence[str], patterns: Sequence[str]) -> None:
        """Raises RequestError(param="stop_regex")."""
        self._stops = tuple(stops)
        self._patterns = [_compile(pattern) for pattern in patterns]
        self._before = ""  # text already released, for lookbehinds
        self._held = ""
        self._budget_s = _BUDGET_S
        self.found: str | None = None

    def push(self, text: str, *, search: bool, keep_stop: bool) -> str:
        """Text that is safe to release after `text` was added; with a match (`found`), all that ever will be.

        Raises TimeoutError, with the pattern, if a regex backtracks for too long.
        """
        if not text or not (self._stops or self._patterns):
            return text
        self._budget_s = min(_BUDGET_S, self._budget_s + _REFUND_S)
        old = len(self._held)
        held = self._held + text
        match = self._match(held, old) if search else None
        if match is not None:
            start, end, self.found = match
            self._held = ""
            return held[: end if keep_stop else start]
        safe = self._safe(held) if search else len(held)
        self._before = (self._before + held[:safe])[-_LOOKBEHIND:]
        self._held = held[safe:]
        return held[:safe]

    def rest(self) -> str:
        """What was held back, when no text follows."""
        rest, self._held = self._held, ""
        return rest

    def _match(self, held: str, old: int) -> tuple[int, int, str] | None:
        """(start, end, stop) of the first match that shows beyond the `old` characters searched before."""
        found: list[tuple[int, int, int, str]] = []  # first the length of text that shows the match
        for stop in self._stops:
            start = held.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, start + len(stop), stop))
        last = min((shown for shown, *_ in found), default=len(held))
        base = len(self._before)
        for shown in range(old + 1, last + 1) if self._patterns else ():
            for pattern in self._patterns:
                begin = base + max(0, shown - MATCH_WINDOW)
                hit = self._search(pattern, self._before + held, begin, base + shown)
                if hit is not None:
                    found.append((shown, hit.start() - base, hit.end() - base, pattern.pattern))
            if found and found[-1][0] == shown:
                break
        return min(found)[1:] if found else None

    def _safe(self, held: str) -> int:
        """Length of the beginning of `held` in which no match can start any more."""
        safe = len(held)
        for stop in self._stops:
            start = held.find(stop[0], max(0, len(held) - len(stop) + 1))
            while 0 <= start < safe:
                if stop.startswith(held[start:]):
                    safe = start
                start = held.find(stop[0], start + 1)
        base = len(self._before)
        for pattern in self._patterns:
            begin = base + max(0, len(held) - MATCH_WINDOW + 1)
            hit = self._search(pattern, self._before + held, begin, base + len(held), partial=True)
            if hit is not None:
                safe = min(safe, hit.start() - base)
        return safe

    def _search(
        self, pattern: regex.Pattern[str], text: str, begin: int, end: int, partial: bool = False
    ) -> regex.Match[str] | None:
        """Search text[begin:end] on the budget, counted in the thread's own time: a busy machine is not its fault."""
        started = time.thread_time()
        try:
            hit = pattern.search(text, begin, end, partial=partial, timeout=self._budget_s)
        except TimeoutError:
            raise TimeoutError(pattern.pattern) from None
        self._budget_s -= time.thread_time() - started
        if self._budget_s <= 0:
            raise TimeoutError(pattern.pattern)
        return hit


def _compile(pattern: str) -> regex.Pattern[str]:
    """A stop regex, searchable in part and with a timeout. Raises RequestError(param="stop_regex")."""

    def refuse(why: str, hint: str | None = None) -> RequestError:
        shown = pattern if len(pattern) <= 60 else pattern[:60] + "..."
        return RequestError(f"stop_regex {shown!r} {why}", hint=hint, param="stop_regex")

    if len(pattern) > MAX_REGEX_LENGTH:
        raise refuse(f"has {len(pattern)} characters, at most {MAX_REGEX_LENGTH} are allowed")
    try:
        re.compile(pattern)
        shortest, _ = regex_parser.parse(pattern).getwidth()
        compiled = regex.compile(pattern, regex.VERSION0)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise refuse(f"is not a valid regular expression: {error}", "the syntax is that of Python's re") from error
    if shortest == 0:
        raise refuse("can match the empty string, and so would stop at once", "make it match at least one character")
    if shortest > MATCH_WINDOW:
        raise refuse(f"matches no less than {shortest} characters; a match may have {MATCH_WINDOW}")
    return compiled


class TextStream:
    """The text of one output, ready to show: whole characters, nothing of a stop. Made at arrival, one per choice.

    Stop strings and regexes are looked for in the text of tokens from the `min_tokens`-th on. If `stopped` is set,
    or `error`, the output is over: push no more tokens.
    """

    def __init__(self, tokenizer: Decoder, params: SamplingParams) -> None:
        """Raises RequestError(param="stop_regex")."""
        self.stopped: str | None = None  # the stop string, or the pattern of the stop regex, that matched
        self.error: RequestError | None = None  # a stop regex took too long: the request cannot go on
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._finder = StopFinder(params.stop, params.stop_regex)
        self._keep_stop = params.include_stop
        self._unsearched = params.min_tokens
        self._ready: list[str] = []

    def push(self, token: int) -> None:
        """Add the next output token. Called once per token, in order; amortised O(1)."""
        self._unsearched -= 1
        self._add(self._detokenizer.push(token))

    def take(self, final: bool = False) -> str:
        """New text that is safe to show; with `final` all that is left. Concatenated, takes are the output's text."""
        if final and self.stopped is None and self.error is None:
            self._add(self._detokenizer.rest())
            self._ready.append(self._finder.rest())
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _add(self, text: str) -> None:
        try:
            self._ready.append(self._finder.push(text, search=self._unsearched <= 0, keep_stop=self._keep_stop))
        except TimeoutError as error:
            self.error = RequestError(
                f"stop_regex {str(error)!r} takes too long on this output",
                hint="avoid nested repetitions such as (a+)+",
                param="stop_regex",
            )
        self.stopped = self._finder.found
