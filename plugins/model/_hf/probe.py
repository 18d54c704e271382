"""Finding out at load time what a model's layers are, and that serving them raggedly changes no logit.

A model is run as transformers runs it, and as phloem will: two prompts in one row, in two steps each, with no cache
object. State outside attention (recurrences, convolutions, biases by distance) shows as a difference or as a layer
that never attends, whatever the architecture is called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from phloem.errors import ModelError

from .bridge import PROBE, Bridge, MaskRule

if TYPE_CHECKING:
    from .runner import Runner

PROMPTS = (13, 9)  # tokens of the two probing prompts
SPLITS = (7, 4)  # how many of them run in the first step
TOLERANCE = 2e-4  # of float32 logits, relative to the largest where that exceeds 1
ROUGH_TOLERANCE = 0.1  # the same for 16-bit weights, where only gross errors can be told from rounding

# arguments that change no result, or that are handled
_KNOWN = {"scaling", "softcap", "sliding_window", "dropout", "position_ids", "use_cache", "is_causal", "cache_position"}
_NAMES = {"s_aux": "attention sinks (s_aux)", "position_bias": "a position bias"}


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One attention call of the model, as observed."""

    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None
    softcap: float | None


class Recorder:
    """Handler of the first pass: writes down each call's facts, and computes plain causal attention."""

    def __init__(self, context_length: int) -> None:
        self.layers: list[LayerFacts] = []
        self._context = context_length

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, arguments: dict[str, Any]
    ) -> torch.Tensor:
        self._refuse_unknown(arguments)
        if getattr(module, "is_causal", True) is False or arguments.get("is_causal") is False:
            raise ModelError("its attention is not causal")
        window = window_of(mask, self._context)
        if mask is None and arguments.get("sliding_window") is not None:
            raise ModelError("it asks for a sliding window but builds no mask for it")
        scale = arguments.get("scaling")
        facts = LayerFacts(
            kv_heads=k.shape[1],
            k_dim=k.shape[3],
            v_dim=v.shape[3],
            scale=q.shape[3] ** -0.5 if scale is None else float(scale),
            window=window,
            softcap=arguments.get("softcap"),
        )
        self.layers.append(facts)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return _dense(q, k, v, facts)[None]

    def _refuse_unknown(self, arguments: dict[str, Any]) -> None:
        for name, value in arguments.items():
            if name not in _KNOWN and value is not None and value is not False:
                raise ModelError(f"its attention takes {_NAMES.get(name, name)}, which phloem does not know")


@dataclass(slots=True)
class DenseStep:
    """`AttentionStep` of the ragged passes: contexts are kept as plain tensors, `parts` is [(sequence, queries)]."""

    facts: list[LayerFacts]
    parts: list[tuple[int, int]]
    store: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `AttentionStep`."""
        counts = [count for _, count in self.parts]
        out = []
        for (sequence, _), *rows in zip(self.parts, *(torch.split(x, counts) for x in (q, k, v)), strict=True):
            own_q, own_k, own_v = rows
            if (layer, sequence) in self.store:
                past_k, past_v = self.store[layer, sequence]
                own_k, own_v = torch.cat([past_k, own_k]), torch.cat([past_v, own_v])
            self.store[layer, sequence] = (own_k, own_v)
            out.append(_dense(own_q, own_k, own_v, self.facts[layer]))
        return torch.cat(out)


def examine(runner: Runner, bridge: Bridge, config: Any) -> list[LayerFacts]:
    """The model's layers in call order. Raises ModelError saying why it cannot be served exactly.

    `config` is the model's text config. Called once, at load; costs a few forward passes over a few tokens.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, runner.vocab_size, (n,), generator=generator).to(runner.device) for n in PROMPTS]
    context_length = getattr(config, "max_position_embeddings", None)
    layers = config.num_hidden_layers
    bridge.use("eager", None)
    expected = [runner.plain_logits(prompt) for prompt in prompts]
    recorder = Recorder(context_length or max(PROMPTS))
    bridge.use(PROBE, recorder)
    try:
        first = runner.plain_logits(prompts[0])
    except ModelError:
        raise
    except Exception as error:  # such code works on the masks itself, and meets a `MaskRule` instead
        raise ModelError(f"it does not attend through transformers' attention interface ({error!r})") from error
    calls = len(recorder.layers)
    if calls < layers:
        raise ModelError(
            f"{calls} of its {layers} layers attend through transformers' attention interface; "
            "the others keep state of their own or compute attention themselves"
        )
    if calls > layers:
        raise ModelError(f"its {layers} layers attend {calls} times, and phloem keeps one K and V for each layer")
    if context_length is None:
        raise ModelError("its config does not say how long a context may be (max_position_embeddings)")
    _compare(first, expected[0], runner.dtype, "its attention is not plain attention")
    facts = recorder.layers
    for rows, reference in zip(_ragged_logits(runner, facts, prompts), expected, strict=True):
        _compare(rows, reference, runner.dtype, "a prompt run in two steps, in company, gives other logits")
    return facts


def _ragged_logits(runner: Runner, facts: list[LayerFacts], prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each prompt, [T, vocab], both run in one row and in two steps."""
    step = DenseStep(facts, [])
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for starts, ends in (((0, 0), SPLITS), (SPLITS, PROMPTS)):
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        step.parts = list(enumerate(counts))
        tokens = torch.cat([prompt[a:b] for prompt, a, b in zip(prompts, starts, ends, strict=True)])
        positions = torch.cat([torch.arange(a, b, device=runner.device) for a, b in zip(starts, ends, strict=True)])
        logits = runner.logits(runner.hidden(tokens, positions, step, facts))
        for own, block in zip(rows, torch.split(logits, counts), strict=True):
            own.append(block)
    return [torch.cat(own) for own in rows]


def window_of(mask: Any, context_length: int) -> int | None:
    """The window of a mask, None for plain causal ones. Raises ModelError for any other rule."""
    if mask is None:
        return None
    if not isinstance(mask, MaskRule):
        raise ModelError("it builds attention masks of its own")
    keys = torch.arange(context_length)
    window = int(mask.sees(keys[-1:], keys).sum())
    samples = {0, 1, context_length // 3, context_length // 2, context_length - 1}
    samples |= {q for q in (window - 1, window, window + 1, 2 * window + 1) if q < context_length}
    queries = torch.tensor(sorted(samples))[:, None]
    distance = queries - keys
    if not torch.equal(mask.sees(queries, keys[None]), (distance >= 0) & (distance < window)):
        raise ModelError("its attention masks are neither causal nor a sliding window")
    return window if window < context_length else None


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """Causal attention of the last rows of one context: q [Q, Hq, D], k and v [L, Hkv, D] -> [Q, Hq, Dv]."""
    share = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,lhd->hql", q.float(), k.float().repeat_interleave(share, 1)) * facts.scale
    if facts.softcap is not None:
        scores = facts.softcap * torch.tanh(scores / facts.softcap)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (facts.window or len(k)))
    weights = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(-1)
    return torch.einsum("hql,lhd->qhd", weights, v.float().repeat_interleave(share, 1)).to(q.dtype)


def _compare(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, complaint: str) -> None:
    difference = (ours - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    tolerance = TOLERANCE if dtype == torch.float32 else ROUGH_TOLERANCE
    if not difference <= tolerance * scale:  # NaN too
        raise ModelError(f"{complaint} (logits differ by {difference:.2g})")
