"""Models in Hugging Face's layout: a folder with config.json, *.safetensors and tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phloem.errors import ModelError
from phloem.interfaces import TokenizerData

from .known import served_name
from .progress import Progress

if TYPE_CHECKING:
    import torch

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FolderSource:
    """A `ModelSource` over a folder."""

    format = "safetensors"

    def __init__(self, path: Path, *, progress: bool = False) -> None:
        """Read config.json and generation_config.json; raises ModelError if the first is missing or broken."""
        self.path, self.name = str(path), served_name(str(path))
        self._folder = path
        self._progress = progress
        config = read_json(path / "config.json")
        if config is None:
            raise ModelError(
                f"{path} has no config.json, so it is not a model folder",
                hint="give a folder with config.json, *.safetensors and tokenizer.json, or a .gguf file",
            )
        self.config = config
        self.eos_token_ids = self._eos()

    def tokenizer(self) -> TokenizerData:
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja (or .json)."""
        file = self._folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{self.path} has no tokenizer.json",
                hint="save the tokenizer with transformers' AutoTokenizer(...).save_pretrained(folder) "
                "and put its tokenizer.json there",
            )
        config = read_json(self._folder / "tokenizer_config.json") or {}
        saved = read_json(self._folder / "special_tokens_map.json") or {}
        named = {key: config.get(key, saved.get(key)) for key in _SPECIAL}
        special = {key: _content(value) for key, value in named.items() if value}
        return TokenizerData(
            json=file.read_text(encoding="utf-8"),
            chat_template=self._chat_template(config),
            special_tokens=special,
        )

    def tensors(self, blocks: frozenset[str] = frozenset()) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of all shards, memory-mapped, in the dtype of the file: there are no blocks in it."""
        from safetensors import SafetensorError, safe_open

        shards = self._shards()
        with Progress("Loading weights", total=len(shards), enabled=self._progress) as bar:
            for done, shard in enumerate(shards, start=1):
                try:
                    with safe_open(shard, framework="pt") as file:
                        for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                            yield name, file.get_tensor(name)
                except SafetensorError as error:
                    raise ModelError(f"{shard} is damaged: {error}", hint="copy or download the file again") from error
                bar.update(done)

    def _shards(self) -> list[Path]:
        index = read_json(self._folder / "model.safetensors.index.json")
        if index is None:
            single = self._folder / "model.safetensors"
            shards = [single] if single.is_file() else sorted(self._folder.glob("*.safetensors"))
        else:
            shards = [self._folder / name for name in sorted(set(index.get("weight_map", {}).values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ModelError(
                f"{self.path} lacks {', '.join(missing)}, named in its model.safetensors.index.json",
                hint="copy the missing files into the folder",
            )
        if not shards:
            raise ModelError(
                f"{self.path} has no *.safetensors file",
                hint="convert other formats with transformers' save_pretrained(folder), or give a .gguf file",
            )
        return shards

    def _eos(self) -> tuple[int, ...]:
        generation = read_json(self._folder / "generation_config.json") or {}
        text_config = self.config.get("text_config") or {}
        for value in (generation.get("eos_token_id"), self.config.get("eos_token_id"), text_config.get("eos_token_id")):
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        return ()

    def _chat_template(self, config: dict[str, Any]) -> str | None:
        jinja = self._folder / "chat_template.jinja"
        if jinja.is_file():
            return jinja.read_text(encoding="utf-8")
        template = (read_json(self._folder / "chat_template.json") or config).get("chat_template")
        if isinstance(template, list):  # several named templates: transformers uses the one called "default"
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        return template


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no such file; raises ModelError if it is not a JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="copy or download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds {type(value).__name__}, expected a JSON object")
    return value


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
