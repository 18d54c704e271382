"""Programs on an engine of this process. A path is tokens that stay as they are, and text that has none yet.

Tokens that were generated are never tokenised again. Appended text is tokenised when it is needed, together with its
left context; what forks have in common is one list of tokens, so the engine finds it by itself, and the group that a
run's calls carry makes them wait for each other's prefixes.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, Self

import msgspec

from phloem import choosing
from phloem.engine import Engine
from phloem.errors import AbortedError, RequestError
from phloem.growing import Growing
from phloem.interfaces import Service
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.results import Collector, Result

from ..roles import Roles, roles_of
from .base import Generation, Path, Selection

CAPABILITIES = frozenset(
    {
        "fork",
        "select",
        "group",
        "logprobs",
        "prompt_logprobs",
        "stop_regex",
        *["regex", "json_schema", "ebnf", "lark", "structural_tag", "choices"],
    }
)


class LocalBackend:
    """A backend on a `phloem.Engine`. Thread-safe; `close` closes the engine only if `make` made it."""

    capabilities = CAPABILITIES

    def __init__(self, engine: Engine, *, owned: bool = False) -> None:
        self.engine = engine
        self.service: Service = engine.service()
        self._owned = owned

    @cached_property
    def roles(self) -> Roles:
        """The texts of the model's chat format. Raises ModelError for a template that is no template."""
        return roles_of(self.engine.tokenizer)

    @classmethod
    def of(cls, engine: Engine) -> LocalBackend:
        """A backend on an engine that somebody else closes."""
        return cls(engine)

    @classmethod
    def make(cls, model: str | None = None, **sections: Any) -> LocalBackend:
        """A backend with an engine of its own; the arguments of `phloem.Engine`."""
        return OwnEngine(model, **sections)

    def start(self, *, priority: int = 0, salt: str | None = None, group: str | None = None) -> Path:
        """The empty path of a run. Runs of one group are each other's siblings, as the branches of one run are."""
        return LocalPath(Family(self, priority, salt, group))

    async def flush_cache(self) -> None:
        """Drop what is cached and not in use."""
        await self.service.flush_cache()

    async def info(self) -> dict[str, Any]:
        """The model and the engine's counters."""
        info = self.service.info
        model = {"model_name": info.model_name, "model_path": info.model_path}
        return model | {"max_total_tokens": info.max_total_tokens, "stats": await self.service.stats()}

    async def aclose(self) -> None:
        """`close`."""
        self.close()

    def close(self) -> None:
        """Close the engine, if it is this backend's own."""
        if self._owned:
            self.engine.close()

    shutdown = close  # SGLang's name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OwnEngine(LocalBackend):
    """A backend with an engine of its own in this process. Use it as a context manager, or call `shutdown()`."""

    def __init__(self, model: str | None = None, /, *, model_path: str | None = None, **sections: Any) -> None:
        """The arguments of `phloem.Engine`; `model_path` is SGLang's name of the first."""
        given = model if model is not None else model_path
        super().__init__(Engine(given, **sections) if given is not None else Engine(**sections), owned=True)


class Family:
    """What the paths of one run share."""

    def __init__(self, backend: LocalBackend, priority: int, salt: str | None, group: str | None) -> None:
        self.backend, self.engine, self.service = backend, backend.engine, backend.service
        self.tokenizer = backend.engine.tokenizer
        self.priority, self.salt = priority, salt
        self._own = f"program-{uuid.uuid4().hex[:12]}"
        self.group = group or self._own
        self._numbers = itertools.count()

    def name(self) -> str:
        """A name of a call or a hold, unique in the process."""
        return f"{self._own}-{next(self._numbers)}"

    def call(self, prompt: list[int], params: SamplingParams, **more: Any) -> GenerateCall:
        """A call that the engine knows to be of this run."""
        more |= {"priority": self.priority, "salt": self.salt}
        return GenerateCall(call_id=self.name(), prompt=prompt, params=params, **more)

    async def score(
        self, prompt: list[int], continuations: Sequence[Sequence[int]], **more: Any
    ) -> tuple[list[list[float]], dict[str, Any]]:
        """The log-probability of each token of each continuation, and the call's token counts."""
        call = self.call(prompt, SamplingParams(), score=[list(one) for one in continuations], stream=False, **more)
        scores: list[list[float]] = []
        meta: dict[str, Any] = {}
        async with aclosing(self.service.submit(call)) as events:
            async for event in events:
                scores = event.scores if event.scores is not None else scores
                if event.finish_reason == "abort":
                    raise AbortedError("the selection was aborted")
                if event.usage is not None:
                    meta = {"prompt_tokens": event.usage.prompt_tokens, "cached_tokens": event.usage.cached_tokens}
        return scores, meta


