"""The core's own options of every section, with their defaults; a plugin's `Options` are mixed in when it is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from .config_sizes import AutoSize as AutoSize
from .config_sizes import Size as Size
from .errors import PluginError
from .registry import Registry, did_you_mean


class Section(BaseModel):
    """A part of the configuration; immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Secret(Section):
    """A value kept elsewhere: `{env: NAME}` or `{file: path}`. Only the source is ever dumped or sent."""

    env: str | None = None
    """Environment variable that holds it."""
    file: str | None = None
    """File whose first line holds it."""

    _value: SecretStr = PrivateAttr(default=SecretStr(""))

    @model_validator(mode="before")
    @classmethod
    def _source_only(cls, data: Any) -> Any:
        if not isinstance(data, (Mapping, Secret)) or (isinstance(data, Mapping) and len(data) != 1):
            raise PydanticCustomError("secret", "a secret is never written out: say {env: NAME} or {file: path}")
        return data

    @property
    def value(self) -> SecretStr:
        """The secret itself, as read when the configuration was loaded."""
        return self._value

    def resolve(self, env: Mapping[str, str]) -> None:
        """Read the source; ValueError says what is missing. Called once, by `load_config`."""
        if self.env is not None:
            if not env.get(self.env):
                raise ValueError(f"the environment variable {self.env} is not set")
            self._value = SecretStr(env[self.env])
            return
        try:
            lines = Path(self.file or "").expanduser().read_text().splitlines()
        except OSError as error:
            raise ValueError(f"the file {self.file} cannot be read: {error.strerror}") from error
        if not lines or not lines[0].strip():
            raise ValueError(f"the first line of {self.file} is empty")
        self._value = SecretStr(lines[0].strip())


class PluginSection(Section):
    """A section that chooses a plugin; the plugin's options stand beside the core's, flat."""

    use: str
    """Name of the plugin, `module:Class`, or `./file.py:Class`."""

    plugin: ClassVar[type[Any] | None] = None  # None: `auto` or `none`

    def options(self) -> Any:
        """This section as the plugin's own `Options`."""
        options = type(self).plugin.Options  # type: ignore[union-attr]
        return options.model_construct(**{name: getattr(self, name) for name in options.model_fields})


class ModelSection(PluginSection):
    """What is served."""

    use: str = "auto"
    """Model plugin; `auto` takes `native` where it can serve the model exactly, else `transformers`."""
    path: str = "smollm2-135m"
    """A known name, a folder, a GGUF file, or a hub id."""
    name: str | None = None
    """What the API calls the model; default: derived from `path`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV; `auto` is float32 on a CPU and the checkpoint's own type on a GPU."""


class QuantSection(PluginSection):
    """How the model's matrices are kept and multiplied (docs/quantization.md)."""

    use: str = "auto"
    """Quant plugin; `auto` keeps a file's blocks as they are where they can be run (`stored`), else it is `none`."""


class ComponentsSection(Section):
    """What each kind of state group keeps in the prefix tree."""

    full: PluginSection = PluginSection(use="full")
    """For layers that see everything."""
    window: PluginSection = PluginSection(use="window")
    """For layers with a sliding window."""
    recurrent: PluginSection = PluginSection(use="recurrent")
    """For layers that keep one state."""

    @model_validator(mode="after")
    def _serve(self) -> ComponentsSection:
        for kind, section in self:
            able = getattr(section.plugin, "capabilities", {kind})
            if kind not in able:
                raise ValueError(f"'{section.use}' is for layers of kind {' or '.join(sorted(able))}, not for {kind}")
        return self


class HostSection(Section):
    """Host memory below the KV pool."""

    size: Annotated[Size, Field(ge=1)]
    """Bytes of KV that are kept there."""
    write: Literal["through", "hot", "back"] = "through"
    """When KV is copied there, and to the disk: as it is computed, when another request has found it in the pool
    (`hot`), or before it is evicted from the pool (`back`)."""


