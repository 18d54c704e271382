"""What each grammar backend makes of the JSON Schema test suite: python -m bench.json_schema [--write PAGE].

The suite is the one that jsonschema's source archive carries; pip fetches it once into the cache folder. Every schema
is compiled by every backend in a process that is killed when it takes too long. Then each instance is written as JSON
in the forms in which a backend might write it (order of properties, spaces, escapes, whole numbers), and fed byte by
byte: a valid one should be taken in one form at least, an invalid one in none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import resource
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from phloem.constraint import Constraint
from phloem.errors import PhloemError, RequestError
from phloem.interfaces import Grammar, Matcher, PluginContext
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.plugins.grammar._disjoint import whole
from phloem.registry import Registry

ARCHIVE = "jsonschema==4.26.0"
SUITE = Path("~/.cache/phloem/json-schema-test-suite").expanduser()
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
BACKENDS = ("xgrammar", "llguidance", "outlines")
SKIPPED = {"format"}  # says that formats are annotations only, which no backend here takes them for
CLASSES = ("enforced", "refused", "unreachable", "wrong")
SECONDS = 15.0  # per schema
MEMORY = 6 * 1024**3
END = 256


class Group(NamedTuple):
    """A schema of the suite with its instances, each valid or not."""

    draft: str
    file: str
    name: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...]


class Verdict(NamedTuple):
    """One of CLASSES; `details` say what was refused, or which instances went wrong."""

    kind: str
    details: tuple[str, ...] = ()


class ByteTokenizer:
    """A vocabulary of the 256 bytes and an end token: what a grammar plugin asks of a tokenizer."""

    vocab_size = END + 1
    special_ids = frozenset({END})

    def token_bytes(self, token: int) -> bytes:
        """The byte itself."""
        return b"<end>" if token == END else bytes([token])

    def token_text(self, token: int) -> str:
        """For messages and special tokens."""
        return self.token_bytes(token).decode(errors="replace")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """UTF-8."""
        return list(text.encode())


def load_backend(name: str) -> Grammar:
    """A plugin over bytes."""
    plugin: Any = Registry().load("grammar", name)
    spec = ModelSpec("bytes", END + 1, 4096, (LayerSpec(1, 4, 4),), eos_token_ids=(END,))
    tokenizer: Any = ByteTokenizer()
    grammar: Grammar = plugin(plugin.Options(), PluginContext("grammar", name, model=spec, tokenizer=tokenizer))
    return grammar


def fetch(folder: Path) -> None:
    """The suite by pip into a folder. Raises SystemExit where that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", scratch]
        done = subprocess.run([*command, ARCHIVE], capture_output=True, text=True)
        archives = list(Path(scratch).glob("*.tar.gz"))
        if done.returncode or not archives:
            raise SystemExit(
                f"the JSON Schema test suite is not in {folder}, and pip cannot fetch it with {ARCHIVE}:\n{done.stderr}"
                "hint: unpack the folder json/tests of jsonschema's source archive there, or say --suite FOLDER"
            )
        with tarfile.open(archives[0]) as archive:
            for member in archive.getmembers():
                _, _, rest = member.name.partition("/json/tests/")
                if rest and member.isfile() and ".." not in rest:
                    target = folder / rest
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]


def groups(folder: Path) -> Iterator[Group]:
    """All schemas of the suite: the required tests, and those of formats."""
    for draft, dialect in DRAFTS.items():
        for path in (
            *sorted((folder / draft).glob("*.json")),
            *sorted((folder / draft / "optional/format").glob("*.json")),
        ):
            if path.stem in SKIPPED:
                continue
            file = f"format: {path.stem}" if path.parent.name == "format" else path.stem
            for group in json.loads(path.read_text()):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": dialect} | schema
                tests = tuple((test["data"], test["valid"]) for test in group["tests"])
                yield Group(draft, file, group["description"], schema, tests)


def spellings(instance: Any, names: Sequence[str]) -> set[bytes]:
    """Forms in which a backend might write an instance. `names`: all properties of the schema, in its order."""
    ordered = _ordered(instance, {name: i for i, name in enumerate(names)})
    versions = [instance, ordered, whole(ordered)]
    if isinstance(instance, dict) and len(instance) <= 4:
        versions += [dict(items) for items in itertools.permutations(whole(ordered).items())]
    layouts: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"ensure_ascii": True}]
    return {
        json.dumps(version, **({"ensure_ascii": False} | layout)).encode(errors="surrogatepass")
        for version in versions
        for layout in layouts
    }


def _ordered(value: Any, places: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_ordered(item, places) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _ordered(value[key], places) for key in sorted(value, key=lambda key: places.get(key, len(places)))}


def _names(schema: Any) -> list[str]:
    """All names of properties in a schema, in order."""
    if isinstance(schema, list):
        return [name for item in schema for name in _names(item)]
    if not isinstance(schema, dict):
        return []
    own = [*(schema["properties"] if isinstance(schema.get("properties"), dict) else ())]
    return list(dict.fromkeys(own + [name for item in schema.values() for name in _names(item)]))


def _takes(start: Matcher, text: bytes) -> bool:
    matcher = start.fork()
    return all(matcher.accept(byte) for byte in text) and matcher.accept(END)


