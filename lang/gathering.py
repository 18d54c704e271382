"""Results as variables: what a generation reports, and the lists that a join makes of branches' variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phloem.messages import TokenLogprob

from .backends.base import Generation, Selection
from .cell import Cell


async def gathered(cell: Cell, parts: Sequence[Cell | None]) -> None:
    """Fill a cell with the values of a variable in several branches, in order.

    None stands for a branch that did not set it, failed or was cancelled: one that fails leaves the others.
    """
    values, metas = [], []
    for part in parts:
        if part is not None:
            await part.ready()
        there = part is not None and part.error is None
        values.append(part.result() if part is not None and there else None)
        metas.append(part.meta if part is not None and there else None)
    cell.set(values, metas)


def report(result: Generation | Selection, index: int = 0, logprob_start: int | None = None) -> dict[str, Any]:
    """What `get_meta_info` returns: the backend's report under SGLang's names.

    finish_reason is a dict of `type` ("stop", "length") and, where known, `matched`; the logprobs of tokens are
    (logprob, token id, text) each. A selection has `scores` (per choice, by its method), `index`, and the choices'
    tokens' logprobs.
    """
    if isinstance(result, Selection):
        return result.meta | {
            "index": result.index,
            "scores": result.scores,
            "normalized_prompt_logprobs": result.scores,
            "token_logprobs": result.token_logprobs,
        }
    meta = dict(result.meta[index]) if index < len(result.meta) else {}
    matched, texts = meta.pop("stop_reason", None), meta.pop("tokens", None)
    meta["finish_reason"] = {"type": meta.get("finish_reason")} | ({} if matched is None else {"matched": matched})
    if result.logprobs is not None:
        _add(meta, "output", result.logprobs[index], texts)
    prompt, words = meta.pop("prompt_logprobs", None), meta.pop("prompt", None)
    if prompt is not None:
        start = logprob_start or 0
        _add(meta, "input", prompt[start:], words[start:] if words is not None else None)
    return meta


def _add(meta: dict[str, Any], side: str, logprobs: Sequence[TokenLogprob | None], texts: Sequence[str] | None) -> None:
    """The token logprobs of one side, and the best alternatives where they were asked for."""
    rows = []
    for place, one in enumerate(logprobs):
        text = texts[place] if texts is not None else None
        rows.append((one.logprob, one.token_id, text) if one is not None else (None, None, text))
    meta[f"{side}_token_logprobs"] = rows
    if any(one is not None and one.top for one in logprobs):
        tops = ([(value, token, None) for token, value in one.top] if one is not None else None for one in logprobs)
        meta[f"{side}_top_logprobs"] = list(tops)
