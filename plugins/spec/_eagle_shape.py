"""What an EAGLE head is, as its config.json says in one of several layouts, and whether it fits the target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from phloem.errors import ModelError
from phloem.model_spec import ModelSpec

FORMAT, VERSION = "phloem-eagle", 1
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads")
_ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a head. Layers are counted as `phloem.interfaces.HiddenStates` does."""

    algorithm: str  # "eagle3", or "eagle" for the first one
    layers: tuple[int, ...]
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: tuple[tuple[str, Any], ...]  # theta, and what stretches it
    vocab: int  # tokens that it can propose
    norm_before_residual: bool = False

    def inverse_frequencies(self) -> torch.Tensor:
        """Float32 angles per position, [head_dim / 2]."""
        p = dict(self.rope)
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        plain = torch.tensor(float(p["rope_theta"])).pow(exponents).reciprocal()
        if p["rope_type"] == "linear":
            return plain / float(p["factor"])
        return _llama3(plain, p) if p["rope_type"] == "llama3" else plain


def read_shape(config: Mapping[str, Any], wide: bool, model: ModelSpec) -> Shape:
    """The head of a config.json; `wide` says that its attention reads embedding and feature beside each other.

    That tells EAGLE-3 from EAGLE where the config does not. Raises ModelError.
    """
    inner, algorithm = _layout(config, "eagle3" if wide else "eagle")
    if algorithm != ("eagle3" if wide else "eagle"):
        raise ModelError(f"its config says {algorithm}, and its tensors are those of another algorithm")
    missing = [name for name in _SIZES if inner.get(name) is None]
    if missing:
        raise ModelError(f"its config.json lacks {', '.join(missing)}")
    if inner.get("hidden_act", "silu") not in _ACTIVATIONS:
        raise ModelError(f"its activation is {inner['hidden_act']!r}; only {_ACTIVATIONS[0]} is known")
    heads, hidden = _whole(inner, "num_attention_heads"), _whole(inner, "hidden_size")
    shape = Shape(
        algorithm=algorithm,
        layers=_layers(config, algorithm, model.depth),
        hidden=hidden,
        intermediate=_whole(inner, "intermediate_size"),
        heads=heads,
        kv_heads=_whole(inner, "num_key_value_heads", heads),
        head_dim=_whole(inner, "head_dim", hidden // heads),
        eps=_positive(inner, "rms_norm_eps", 1e-6),
        rope=_rope(inner),
        vocab=_whole(config, "draft_vocab_size", model.vocab_size) if wide else model.vocab_size,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
    )
    if heads % shape.kv_heads:
        raise ModelError(f"its {heads} attention heads do not share {shape.kv_heads} of keys and values evenly")
    if shape.head_dim % 2:
        raise ModelError(f"its heads are {shape.head_dim} wide, which cannot be rotated by pairs")
    return shape


def check_target(config: Mapping[str, Any], shape: Shape, model: ModelSpec) -> None:
    """ModelError with the numbers where the head is for another model than the one that is served."""
    named = config.get("target") if isinstance(config.get("target"), dict) else {}
    told: dict[str, Any] = dict(named or {})
    inner = config.get("transformer_layer_config") or config
    vocab = told.get("vocab_size", config.get("target_vocab_size", inner.get("vocab_size")))
    wanted = {
        "hidden states": (told.get("hidden_size", shape.hidden), model.hidden_size),
        "tokens in the vocabulary": (vocab, model.vocab_size),
        "layers": (told.get("depth"), model.depth),
    }
    wrong = [
        f"{theirs:,} {what} where it has {mine:,}"
        for what, (theirs, mine) in wanted.items()
        if theirs not in (None, mine)
    ]
    if shape.hidden != model.hidden_size:
        wrong.append(f"features {shape.hidden:,} wide where embeddings are {model.hidden_size:,}")
    if beyond := [layer for layer in shape.layers if not 0 <= layer <= model.depth]:
        wrong.append(f"the states of layer {beyond[0]} where there are those of 0 to {model.depth}")
    if wrong:
        name = f" ({told['name']})" if told.get("name") else ""
        raise ModelError(
            f"it was trained for another model{name} than {model.name}: it wants {'; '.join(dict.fromkeys(wrong))}",
            hint="choose a head that was trained for this model",
        )


def _layout(config: Mapping[str, Any], likely: str) -> tuple[Mapping[str, Any], str]:
    """Where the sizes of the layer stand, and the algorithm."""
    if "format" in config:
        if config["format"] != FORMAT or config.get("version") != VERSION:
            told = f"{config['format']!r}, version {config.get('version')!r}"
            raise ModelError(f"its format is {told}; this reader knows {FORMAT!r}, version {VERSION}")
        return config, str(config.get("algorithm", likely))
    if "speculators_model_type" in config:
        kind = str(config["speculators_model_type"])
        if kind not in ("eagle", "eagle3"):
            raise ModelError(f"it is a speculator of type {kind!r}; only eagle and eagle3 are known")
        return config.get("transformer_layer_config") or {}, kind
    return config, likely


def _whole(config: Mapping[str, Any], name: str, otherwise: int = 0) -> int:
    """A size: a whole number above 0. What is absent or null is `otherwise`."""
    value = config.get(name)
    value = otherwise if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"its {name} is {value!r}, which is no size")
    return value


