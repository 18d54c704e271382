"""The merges that a SentencePiece vocabulary implies: every way to cut a token into two other tokens, best first."""

from __future__ import annotations

Merge = tuple[str, str]


def merges_by_position(vocab: dict[str, int]) -> list[Merge]:
    """Best first is the order of ids: for vocabularies (Gemma's) whose scores do not follow the merge order."""
    return [
        (token[:cut], token[cut:])
        for token in sorted(vocab, key=vocab.__getitem__)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def merges_by_score(vocab: dict[str, int], scores: dict[str, float]) -> list[Merge]:
    """Best first is the higher score; of one token's cuts, the one with the longer left part."""
    cuts = [
        (-scores[token], -cut, (token[:cut], token[cut:]))
        for token in vocab
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    # equal scores: the longer left part, then the longer right part, then the order of the vocabulary
    cuts.sort(key=lambda entry: (entry[0], entry[1], -len(entry[2][1])))
    return [merge for _, _, merge in cuts]
