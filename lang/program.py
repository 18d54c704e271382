"""A program: a function of a state, that can be run, awaited, streamed, batched, bound and traced."""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from phloem.errors import AbortedError, RequestError
from phloem.registry import did_you_mean

from .backends.base import Backend
from .batch import Batch
from .run import Run
from .sampling import LOGPROBS, NAMES, RENAMED, given
from .session import session
from .state import State
from .symbol import refuse_in_trace

if TYPE_CHECKING:
    from .graph import Graph

_OF_RUN = frozenset({"priority", "salt"})
_SAMPLING = NAMES | frozenset(RENAMED) | frozenset(LOGPROBS)


class Call(NamedTuple):
    """What one run was asked for."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    defaults: dict[str, Any]  # sampling parameters of gens that do not say
    start: dict[str, Any]  # priority, salt
    logprob_start: int | None


class Program:
    """Made by `@function`. The body's first argument is the state; plain or `async def`.

    Every way of running takes the body's arguments, `backend=`, and by name the sampling parameters that its gens do
    not set: SGLang's (`max_new_tokens`, 128 by default, `temperature`, `stop`, `return_logprob`, ...), all other fields
    of SamplingParams, and `priority` and `salt` of the calls that are made. A name that the body has as an argument and
    that only phloem knows is the body's.
    """

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        """Raises RequestError for a function without an argument for its state."""
        self.func = func
        self.bound = dict(bound or {})
        self._unbound: Program = self
        self.is_async = inspect.iscoroutinefunction(func)
        self.__name__ = "program"  # of what has no name: a partial
        functools.update_wrapper(self, func)
        parameters = list(inspect.signature(func).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise RequestError(f"{self.__name__} needs a first argument: the state", hint="def program(s, ...)")
        self._open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.arg_names = [
            p.name
            for p in parameters[1:]
            if p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        ]

    def __repr__(self) -> str:
        return f"<Program {self.__name__}({', '.join(['s', *self.arg_names])})>"

    def __reduce__(self) -> Any:
        """A module's program is pickled by its name, as functions are: for pools of processes."""
        return (_bound, (self._unbound, self.bound)) if self._unbound is not self else getattr(self, "__qualname__", "")

    def bind(self, **kwargs: Any) -> Program:
        """This program with some arguments set. Raises RequestError for one that it does not have."""
        for name in kwargs:
            if name not in self.arg_names and not self._open:
                raise RequestError(
                    f"{self.__name__} has no argument {name!r} {did_you_mean(name, self.arg_names)}", param=name
                )
        return _bound(self._unbound, {**self.bound, **kwargs})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With a state as the first argument: go on in that state, and return what the body returns (an `async def`
        body's is to be awaited). Otherwise `run`."""
        if args and getattr(type(args[0]), "is_program_state", False):
            return self.func(*args, **{**self.bound, **kwargs})
        return self.run(*args, **kwargs)

    # --- runs

    def run(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> State:
        """Run, and return the state when everything is done; with `stream` at once, while the body runs elsewhere.

        Raises what the body raises. An error of a gen or select is raised where its result is read, and `error()` of
        the state tells it. Raises RuntimeError in an async body: there it is `await program.arun(...)`.
        """
        run, state, call = self._prepare(args, kwargs, backend, stream, session.loop)
        if stream:
            session.start(self._drive(run, state, call))
        elif self.is_async:
            _raise(session.wait(self._drive(run, state, call)))
        else:
            session.refuse_on_loop()
            try:
                self._body(run, state, call)
                session.wait(run.finish())
            except BaseException as error:  # an interrupt comes in the body, or while what it left behind is awaited
                session.wait(run.abort(_why(error)))
                raise
        return state

    async def arun(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> State:
        """`run` on the caller's event loop. A plain body gets a thread of the pool; an `async def` body none."""
        loop = asyncio.get_running_loop()
        run, state, call = self._prepare(args, kwargs, backend, stream, loop)
        if stream:
            run.driver = loop.create_task(self._drive(run, state, call))
        else:
            _raise(await self._drive(run, state, call))
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        ordered: bool = True,
        backend: Any = None,
        **sampling: Any,
    ) -> Any:
        """Run once per item: its arguments by name, or in order. Returns the states, in the order of the items.

        `num_threads` is how many run at once. A failing item ends no other: its state's `error()` tells. With
        `generator_style` an iterator of states, each when it is done; with `ordered=False` in whatever order that is.
        """
        session.refuse_on_loop()
        batch = self._batch(batch_kwargs, backend, num_threads, sampling)
        states: Iterator[State] = batch.run(progress_bar=progress_bar, ordered=ordered)
        return states if generator_style else list(states)

    async def arun_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | str = "auto",
        backend: Any = None,
        **sampling: Any,
    ) -> list[State]:
        """`run_batch` on the caller's event loop."""
        return await self._batch(batch_kwargs, backend, num_threads, sampling).arun()

    def trace(self, *, backend: Any = None, **kwargs: Any) -> Graph:
        """The program as a graph, without running it: arguments not given are symbols. See `phloem.lang.tracer`."""
        from .tracer import trace_program

        return trace_program(self, {**self.bound, **kwargs}, backend)

    # --- helpers

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], backend: Any, stream: bool, loop: asyncio.AbstractEventLoop
    ) -> tuple[Run, State, Call]:
        call = self._call(args, kwargs)
        return *_begin(call, session.backend(backend), stream, loop), call

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Tell the body's arguments from the run's. Raises RequestError for a parameter out of range."""
        refuse_in_trace(self.__name__)
        own = {name: value for name, value in kwargs.items() if name in self.arg_names}
        rest = {name: value for name, value in kwargs.items() if name not in own}
        start = {name: rest.pop(name) for name in tuple(rest) if name in _OF_RUN}
        sampling = {name: rest.pop(name) for name in tuple(rest) if name in _SAMPLING}
        if rest and not self._open:
            name = next(iter(rest))
            known = [*self.arg_names, *_SAMPLING, *_OF_RUN]
            raise RequestError(
                f"{self.__name__} has no argument {name!r}, and no sampling parameter is called so"
                f" {did_you_mean(name, known)}",
                param=name,
            )
        return Call(args, {**self.bound, **own, **rest}, given(**sampling), start, sampling.get("logprob_start_len"))

    def _batch(
        self, items: Sequence[Any], backend: Any, num_threads: int | str, sampling: Mapping[str, Any]
    ) -> Batch[State]:
        shared = self._call((), sampling)
        chosen = session.backend(backend)
        if "group" in chosen.capabilities:  # what the items have in common is computed once, to the last token
            shared = shared._replace(start={**shared.start, "group": f"batch-{uuid.uuid4().hex[:12]}"})

        async def one(item: Mapping[str, Any] | Sequence[Any]) -> State:
            by_name = isinstance(item, Mapping)
            arguments = {**shared.kwargs, **(item if isinstance(item, Mapping) else {})}
            call = shared._replace(args=() if by_name else tuple(item), kwargs=arguments)
            run, state = _begin(call, chosen, False, asyncio.get_running_loop())
            await self._drive(run, state, call)
            return state

        return Batch(one, items, num_threads, threads=not self.is_async)

    async def _drive(self, run: Run, state: State, call: Call) -> BaseException | None:
        """Run the body to its end and release everything. Returns what the body raised; the state knows it too.

        A body that exits the process does so where its caller waits, not here: the loop must go on for others.
        """
        try:
            if self.is_async:
                with run.body():
                    state.ret_value = await self.func(state, *call.args, **call.kwargs)
            else:
                await asyncio.wrap_future(session.thread(lambda: self._body(run, state, call)))
            await run.finish()
        except asyncio.CancelledError as error:
            await run.abort(_why(error))
            raise
        except BaseException as error:
            await run.abort(_why(error))
            return error
        return None

    def _body(self, run: Run, state: State, call: Call) -> None:
        with run.body():
            state.ret_value = self.func(state, *call.args, **call.kwargs)


def _bound(program: Program, arguments: Mapping[str, Any]) -> Program:
    made = Program(program.func, arguments)
    made._unbound = program
    return made


def _begin(call: Call, backend: Backend, stream: bool, loop: asyncio.AbstractEventLoop) -> tuple[Run, State]:
    run = Run(backend, loop, call.defaults, stream=stream, logprob_start=call.logprob_start, **call.start)
    return run, State(run.root)


def _why(error: BaseException) -> BaseException:
    """What readers of an interrupted run are told."""
    return error if isinstance(error, Exception) else AbortedError("the run was interrupted")


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
