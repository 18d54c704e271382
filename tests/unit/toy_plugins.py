"""Plugins for tests of the loader: classes in files, and distributions that exist as metadata only."""

from __future__ import annotations

from pathlib import Path

POLICY = '''
from pydantic import BaseModel, ConfigDict, model_validator
from phloem.config_sections import Secret


class Policy:
    """A policy of the tests."""

    api = 1
    capabilities = frozenset()

    class Options(BaseModel):
        """Its options."""
        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
        depth: int = 3
        """How deep."""
        key: Secret | None = None

        @model_validator(mode="after")
        def _check(self):
            if self.depth == 13:
                raise ValueError("depth 13 brings bad luck")
            return self

    def __init__(self, options, context):
        if options.depth == 7:
            raise RuntimeError("no depth 7 today")
        self.options, self.context = options, context

    def order(self, waiting):
        return waiting

    def victim(self, running):
        return None


class Other(Policy):
    class Options(Policy.Options):
        width: int = 1


class Needy(Policy):
    requires = frozenset({"attention:teleport", "model:hidden_states"})


class Lonely(Policy):
    requires = frozenset({"spec:hidden"})


class Confused(Policy):
    requires = frozenset({"atention:tree_mask"})


class Silent(Policy):
    api = None


class Old(Policy):
    api = 0


class NoOptions:
    api = 1
    capabilities = frozenset()


class LooseOptions(Policy):
    class Options(BaseModel):
        pass


class WrongOrder(Policy):
    def order(self):
        return []


class Reserved(Policy):
    class Options(Policy.Options):
        chunk: int = 1


class Kernel:
    api = 1
    capabilities = frozenset({"tree_mask"})

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options, context):
        pass

    def prepare(self, batch, kv):
        return None
'''


def policy_file(folder: Path, name: str = "toy.py") -> Path:
    """A file with the classes above."""
    file = folder / name
    file.write_text(POLICY)
    return file


def distribution(
    folder: Path,
    name: str,
    entries: dict[str, dict[str, str]],
    *,
    version: str = "1.0",
    extra: dict[str, str] | None = None,
) -> None:
    """Metadata of an installed distribution: entry points by group, and `extra` -> requirement."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    for key, requirement in (extra or {}).items():
        lines += [f"Provides-Extra: {key}", f'Requires-Dist: {requirement}; extra == "{key}"']
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    text = ""
    for group, names in entries.items():
        text += f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
    (info / "entry_points.txt").write_text(text)