def judge(grammar: Grammar, group: Group) -> Verdict:
    """What one backend makes of one schema."""
    constraint = Constraint(kind="json_schema", value=json.dumps(group.schema, ensure_ascii=False))
    try:
        if missing := grammar.unenforced(constraint):
            return Verdict("refused", tuple(f"{pointer}: {why}" for pointer, why in missing))
        matcher = grammar.matcher(constraint, grammar.compile(constraint))
    except RequestError as error:
        return Verdict("refused", (error.message,))
    names = _names(group.schema)
    wrong: list[str] = []
    unreachable: list[str] = []
    for instance, valid in group.tests:
        taken = [text for text in sorted(spellings(instance, names)) if _takes(matcher, text)]
        if taken and not valid:
            wrong.append(taken[0].decode(errors="replace"))
        elif valid and not taken:
            unreachable.append(json.dumps(instance, ensure_ascii=False))
    if wrong:
        return Verdict("wrong", tuple(wrong))
    return Verdict("unreachable", tuple(unreachable)) if unreachable else Verdict("enforced")


def _serve(connection: Connection, name: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    grammar = load_backend(name)
    judge(grammar, Group("", "", "", True, ()))  # whatever the library imports late
    connection.send(None)
    while (group := connection.recv()) is not None:
        connection.send(judge(grammar, group))


class Judge:
    """A backend in a process of its own, started anew when it dies or takes too long."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.name), daemon=True)
        self.process.start()
        theirs.close()
        self.connection.recv()

    def __call__(self, group: Group) -> Verdict:
        """The verdict; a schema that costs too much counts as refused, as the engine's limits do it."""
        try:
            self.connection.send(group)
            if self.connection.poll(SECONDS):
                return self.connection.recv()  # type: ignore[no-any-return]
            why = f"took longer than {SECONDS:g} s"
        except (EOFError, OSError):
            why = "its process died"
        self.close()
        self._start()
        return Verdict("refused", (why,))

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(folder: Path, backends: Sequence[str]) -> dict[str, list[tuple[Group, Verdict]]]:
    """All verdicts by backend."""
    found = list(groups(folder))
    verdicts = {}
    for name in backends:
        judge_one = Judge(name)
        verdicts[name] = [(group, judge_one(group)) for group in found]
        judge_one.close()
    return verdicts


def page(verdicts: dict[str, list[tuple[Group, Verdict]]]) -> str:
    """The tables, and every instance that was wrongly accepted."""
    lines = [INTRODUCTION.strip(), ""]
    for draft in DRAFTS:
        rows: dict[str, dict[str, Counter[str]]] = {}
        for name, judged in verdicts.items():
            for group, verdict in judged:
                if group.draft == draft:
                    rows.setdefault(group.file, {}).setdefault(name, Counter())[verdict.kind] += 1
        total = {name: sum((row[name] for row in rows.values()), Counter[str]()) for name in verdicts}
        lines += [f"## {draft}", "", f"| file | {' | '.join(verdicts)} |", "|---" * (len(verdicts) + 1) + "|"]
        for file, row in [*rows.items(), ("**all**", total)]:
            lines.append(f"| {file} | {' | '.join(_cell(row[name]) for name in verdicts)} |")
        lines.append("")
    lines += ["## Wrongly accepted", ""]
    wrong = [
        f"- {name}: {group.draft}, {group.file}, {group.name}: `{verdict.details[0]}`"
        for name, judged in verdicts.items()
        for group, verdict in judged
        if verdict.kind == "wrong"
    ]
    return "\n".join([*lines, *(wrong or ["None."]), ""])


def _cell(counts: Counter[str]) -> str:
    return " / ".join(str(counts[kind]) for kind in CLASSES)


INTRODUCTION = """
# JSON Schema, keyword by keyword

Written by `python -m bench.json_schema --write docs/grammar-conformance.md`: what each grammar backend makes of the
required tests of the [JSON Schema test suite](https://github.com/json-schema-org/JSON-Schema-Test-Suite), and of those
of formats. A cell counts schemas: **enforced** (every valid instance can be written, no invalid one can) / **refused**
(with the pointer of the keyword; `strict: false` lets it pass, out loud) / **unreachable** (no invalid instance can be
written, and some valid ones cannot either) / **wrong** (an invalid instance can be written: a bug).

Why valid instances cannot be written: a backend writes one form of a value (whole numbers without a point, properties
in the order of the schema, characters escaped where they must be), xgrammar and outlines close objects whose schema
names properties and is silent about others, outlines nests values of which a schema says nothing two levels deep, and
a format is the part of it that is usual. `format.json` of the suite is left out: it says that formats forbid nothing.
"""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, default=SUITE, help="folder with draft2020-12 and draft7")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this one; may be repeated")
    parser.add_argument("--write", type=Path, help="page to write; default: print it")
    parser.add_argument("--show", choices=CLASSES[1:], help="print every schema of this class with its details")
    options = parser.parse_args()
    if not any((options.suite / draft).is_dir() for draft in DRAFTS):
        if options.suite != SUITE:
            raise SystemExit(f"{options.suite} has no {' or '.join(DRAFTS)}")
        fetch(SUITE)
    try:
        verdicts = run(options.suite, options.backend or BACKENDS)
    except PhloemError as error:
        raise SystemExit(str(error)) from error
    for name, judged in verdicts.items() if options.show else ():
        for group, verdict in judged:
            if verdict.kind == options.show:
                print(f"{name}: {group.draft}/{group.file}: {group.name}: {'; '.join(verdict.details[:3])}")
    if options.write:
        options.write.write_text(page(verdicts))
    elif not options.show:
        print(page(verdicts))


if __name__ == "__main__":
    main()