class PinSection(Section):
    """A prefix that is computed when the engine starts and stays in the cache: a text, messages, or token ids."""

    name: str = Field(min_length=1)
    """To unpin it by; each has its own."""
    text: str | None = None
    """What prompts begin with."""
    messages: tuple[dict[str, str], ...] | None = None
    """First messages of chats, such as `[{role: system, content: ...}]`: what the model's chat template makes of them,
    up to where the next message's text begins."""
    token_ids: tuple[int, ...] | None = None
    """Token ids that prompts begin with."""
    salt: str | None = None
    """As requests that are to find it have it (`cache_salt`)."""
    adapter: str | None = None
    """Likewise."""
    routing_key: str | None = None
    """Likewise, for a key scheme that reads it."""

    @model_validator(mode="after")
    def _one_prompt(self) -> PinSection:
        given = [name for name in ("text", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of text, messages, token_ids; it has {' and '.join(given) or 'none'}")
        return self


def _own_names(pins: tuple[PinSection, ...]) -> tuple[PinSection, ...]:
    """Raises for each pin whose name an earlier one has, at its place."""
    names = [pin.name for pin in pins]
    twice = [i for i, name in enumerate(names) if name in names[:i]]
    lines: list[InitErrorDetails] = [
        {"type": _problem("an earlier pin has this name"), "loc": (i, "name"), "input": names[i]} for i in twice
    ]
    if lines:
        raise ValidationError.from_exception_data("pins", lines)
    return pins


class CacheSection(PluginSection):
    """Where KV is kept, and what of it is shared."""

    use: str = "auto"
    """Cache plugin; `auto` takes `radix`, `swa` for models with sliding windows, `hybrid` for those with recurrent
    layers."""
    page_size: Annotated[Size, Field(ge=1)] = 1
    """Consecutive slots per page, in tokens."""
    size: AutoSize = "auto"
    """Memory of the KV pool in bytes; `auto` takes what the machine can spare."""
    tokens: Annotated[Size, Field(ge=1)] | None = None
    """Slots of the KV pool, in tokens; wins over `size`."""
    window_every: Annotated[Size, Field(ge=1)] = 2048
    """Where layers with a window have a pool of their own (`swa`, `chunk`): besides what running requests need, it
    keeps one window for every so many tokens of the pool. An ended request takes up to two: before the end of its
    prompt and before that of its answer."""
    snapshot_every: Annotated[Size, Field(ge=1)] = 256
    """Of recurrent layers (`hybrid`) the cache keeps one state for every so many tokens of the pool; an ended
    conversation uses two, at the ends of its prompt and of its answer."""
    eviction: PluginSection = PluginSection(use="lru")
    """Which unused prefix goes first (plugin kind `eviction`)."""
    components: ComponentsSection = ComponentsSection()
    """What the groups of a model's layers keep in the prefix tree (plugin kind `component`), by the kind of group."""
    key: PluginSection = PluginSection(use="none")
    """What prefixes are compared by (plugin kind `key`); `none`: their tokens."""
    host: HostSection | None = None
    """Host memory below the pool: `{size: 2GiB, write: through}`; absent: none."""
    disk: PluginSection = PluginSection(use="none")
    """What outlives the process (plugin kind `storage`): `{path: ./kv, size: 20GiB}`, with `use: file` where another is
    not named; absent: none."""
    pin_share: float = Field(default=0.0, ge=0, lt=1)
    """Most of the KV pool that pinned prefixes may keep, taken off the longest request; 0: nothing can be pinned."""
    pins: Annotated[tuple[PinSection, ...], AfterValidator(_own_names)] = ()
    """Prefixes that are pinned from the start, within `pin_share`: `[{name: system, text: ...}]`."""

    @model_validator(mode="after")
    def _whole_pages(self) -> CacheSection:
        if self.tokens is not None and self.tokens % self.page_size:
            pages, rest = divmod(self.tokens, self.page_size)
            fitting = " or ".join(str(n * self.page_size) for n in (pages, pages + 1) if n)
            raise ValueError(
                f"tokens {self.tokens} = {pages} pages of page_size {self.page_size} + {rest}: use {fitting}"
            )
        return self


class ScheduleSection(PluginSection):
    """Who runs, and how much of each step."""

    use: str = "lpm"
    """Schedule policy."""
    max_tokens_per_step: Annotated[Size, Field(ge=1)] = 2048
    """Query tokens of one forward pass, prompts and outputs together."""
    chunk: Annotated[Size, Field(ge=1, default_factory=lambda data: min(512, data.get("max_tokens_per_step", 512)))]
    """Most prompt tokens of one request in one step; default 512, or `max_tokens_per_step` where that is less."""
    max_running: Annotated[Size, Field(ge=1)] = 64
    """Requests that run at the same time."""
    max_waiting: Annotated[Size, Field(ge=1)] = 4096
    """Requests that may wait; one more is refused (HTTP 429)."""
    hold_share: float = Field(default=0.5, ge=0, le=1)
    """Most of the KV pool that ended calls of programs may keep locked to be continued; running requests go first."""
    hold_idle_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds without use after which such a hold ends."""

    @model_validator(mode="after")
    def _chunk_fits(self) -> ScheduleSection:
        if self.chunk > self.max_tokens_per_step:
            raise ValueError(
                f"chunk {self.chunk} > max_tokens_per_step {self.max_tokens_per_step}: a chunk must fit in one step; "
                f"lower chunk to {self.max_tokens_per_step} or raise max_tokens_per_step to {self.chunk}"
            )
        return self


class GrammarSection(PluginSection):
    """What enforces JSON schemas, regular expressions, grammars and choices."""

    use: str = "xgrammar"
    """Grammar backend; `auto` takes, per constraint, the first of xgrammar, llguidance and outlines that enforces all
    of it; `none` refuses constrained requests. The default becomes `none` where xgrammar is not installed."""
    also: tuple[str, ...] = ()
    """Further backends that a request may name (`grammar_backend`)."""
    whitespace: Literal["compact", "flexible"] = "compact"
    """Between JSON's parts: `compact` is one space after `,` and `:`, `flexible` leaves it to the model, bounded."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Processes that compile; each works on one new constraint at a time, and on up to two that take long."""
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds of CPU after which a compilation is killed and its request refused; ten times as many on the clock."""
    memory: Annotated[Size, Field(ge=1)] = 2 * 1024**3
    """Bytes that one compilation may allocate; each of `workers` has up to three at a time."""
    cache_size: Annotated[Size, Field(ge=0)] = 256 * 1024**2
    """Bytes of compiled grammars that are kept, least recently used go first."""
    max_source: Annotated[Size, Field(ge=1)] = 1024**2
    """Largest constraint in bytes, as compact JSON where it is JSON; a longer one is refused, before it is read."""


class AttentionSection(PluginSection):
    """The attention kernel."""

    use: str = "auto"
    """Attention plugin."""


class AttentionPair(Section):
    """Different kernels for prompts and for single tokens."""

    prefill: AttentionSection
    """Used where a segment has many query tokens."""
    decode: AttentionSection
    """Used where every segment has few."""


class EngineSection(Section):
    """The loop and the device it runs on."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU where torch sees one."""
    threads: AutoSize = "auto"
    """CPU threads of torch; `auto` leaves torch its own choice, which heeds OMP_NUM_THREADS. Beside other busy programs
    fewer threads are faster: those of one step wait for each other."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Prepare the next step while the device runs this one; `auto` is off on a CPU."""
    seed: int | None = None
    """Seed of requests that bring none; unset: every run differs."""
    context_length: Annotated[Size, Field(ge=1)] | None = None
    """Most tokens of prompt and output; default: the model's own limit."""
    draft_tokens: Annotated[Size, Field(ge=0)] = 16
    """Most draft nodes per request and step."""
    draft_size: Literal["adaptive", "fixed"] = "adaptive"
    """`adaptive` verifies as many nodes as pay, by what a request's drafts came to and what rows cost at the present
    batch, which takes about a second to measure at start; `fixed` verifies all that is proposed. What a grammar forces
    is always verified."""
    verify: Literal["match", "rejection"] = "match"
    """`match` draws the model's own token and follows a draft where it is the same: seeded outputs repeat.
    `rejection` is for one drafter that draws what it proposes (`draft`), and accepts more of it at temperatures above
    0, with the same distribution; requests with a seed are verified by `match`."""
    check: bool = False
    """Verify slot accounting after every step: for tests and bug hunts."""


def name_and_options(choice: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A plugin that is chosen by its name, or by a mapping of `use` and its options."""
    if isinstance(choice, str):
        return choice, {}
    return str(choice.get("use", "")), {key: value for key, value in choice.items() if key != "use"}


def _known(kind: str, *words: str) -> AfterValidator:
    """Only the server uses these plugins: names are checked against metadata, options by importing the plugin."""

    def check(choice: Any) -> Any:
        name, given = name_and_options(choice)
        known = [*words, *Registry().names(kind)]
        if ":" not in name and name not in known:
            raise _problem(f"no {kind} plugin is named '{name}' {did_you_mean(name, known)}")
        if given and name in words:
            raise _problem(f"'{name}' has no options")
        if given:
            _check_options(kind, name, given)
        return choice

    return AfterValidator(check)


def _check_options(kind: str, name: str, given: dict[str, Any]) -> None:
    """Raises what is wrong with a plugin's options, each with its own place, or that the plugin cannot be loaded."""
    try:
        plugin = Registry().load(kind, name)
    except PluginError as error:
        raise _problem(error.message + (f"; {error.hint}" if error.hint else "")) from None
    try:
        plugin.Options.model_validate(given)
    except ValidationError as error:
        lines: list[InitErrorDetails] = []
        for one in error.errors():
            if one["type"] == "extra_forbidden":
                fields = plugin.Options.model_fields
                near = did_you_mean(str(one["loc"][-1]), fields) if fields else "(it has none)"
                text = f"{kind} plugin '{name}' has no such option {near}"
            else:
                text = f"{one['msg'].removeprefix('Value error, ')}, got {one['input']!r}"
            lines.append({"type": _problem(text), "loc": one["loc"], "input": one["input"]})
        raise ValidationError.from_exception_data(name, lines) from None


def _problem(text: str) -> PydanticCustomError:
    return PydanticCustomError("plugin", "{problem}", {"problem": text})


class ServerSection(Section):
    """The HTTP shell."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=30000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    apis: tuple[Annotated[str | dict[str, Any], _known("api")], ...] = ("openai", "native", "program")
    """Route sets to mount (plugin kind `api`): names, or `{use: NAME, ...}` with options."""
    tool_parser: Annotated[str | dict[str, Any], _known("parser", "auto", "none")] = "auto"
    """How calls of tools are written: a plugin of kind `parser`, or `{use: NAME, ...}` with its options; `auto` goes by
    the model's chat template, `none` refuses tools."""
    reasoning_parser: Annotated[str | dict[str, Any], _known("parser", "auto", "none")] = "auto"
    """How thoughts are told from the answer, likewise; `none` leaves them in it."""
    api_key: Secret | None = None
    """What clients must send as a bearer token: `{env: NAME}` or `{file: path}`."""
    cors: tuple[str, ...] = ()
    """Origins that browsers may call from; `"*"` is any."""
    max_body: Annotated[Size, Field(ge=1)] = 4 * 1024**2
    """Largest request body in bytes. While one is read nothing else is answered: 10 to 35 ms a megabyte."""
    request_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds after which a request is aborted."""
    drain_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Seconds that running requests get to finish after SIGTERM."""
    heartbeat_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Seconds between the model process's signs of life."""
    hang_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds without progress while work is pending after which the model process counts as hung."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of a dead model process within ten minutes before the server gives up."""


class EventsSection(PluginSection):
    """What others are told of the cache (docs/events.md)."""

    use: str = "none"
    """What publishes the events outside; `none`: only `Engine.cache_events` tells them, to who asks."""
    block_size: AutoSize = "auto"
    """Tokens per block, whole pages; `auto` is 64, or as little more as makes whole pages. All engines behind one
    router need the same."""
    backlog: Annotated[Size, Field(ge=1)] = 64 * 1024**2
    """Bytes of tokens that may wait to be hashed. Where more come, subscribers are told the whole state anew."""


class SpecSection(PluginSection):
    """One drafter."""


class ObserverSection(PluginSection):
    """One observer."""


def sampler_name(use: str) -> str:
    """What requests call a processor: its plugin's name, or its class; clients need not know the server's files."""
    return use.rpartition(":")[2]


class SamplerSection(PluginSection):
    """One custom logits processor; requests ask for it by its `sampler_name`."""
