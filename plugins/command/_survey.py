"""What can be told of an installed plugin without running a line of it: its source is read, never imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from phloem.interfaces import API
from phloem.registry import Found, extra_of


@dataclass(frozen=True, slots=True)
class Facts:
    """One plugin's line in the list. `remedy` mends what `status` complains of."""

    status: str  # "ok", "missing extra", "import error", "API mismatch"
    description: str = ""
    remedy: str | None = None


def survey(found: Found) -> Facts:
    """Status and description of a plugin, from its source."""
    module, _, attribute = found.target.partition(":")
    try:
        path, node = _definition(module, attribute, depth=3)
    except (LookupError, SyntaxError, UnicodeDecodeError) as error:
        reinstall = f"pip install --force-reinstall --no-deps {found.distribution}"
        return Facts("import error", str(error.args[0]), reinstall)
    description = (ast.get_docstring(node) or "").partition("\n")[0]
    spoken = _number(node, "api")
    if spoken not in (None, API):
        return Facts("API mismatch", description, f"it speaks plugin API {spoken}, this phloem speaks {API}")
    missing = next(_missing(path, module, depth=3), None)
    if missing is None:
        return Facts("ok", description)
    extra = extra_of(found, missing)
    if extra is None:
        return Facts("import error", description, f"pip install --upgrade {found.distribution}  # for '{missing}'")
    return Facts("missing extra", description, f"pip install '{found.distribution}[{extra}]'")


def _definition(module: str, attribute: str, depth: int) -> tuple[Path, ast.ClassDef | ast.Module]:
    """The file and the class behind `module:attribute`, through re-exports. LookupError if there is none."""
    path = _find(module)
    if path is None:
        raise LookupError(f"there is no module {module}")
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return path, node
        if isinstance(node, ast.ImportFrom) and depth:
            for alias in node.names:
                if (alias.asname or alias.name) == attribute:
                    return _definition(_absolute(node, module, path), alias.name, depth - 1)
    assigned = {t.id for n in tree.body for t in _targets(n) if isinstance(t, ast.Name)}
    if attribute in assigned:
        return path, tree
    raise LookupError(f"{module} has no {attribute}")


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _find(module: str) -> Path | None:
    """A module's source file. Python's own search imports the packages above it; this one does not."""
    search: list[str] | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _absolute(node: ast.ImportFrom, module: str, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, node.module] if node.module else package)


def _number(node: ast.ClassDef | ast.Module, name: str) -> object:
    for statement in node.body:
        if any(isinstance(target, ast.Name) and target.id == name for target in _targets(statement)):
            value = getattr(statement, "value", None)
            return value.value if isinstance(value, ast.Constant) else None
    return None


def _missing(path: Path, module: str, depth: int, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Top-level packages that the module, or a neighbour it imports, needs and that are not installed."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names, relative = [alias.name for alias in node.names], False
        elif isinstance(node, ast.ImportFrom):
            names, relative = [_absolute(node, module, path)], bool(node.level)
            names += [f"{names[0]}.{alias.name}" for alias in node.names if not node.module]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top == module.partition(".")[0]:
                near = _find(name) if depth and relative and name not in seen else None
                if near is not None:
                    yield from _missing(near, name, depth - 1, seen | {name, module})
            elif top not in sys.stdlib_module_names and PathFinder.find_spec(top) is None:
                yield top