class LocalPath:
    """One branch."""

    def __init__(self, family: Family, parent: LocalPath | None = None) -> None:
        self._family = family
        self._text: Growing = parent._text.copy() if parent is not None else Growing()
        self._messages: list[dict[str, str]] = list(parent._messages) if parent is not None else []
        self._open: tuple[str, str] | None = parent._open if parent is not None else None  # role, content
        self._hold = family.name()
        self._holding = False

    # --- text

    def append(self, text: str) -> None:
        """Add text."""
        self._text.tail += text
        self._joined(text)

    def begin(self, role: str) -> str:
        """Open a message."""
        roles = self._family.backend.roles
        if self._messages or not (self._text.tokens or self._text.tail):
            text = roles.begin(self._messages, role)
            # a chat format writes its own beginning
            self._text.raw = self._text.raw or (not self._messages and not roles.plain)
        else:
            text = roles.begin_after_text(role, self._family.tokenizer.special_tokens.get("bos_token", ""))
        self._text.tail += text
        self._open = role, ""
        return text

    def end(self, role: str) -> str:
        """End the message."""
        text = self._family.backend.roles.end(self._messages, role)
        content = self._open[1] if self._open is not None else ""
        self._messages.append({"role": role, "content": content})
        self._text.tail += text
        self._open = None
        return text

    def _joined(self, text: str) -> None:
        if self._open is not None:
            self._open = self._open[0], self._open[1] + text

    # --- work

    async def generate(self, params: SamplingParams, on_text: Callable[[str], None] | None = None) -> Generation:
        """Continue the text. Raises AbortedError if the engine is closed meanwhile."""
        prompt = self._commit()
        params = self._with_end(params)
        call = self._family.call(prompt, params, stream=on_text is not None, **self._declared())
        collector = Collector(prompt, params.n)
        async with aclosing(self._family.service.submit(call)) as events:
            async for event in events:
                collector.add(event)
                if on_text is not None and event.index == 0 and event.text:
                    on_text(event.text)
        result = collector.result
        if result.finish_reason == "abort":
            raise AbortedError("the generation was aborted", hint="the engine is closing, or the call was cancelled")
        ends = {*self._family.service.info.spec.eos_token_ids, *params.stop_token_ids}
        self._text.generated(self._family.tokenizer, result.outputs[0], params, ends)
        self._joined(result.text)
        return self._generation(result, params)

    async def select(self, choices: Sequence[str], method: str, temperature: float = 0.0) -> Selection:
        """Score all choices in one call; `unconditional_likelihood_normalized` needs one more per first token."""
        joint = self._text.joint(self._family.tokenizer, choices)
        scores, meta = await self._family.score(joint.prompt, joint.continuations, **self._declared())
        bare = None
        if method == "unconditional_likelihood_normalized":
            calls = choosing.bare_calls(joint.continuations)
            results = [(await self._family.score(one.prompt, one.score))[0] for one in calls]
            bare = choosing.unconditional(joint.continuations, calls, results)
        chosen = choosing.choose(method, scores, bare)
        index = chosen.drawn(temperature)
        self._text.chosen(joint, index)
        self._joined(choices[index])
        return Selection(index, choices[index], chosen.scores, scores, meta)

    def fork(self, count: int) -> list[Path]:
        """Branches with this path's tokens and text."""
        self._text.settle(self._family.tokenizer)
        return [LocalPath(self._family, self) for _ in range(count)]

    async def commit(self) -> None:
        """Compute what was appended: scoring one token behind it costs its prefill and nothing else."""
        prompt = self._commit()
        await self._family.score(prompt, [[prompt[-1]]], **self._declared())

    async def close(self) -> None:
        """Give up the hold. Waits for nothing: whoever asks the engine later finds it done, and it may be closed."""
        if self._holding:
            self._holding = False
            hold = self._hold
            self._family.engine.core.invoke(lambda core: core.drop_hold(hold))

    def _declared(self) -> dict[str, Any]:
        """What a call tells the engine of the program."""
        self._holding = True
        return {"group": self._family.group, "hold": self._hold}

    # --- tokens

    def _commit(self) -> list[int]:
        """All text as tokens. Raises RequestError for a state without any."""
        tokens = self._text.commit(self._family.tokenizer)
        if not tokens:
            raise RequestError("the state is empty", hint="append some text before the first gen", param="prompt")
        return tokens

    def _with_end(self, params: SamplingParams) -> SamplingParams:
        """Inside a message its end stops the generation, also where the model's files do not say so."""
        if self._open is None or params.ignore_eos:
            return params
        tokenizer = self._family.tokenizer
        ids = tokenizer.encode(self._family.backend.roles.end(self._messages, self._open[0]), add_special=False)
        known = (*self._family.service.info.spec.eos_token_ids, *params.stop_token_ids)
        if not ids or ids[0] not in tokenizer.special_ids or ids[0] in known:
            return params
        return msgspec.structs.replace(params, stop_token_ids=[*params.stop_token_ids, ids[0]])

    def _generation(self, result: Result, params: SamplingParams) -> Generation:
        tokenizer, usage = self._family.tokenizer, result.usage
        metas = []
        for output in result.outputs:
            meta: dict[str, Any] = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            meta |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
            meta["completion_tokens"] = len(output.token_ids)
            if output.notes:
                meta["notes"] = output.notes
            if output.logprobs is not None:
                meta["tokens"] = [tokenizer.token_text(one.token_id) for one in output.logprobs]
            metas.append(meta)
        if result.prompt_logprobs is not None:
            metas[0]["prompt_logprobs"] = result.prompt_logprobs
            metas[0]["prompt"] = [tokenizer.token_text(token) for token in result.prompt_token_ids]
        logprobs = [output.logprobs or [] for output in result.outputs] if params.logprobs is not None else None
        return Generation([output.text for output in result.outputs], metas, logprobs)
