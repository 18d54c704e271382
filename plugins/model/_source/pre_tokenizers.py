"""How byte-level BPE vocabularies split a text into words, by the name in `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


def _words(digits: str) -> str:
    letters, marks = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return "|".join((_CONTRACTIONS, letters, digits, marks, _SPACES))


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_TEKKEN = "|".join((*_CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES))
_GPT4O = "|".join(
    (*(f"{word}{_CONTRACTIONS}?" for word in _CASED), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES)
)

# GPT-2's own pattern, which `tokenizers` has built in. SmolLM's first cuts at every digit; its merges have no digits,
# so that only shows in white space before a digit ("\n\n1" is one token less). transformers reads GGUF files of SmolLM
# without that cut, and this reader gives the tokens that transformers gives.
PLAIN = frozenset({"gpt-2", "smollm"})
SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
# words that are tokens are not built from merges; and texts start with bos even where the file does not say so
UNMERGED = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
STARTS_WITH_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
