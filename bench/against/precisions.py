"""Which peers compute at which precision, what phloem runs beside them, and what it is meant to reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.against.install import Shelf
from bench.process import PeerSpec

SLOTS = 32


@dataclass(frozen=True)
class Precision:
    """`quant` is phloem's; `peers` the arguments of the functions in MAKERS; `targets` the least ratio by workload."""

    quant: str
    peers: tuple[tuple[str, Mapping[str, str]], ...]
    targets: Mapping[str, float]


_SHARING = ("W3", "W4", "W5")
_BITS8: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("openvino", {"weights": "int8", "dtype": "auto"}),
    ("llama_server", {"kind": "Q8_0"}),
)
PRECISIONS: Mapping[str, Precision] = {
    "float32": Precision(
        "none",
        (
            ("vllm", {"dtype": "float32"}),
            ("openvino", {"weights": "fp32", "dtype": "float32"}),
            ("llama_server", {"kind": "F32"}),
        ),
        {"W1": 1.05, "W2": 1.1, **dict.fromkeys(_SHARING, 1.2), "W6g": 1.5},
    ),
    "16 bits": Precision(
        "bf16",
        (
            ("vllm", {"dtype": "bfloat16"}),
            ("openvino", {"weights": "fp16", "dtype": "auto"}),
            ("llama_server", {"kind": "BF16"}),
        ),
        {"W2": 1.1, **dict.fromkeys(_SHARING, 1.2)},
    ),
    "8 bits": Precision("int8", _BITS8, {"W1": 1.3, "W2": 1.5, **dict.fromkeys(_SHARING, 2.0), "W6g": 2.0}),
    # Four bits save memory traffic, not always time: an engine's 8-bit run may be its faster one, so both are here.
    "4 bits": Precision(
        "gguf",
        (
            ("openvino", {"weights": "int4", "dtype": "auto"}),
            ("llama_server", {"kind": "file"}),
            *_BITS8,
        ),
        {"W1": 1.2, "W2": 1.5, **dict.fromkeys(_SHARING, 2.0)},
    ),
}


def _vllm(shelf: Shelf, dtype: str) -> PeerSpec:
    return PeerSpec("vllm", shelf.python("vllm"), {"folder": shelf.float_folder(), "dtype": dtype})


def _openvino(shelf: Shelf, weights: str, dtype: str) -> PeerSpec:
    options: dict[str, Any] = {"folder": shelf.openvino_model(weights), "dtype": dtype, "weights": weights}
    return PeerSpec("openvino", shelf.python("openvino"), options)


def _llama_server(shelf: Shelf, kind: str) -> PeerSpec:
    options: dict[str, Any] = {"gguf": shelf.gguf_model(kind), "binary": shelf.llama_server(), "slots": SLOTS}
    return PeerSpec("llama_server", options={**options, "kind": kind})


MAKERS: Mapping[str, Callable[..., PeerSpec]] = {"vllm": _vllm, "openvino": _openvino, "llama_server": _llama_server}
