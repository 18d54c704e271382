"""Writes a plugin distribution: metadata, one module, a README, and a test that runs the kind's conformance suite."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

from phloem.errors import ConfigError, PluginError
from phloem.registry import Registry

from ._templates import BODIES, PYPROJECT, README, SECTIONS, TEST

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def scaffold(kind: str, name: str, into: Path) -> Path:
    """Create `into/phloem-NAME`, installable and tested; returns the folder.

    Raises ConfigError for a bad name or an existing folder, PluginError for a kind without a template or a name that
    is taken by an installed plugin.
    """
    if kind not in BODIES:
        raise PluginError(f"there is no template for kind '{kind}' (there are for: {', '.join(sorted(BODIES))})")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"'{name}' cannot be a plugin's name: use lower-case letters, digits, '-' and '_'")
    if name in registry_names(kind):
        raise PluginError(f"a {kind} plugin named '{name}' is installed already", hint="choose another name")
    folder = into / f"phloem-{name.replace('_', '-')}"
    if folder.exists():
        raise ConfigError(f"{folder} exists already")
    body, suite, attributes = BODIES[kind]
    module = f"phloem_{name.replace('-', '_')}"
    words = {
        "kind": kind,
        "name": name,
        "module": module,
        "distribution": folder.name,
        "cls": "".join(part.capitalize() for part in re.split("[-_]", name)),
        "suite": suite,
        "attributes": attributes,
        "section": Template(SECTIONS[kind]).substitute(name=name),
    }
    files = {"pyproject.toml": PYPROJECT, "README.md": README, f"{module}.py": body, f"test_{module}.py": TEST}
    folder.mkdir(parents=True)
    for file, template in files.items():
        (folder / file).write_text(Template(template).substitute(words).lstrip("\n"), encoding="utf-8")
    return folder


def registry_names(kind: str) -> list[str]:
    """Names that are taken."""
    return Registry().names(kind)
