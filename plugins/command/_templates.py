"""The texts `phloem plugins new` fills in: `$$cls`, `$$name`, ... A body is the smallest plugin worth starting from."""

from __future__ import annotations

from ._template_head import CLASS as _CLASS
from ._template_head import HEAD as _HEAD
from ._templates_cache import CACHE, COMPONENT, STORAGE

PYPROJECT = """
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "$distribution"
version = "0.1.0"
description = "A plugin of kind $kind for phloem."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["phloem>=0.1"]

[project.optional-dependencies]
dev = ["phloem[testing]"]

[project.entry-points."phloem.$kind"]
$name = "$module:$cls"

[tool.hatch.build.targets.wheel]
only-include = ["$module.py"]
"""

README = """
# $distribution

A plugin of kind `$kind` for phloem.

    pip install -e '.[dev]'
    pytest                       # the kind's conformance suite
    phloem plugins list --kind $kind

Installing it activates nothing; a configuration names it:

```yaml
$section
```
"""

TEST = '''
"""The plugin passes the conformance suite of its kind."""

from phloem.testing import $suite

from $module import $cls


class Test$cls($suite):
    plugin = $cls
$attributes'''

SECTIONS = {
    "api": "server: {apis: [openai, $name]}",
    "attention": "attention: {use: $name}",
    "quant": "quant: {use: $name}",
    "cache": "cache: {use: $name}",
    "component": "cache: {components: {window: {use: $name}}}",
    "events": "events: {use: $name}",
    "eviction": "cache: {eviction: {use: $name}}",
    "grammar": "grammar: {use: $name}",
    "key": "cache: {key: {use: $name}}",
    "observer": "observers: [{use: $name}]",
    "parser": "server: {tool_parser: $name}",
    "sampler": "samplers: [{use: $name}]",
    "schedule": "schedule: {use: $name}",
    "spec": "spec: [{use: $name}]",
    "storage": "cache: {disk: {use: $name}}",
}

_SCHEDULE = f'''{_HEAD}from collections.abc import Iterable, Sequence

from phloem.interfaces import PluginContext
from phloem.request import Request
from pydantic import BaseModel, ConfigDict, Field
{_CLASS}
        patience: int = Field(default=100, ge=1)
        """No request is overtaken by more later ones than this."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        longest = context.model.context_length if context.model else 1 << 20
        self._charge = longest / options.patience

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Shortest prompt first; a charge per arrival keeps long prompts from starving."""
        return sorted(waiting, key=lambda request: request.prompt_len + request.arrival * self._charge)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """None leaves the choice to the core."""
        return None
'''

_EVICTION = f'''{_HEAD}from phloem.interfaces import EvictionNode, PluginContext
from pydantic import BaseModel, ConfigDict
{_CLASS}
    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    def key(self, node: EvictionNode) -> tuple[int, int]:
        """The smallest key goes first: here the least used, then the least recently used."""
        return node.hits, node.last_access
'''

_KEY = f'''{_HEAD}from array import array
from zlib import crc32

from phloem.interfaces import PluginContext
from phloem.messages import GenerateCall
from pydantic import BaseModel, ConfigDict
{_CLASS}
    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    def keys(self, tokens: array[int], start: int, call: GenerateCall) -> array[int]:
        """What the cache compares instead of tokens[start:]: here no two routing keys share anything."""
        mark = crc32((call.routing_key or "").encode()) << 31
        return array("q", (mark | token for token in tokens[start:]))
'''

_OBSERVER = f'''{_HEAD}import logging

from phloem.batch import StepStats
from phloem.hooks import hookimpl
from phloem.interfaces import PluginContext
from pydantic import BaseModel, ConfigDict, Field
{_CLASS}
        every: int = Field(default=100, ge=1)
        """Steps between two lines of log."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._every = options.every
        self._log = logging.getLogger("phloem.$name")

    @hookimpl
    def step(self, stats: StepStats) -> None:
        """Called after each step, on the loop's thread: be quick."""
        if stats.step % self._every == 0:
            self._log.info("step %d: %d requests, %d tokens", stats.step, stats.requests, stats.forward_tokens)

    @hookimpl
    def stop(self) -> None:
        """The engine ends: close what is open."""
        self._log.info("the engine has ended")
'''

