"""A head before its first step, and the size of what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .corpus import Sample
from .gather import Target
from .head import EagleHead, HeadShape
from .vocabulary import DraftVocabulary

_LOOKED_AT = 500  # texts
_FLAT = (
    0.3  # of the target's own scale: what is handed through at first is the token before, and should not be sure of it
)


def shape_for(facts: dict[str, Any], draft_vocab: int) -> HeadShape:
    """One layer of the target's width, with the target's own heads as far as they fit."""
    hidden, width, kv_heads = facts["hidden_size"], facts["head_dim"], facts["kv_heads"]
    groups = max(1, hidden // width // kv_heads)
    return HeadShape(
        hidden_size=hidden,
        intermediate_size=-(-hidden * 8 // 3 // 64) * 64,
        num_attention_heads=groups * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        draft_vocab_size=draft_vocab,
        features=len(facts["layers"]),
        rope_theta=1e5,  # the angles of a text longer than those of training stay near what was seen there
    )


def feature_scale(samples: Sequence[Sample], layers: int) -> Tensor:
    """[layers * hidden]: the root of the mean square of each feature over the answers of some texts."""
    rows = [one.states[one.prompt_len - 1 :, :layers].flatten(1).float() for one in samples[:_LOOKED_AT]]
    squares = sum((part.pow(2).sum(0) for part in rows), torch.zeros(()))
    return (squares / sum(map(len, rows))).sqrt().clamp(min=1e-3)


def new_head(shape: HeadShape, target: Target, vocabulary: DraftVocabulary, scale: Tensor, seed: int) -> EagleHead:
    """Random, but for what the target knows: its output head's rows and, where the head reads the target's last states,
    their scale; those are handed through at first.
    """
    torch.manual_seed(seed)
    head = EagleHead(shape)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=0.02)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.mul_(0.5)
        head.lm_head.weight.copy_(target.head[vocabulary.ids].float())
        if target.facts["depth"] in target.facts["layers"]:
            at = target.facts["layers"].index(target.facts["depth"]) * shape.hidden_size
            head.norm.weight.copy_(_FLAT * scale[at : at + shape.hidden_size])
            head.fc.weight[:, at : at + shape.hidden_size] += torch.eye(shape.hidden_size)
    return head
