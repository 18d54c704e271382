"""The output of one layer, put together from pieces that saw different parts of a query's context."""

from __future__ import annotations

import torch


class Total:
    """Rows are either put once, or merged from partial results by their log-sum-exp (as in flash attention)."""

    def __init__(self, q: torch.Tensor, v_dim: int) -> None:
        self._out = torch.empty(*q.shape[:2], v_dim, dtype=q.dtype, device=q.device)
        self._merged: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        self._rows: list[torch.Tensor] = []

    def put(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """`out` [R, Hq, Dv] is the whole result of query rows [R]."""
        self._out.index_copy_(0, rows, out)

    def merge(self, rows: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """`out` [R, Hq, Dv] float32 is the result over a part of the context, `lse` [R, Hq] its log-sum-exp."""
        if self._merged is None or self._lse is None:
            self._merged = torch.zeros(self._out.shape, dtype=torch.float32, device=out.device)
            self._lse = torch.full(self._out.shape[:2], float("-inf"), device=out.device)
        before = self._lse[rows]
        after = torch.logaddexp(before, lse)
        old = self._merged[rows] * (before - after).exp_()[..., None]
        self._merged[rows] = old.addcmul_(out, (lse - after).exp_()[..., None])
        self._lse[rows] = after
        self._rows.append(rows)

    def result(self) -> torch.Tensor:
        """[T, Hq, Dv], when every row has been put or merged completely."""
        if self._merged is not None:
            rows = torch.cat(self._rows)
            self._out[rows] = self._merged[rows].to(self._out.dtype)
        return self._out
