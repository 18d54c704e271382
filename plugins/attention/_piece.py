"""One dense attention problem over gathered K and V, and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ._total import Total


@dataclass(slots=True)
class Piece:
    """B segments with Q queries each, over padded contexts of L entries."""

    segments: int
    queries: int
    length: int
    rows: torch.Tensor  # [B * Q] int64: rows of q and of the output
    slots: torch.Tensor  # [B * L] int64
    mask: torch.Tensor | None  # [B, Q, L] bool, None: everything is seen
    partial: bool = False  # the queries see more, in other pieces
    _run: slice | None = None
    _bias: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.segments == 1 and self.slots.device.type == "cpu":
            first, last = int(self.slots[0]), int(self.slots[-1])
            if last - first == self.length - 1 and bool((self.slots.diff() == 1).all()):
                self._run = slice(first, last + 1)  # consecutive slots need no gathering

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        total: Total,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Attend with this piece's rows of q [T, Hq, Dk] over keys, values [slots, Hkv, D], into `total`."""
        B, Q, L, kv_heads = self.segments, self.queries, self.length, keys.shape[1]
        ratio = q.shape[1] // kv_heads
        k = self._take(keys, q.dtype).view(B, L, kv_heads, -1).transpose(1, 2)
        v = self._take(values, q.dtype).view(B, L, kv_heads, -1).transpose(1, 2)
        grouped = q.index_select(0, self.rows).view(B, Q, kv_heads, ratio, -1)
        if B == 1 and not self.partial and softcap is None:
            # [Hkv, ratio, Q, D] queries over [Hkv, 1 -> ratio, L, D]: stride 0, so nothing is repeated
            query = grouped[0].permute(1, 2, 0, 3)
            key, value = (x[0][:, None].expand(-1, ratio, -1, -1) for x in (k, v))
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=self._mask_for(1, q.dtype), scale=scale)
            total.put(self.rows, out.permute(2, 0, 1, 3).reshape(Q, q.shape[1], -1))
            return
        # [B, Hkv, Q * ratio, D] queries over [B, Hkv, L, D]: heads that share K and V are further rows
        query = grouped.transpose(1, 2).reshape(B, kv_heads, Q * ratio, -1)
        mask = self._mask_for(ratio, q.dtype)
        if not self.partial and softcap is None:
            out = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)
            total.put(self.rows, self._by_row(out))
            return
        out, lse = _attend(query, k, v, mask, scale, softcap)
        if self.partial:
            total.merge(self.rows, self._by_row(out), self._by_row(lse[..., None])[..., 0])
        else:
            total.put(self.rows, self._by_row(out).to(q.dtype))

    def _take(self, store: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B * L, Hkv, D] of a KV store."""
        taken = store.index_select(0, self.slots) if self._run is None else store[self._run]
        return taken.to(dtype)

    def _by_row(self, x: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, Q * ratio, D] -> [B * Q, Hq, D]."""
        B, kv_heads, stacked, dim = x.shape
        ratio = stacked // self.queries
        x = x.view(B, kv_heads, self.queries, ratio, dim).transpose(1, 2)
        return x.reshape(B * self.queries, kv_heads * ratio, dim)

    def _mask_for(self, ratio: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask, [B, 1, Q * ratio or 1, L], made once for all layers with this head ratio."""
        if self.mask is None:
            return None
        bias = self._bias.get((ratio, dtype))
        if bias is None:
            bias = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            bias.masked_fill_(~self.mask, float("-inf"))
            if self.queries > 1:
                bias = bias.repeat_interleave(ratio, dim=1)
            bias = self._bias[ratio, dtype] = bias[:, None]
        return bias


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention where torch's own has no soft-cap, or keeps the log-sum-exp to itself.

    q [*, R, D], k [*, L, D], v [*, L, Dv] -> float32 out [*, R, Dv] and log-sum-exp of the scores [*, R].
    """
    if softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        # what scaled_dot_product_attention calls here; asked directly, it tells the log-sum-exp
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = fused(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        return out.float(), lse
    scores = (q * scale @ k.transpose(-1, -2)).float()
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights.to(v.dtype) @ v).float() / total
    return out, (highest + total.log())[..., 0]