_SPEC = f'''{_HEAD}from phloem.drafts import Draft
from phloem.interfaces import DraftContext, PluginContext
from pydantic import BaseModel, ConfigDict, Field
{_CLASS}
        max_tokens: int = Field(default=4, ge=1)
        """Longest draft."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._max_tokens = options.max_tokens

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """Whatever followed the last token where it occurred before. A wrong guess costs time, never correctness."""
        tokens = context.tokens
        for i in range(len(tokens) - 2, -1, -1):
            if tokens[i] == tokens[-1]:
                return Draft.chain(tokens[i + 1 : i + 1 + min(budget, self._max_tokens)])
        return None

    def forget(self, request_id: str) -> None:
        """The request has ended: drop what was kept for it."""
'''

_SAMPLER = f'''{_HEAD}from collections.abc import Sequence
from typing import Any

import torch
from phloem.errors import RequestError
from phloem.interfaces import PluginContext, RowContext
from pydantic import BaseModel, ConfigDict
{_CLASS}
    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    def validate(self, arguments: dict[str, Any]) -> None:
        """A request says `logits_processors: {{"$name": {{"scale": 0.5}}}}`."""
        scale = arguments.get("scale", 1.0)
        if set(arguments) - {{"scale"}} or not isinstance(scale, (int, float)) or not 0 < scale <= 10:
            raise RequestError("$name takes scale, in (0, 10]", param="logits_processors")

    def process(self, logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
        """Edit logits [len(rows), vocab] in place, each row by its own context only."""
        scales = torch.tensor([float(row.arguments.get("scale", 1.0)) for row in rows], device=logits.device)
        logits.mul_(scales[:, None])
'''

_ATTENTION = f'''{_HEAD}from phloem.batch import Batch
from phloem.interfaces import AttentionStep, PluginContext
from phloem.pool import KVStore
from phloem.testing import NaiveAttention
from pydantic import BaseModel, ConfigDict
{_CLASS.replace("frozenset()", 'frozenset({"tree_mask", "window", "softcap", "gqa"})')}
    def __init__(self, options: Options, context: PluginContext) -> None:
        self._kernel = NaiveAttention()  # the definition, slow: replace it, and keep the test

    def prepare(self, batch: Batch, kv: KVStore) -> AttentionStep:
        """Everything that is the same for all layers happens here, once a step."""
        return self._kernel.prepare(batch, kv)
'''

_QUANT = f'''{_HEAD}import torch
from phloem.interfaces import PluginContext
from phloem.linear import Linear
from pydantic import BaseModel, ConfigDict
{_CLASS}
    blocks = frozenset()  # kinds of stored blocks, such as Q8_0, that it runs as they are

    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    def linear(self, linear: Linear) -> Linear:
        """Called once per matrix, while a model loads."""
        return HalfLinear(linear)


class HalfLinear(Linear):
    """Half the memory of float32; widened for each product, which is slow: replace it, and keep the test."""

    def __init__(self, linear: Linear) -> None:
        along = {{"before": linear.before, "gate": linear.gate, "after": linear.after}}
        super().__init__(linear.floats().half(), linear.bias, **along)

    def floats(self) -> torch.Tensor:
        """The weight as the products of `Linear` take it."""
        return super().floats().float()
'''

_GRAMMAR = f'''{_HEAD}from phloem.constraint import Constraint, Unenforced
from phloem.interfaces import Matcher, PluginContext
from phloem.testing import ToyGrammar
from pydantic import BaseModel, ConfigDict
{_CLASS.replace("frozenset()", 'frozenset({"regex", "choices"})')}
    def __init__(self, options: Options, context: PluginContext) -> None:
        self._toy = ToyGrammar(ToyGrammar.Options(), context)  # exact, slow: replace it, and keep the test

    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        """What `compile` would let pass of the constraint, by JSON pointer: refused, unless the request allows it."""
        return []

    def compile(self, constraint: Constraint) -> bytes:
        """All of the work, in another process; RequestError says what is wrong with the constraint."""
        return self._toy.compile(constraint)

    def matcher(self, constraint: Constraint, compiled: bytes) -> Matcher:
        """A matcher at its start, from what `compile` returned over there."""
        return self._toy.matcher(constraint, compiled)
'''