def _positive(config: Mapping[str, Any], name: str, otherwise: float) -> float:
    """A finite number above 0, likewise."""
    value = config.get(name)
    value = otherwise if value is None else value
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"its {name} is {value!r}, which is no number above 0")
    return float(value)


def _layers(config: Mapping[str, Any], algorithm: str, depth: int) -> tuple[int, ...]:
    """Whose states it reads.

    SpecForge names layers by what they give, one less than we do; `speculators` count as vLLM does, which is our way.
    Where nothing is said EAGLE-3 means the inputs of layers 2, depth // 2 and depth - 3.
    """
    if algorithm == "eagle":
        return (depth,)
    told: Any = config.get("layers") if "format" in config else None
    if told is None:
        told = config.get("eagle_aux_hidden_state_layer_ids")
    nested = config.get("eagle_config")
    if told is None and isinstance(nested, dict) and nested.get("eagle_aux_hidden_state_layer_ids"):
        told = nested["eagle_aux_hidden_state_layer_ids"]
        told = [layer + 1 if isinstance(layer, int) else layer for layer in told] if isinstance(told, list) else told
    if told is None:
        return (2, depth // 2, depth - 3)
    if not isinstance(told, list) or not told or not all(isinstance(layer, int) for layer in told):
        raise ModelError(f"its layers are {told!r}, which are no numbers of layers")
    return tuple(told)


def _rope(inner: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    stretched = dict(inner.get("rope_parameters") or inner.get("rope_scaling") or {})
    kind = str(stretched.get("rope_type") or stretched.get("type") or "default")
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"its rope type is {kind!r}; known are default, linear and llama3")
    stretched["rope_type"] = kind
    stretched["rope_theta"] = _positive({**inner, **stretched}, "rope_theta", 10000.0)
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
    if missing := [name for name in needed if stretched.get(name) is None]:
        raise ModelError(f"its rope type {kind!r} lacks {', '.join(missing)}")
    if kind == "llama3":
        stretched.setdefault("original_max_position_embeddings", 8192)
        needed = (*needed, "original_max_position_embeddings")
    stretched |= {name: _positive(stretched, name, 0.0) for name in needed}
    if kind == "llama3" and stretched["low_freq_factor"] == stretched["high_freq_factor"]:
        raise ModelError("its low_freq_factor and high_freq_factor are equal, which leaves nothing between them")
    return tuple(sorted((name, value) for name, value in stretched.items() if not isinstance(value, (dict, list))))


def _llama3(plain: torch.Tensor, p: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    wavelength = 2 * math.pi / plain
    low, high = float(p["low_freq_factor"]), float(p["high_freq_factor"])
    blend = (float(p["original_max_position_embeddings"]) / wavelength - low) / (high - low)
    return plain * torch.lerp(torch.tensor(1 / float(p["factor"])), torch.tensor(1.0), blend.clamp(0, 1))