_PARSER = f'''{_HEAD}from collections.abc import Sequence
from typing import Any

from phloem.interfaces import ParserStream, PluginContext, Tool
from phloem.testing import FakeParser
from pydantic import BaseModel, ConfigDict
{_CLASS.replace("frozenset()", 'frozenset({"tools"})')}
    special = False  # True: the format's markers are special tokens
    think: tuple[str, str] | None = None  # what opens and closes a thought; with capability `reasoning`

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._fake = FakeParser(FakeParser.Options(), context)  # a format of its own: replace it, and keep the test

    @classmethod
    def matches(cls, template: str) -> bool:
        """True for the chat templates of your format; `auto` asks built-in parsers only."""
        return FakeParser.matches(template)

    def stream(self, tools: Sequence[Tool], prompt: str = "") -> ParserStream:
        """Reads one answer; however the text is cut, the result is the same."""
        return self._fake.stream(tools, prompt)

    def constraint(self, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
        """What `stream` reads, as a structural tag."""
        return self._fake.constraint(tools, choice, parallel)

    def instructions(self, tools: Sequence[Tool], parallel: bool) -> str:
        """What a model is told, if its template has no place for tools."""
        return self._fake.instructions(tools, parallel)

    def call_text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Earlier calls, as `stream` would read them."""
        return self._fake.call_text(calls)

    def result_text(self, name: str, content: str) -> str:
        """A tool's answer, as a user's message."""
        return self._fake.result_text(name, content)
'''

_EVENTS = f'''{_HEAD}from pathlib import Path

import msgspec
from phloem.events import EventBatch
from phloem.feed import Feed
from phloem.interfaces import PluginContext
from pydantic import BaseModel, ConfigDict
{_CLASS}
        path: str = "cache-events.jsonl"
        """File to append to."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.path = Path(options.path).resolve()
        self._file = self.path.open("ab")  # open here what may be refused

    def start(self, feed: Feed) -> None:
        """The state first, then each batch, on the feed's thread."""
        with feed.lock:
            self._write(feed.subscribe(self._write))

    def _write(self, batch: EventBatch) -> None:
        self._file.write(msgspec.json.encode(batch) + b"\\n")
        self._file.flush()

    def stop(self) -> None:
        """The engine ends, or never began."""
        self._file.close()
'''

# what a subscriber of the template above knows
_EVENTS_TEST = """
    def mirror(self, publisher):
        import msgspec
        from phloem.events import EventBatch
        from phloem.mirror import Mirror

        mirror = Mirror()
        for line in publisher.path.read_bytes().split(b"\\n")[:-1]:  # the last may be half a line yet
            mirror.apply(msgspec.json.decode(line, type=EventBatch))
        return mirror
"""

_API = f'''{_HEAD}from fastapi import APIRouter
from phloem.interfaces import PluginContext, Service
from pydantic import BaseModel, ConfigDict
{_CLASS}
    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    def router(self, service: Service) -> APIRouter:
        """Called before the model is loaded: read `service` inside the routes only."""
        router = APIRouter()

        @router.post("/$name/count")
        async def count(body: dict[str, str]) -> dict[str, int]:
            return {{"tokens": len(service.tokenizer.encode(body["text"]))}}

        return router
'''

# kind -> module text, suite, attributes of the test class
BODIES = {
    "api": (_API, "ApiSuite", ""),
    "attention": (_ATTENTION, "AttentionSuite", ""),
    "cache": (CACHE, "CacheSuite", ""),
    "component": (COMPONENT, "ComponentSuite", "    examples = 5\n"),
    "events": (_EVENTS, "EventsSuite", _EVENTS_TEST),
    "eviction": (_EVICTION, "EvictionSuite", ""),
    "grammar": (_GRAMMAR, "GrammarSuite", ""),
    "key": (_KEY, "KeySuite", ""),
    "observer": (_OBSERVER, "ObserverSuite", ""),
    "parser": (_PARSER, "ParserSuite", '    templates = ("<call>",)\n    texts = ("<call>no call</call>",)\n'),
    "quant": (_QUANT, "QuantSuite", ""),
    "sampler": (
        _SAMPLER,
        "SamplerSuite",
        '    arguments = {"scale": 0.5}\n    bad_arguments = ({"scale": -1}, {"x": 1})\n',
    ),
    "schedule": (_SCHEDULE, "ScheduleSuite", "    max_overtakes = 100\n"),
    "spec": (_SPEC, "SpecSuite", ""),
    "storage": (STORAGE, "StorageSuite", ""),
}
