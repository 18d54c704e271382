"""What a program's body holds: its state, and the states of a fork."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from phloem.errors import RequestError

from .interpreter import Branch
from .ir import Appendable, CommitLazy, Expr, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, lift, message


class State:
    """The state of a program: text that grows, and variables.

    `+=` never waits. Reading does, until what is read is there; in an `async def` body `await s.get(name)` and its
    companions wait instead, and a sync reading of what is not there yet raises RuntimeError. What failed raises its
    error wherever it is read; what was there before stays readable.
    """

    is_program_state = True  # `program(state, ...)` goes on in this state

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.ret_value: Any = None  # what the body returned

    # --- appending

    def __iadd__(self, other: Appendable) -> State:
        if other is None:
            raise ValueError("None was appended to a state: a function that returns nothing, perhaps")
        self.branch.submit(lift(other))
        return self

    def system(self, expr: Appendable | None = None) -> Any:
        """Append a system message; without `expr` a context manager that opens and ends one."""
        return self._role("system", expr)

    def user(self, expr: Appendable | None = None) -> Any:
        """Append a user's message; without `expr` a context manager that opens and ends one."""
        return self._role("user", expr)

    def assistant(self, expr: Appendable | None = None) -> Any:
        """Append the model's message; without `expr` a context manager that opens and ends one."""
        return self._role("assistant", expr)

    def _role(self, name: str, expr: Appendable | None) -> Any:
        if expr is None:
            return self._between(RoleBegin(role=name), RoleEnd(role=name))
        whole = message(name, expr)
        self.branch.submit(whole)
        return whole

    def var_scope(self, name: str) -> Any:
        """A context manager: what is appended inside, generated too, is also the variable `name`."""
        return self._between(ScopeBegin(name=name), ScopeEnd(name=name))

    @contextmanager
    def _between(self, begin: Expr, end: Expr) -> Iterator[State]:
        self.branch.submit(begin)
        try:
            yield self
        except BaseException:  # the body may catch it and go on: after this message, not in it
            with suppress(RuntimeError):  # the run is over
                self.branch.submit(end)
            raise
        self.branch.submit(end)

    # --- forks

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> StateGroup:
        """`size` states that begin with this one's text and variables. Waits for nothing.

        Raises RequestError for a size below 1, and for `position_ids_offset`, which SGLang ignores.
        """
        if position_ids_offset is not None:
            raise RequestError("position_ids_offset is not supported", hint="leave it out", param="position_ids_offset")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RequestError(f"a fork has a whole number of branches, at least 1, got {size!r}", param="size")
        return StateGroup([State(branch) for branch in self.branch.fork(size)], self)

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[State]:
        """A context manager: one branch, joined at its end."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group.join()

    def commit(self) -> None:
        """Have what was appended so far computed now, though nobody waits for a result: while a tool runs, say."""
        self.branch.submit(CommitLazy())

    def cancel(self) -> None:
        """Stop this branch and those forked from it: what runs is aborted. What it has produced stays readable."""
        self.branch.cancel()

    # --- reading: waits

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self.branch.cells

    def get_var(self, name: str) -> Any:
        """The variable's value. Raises KeyError if there is none, and the error of what should have set it."""
        return self.branch.variable(name).get()

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable."""
        self.branch.assign(name, value)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """What is reported of a variable: finish_reason, token counts, logprobs where asked for, scores of a select.

        A list with n > 1 or after a join. None for variables that were not generated. Raises TimeoutError.
        """
        cell = self.branch.variable(name)
        cell.get(timeout)
        return cell.meta

    def text(self) -> str:
        """All text so far. After an error, what was there before it."""
        self.sync()
        return self.branch.text.text()

    def messages(self) -> list[dict[str, Any]]:
        """The messages that have ended, as OpenAI's API has them."""
        self.sync()
        return list(self.branch.messages)

    def sync(self) -> None:
        """Wait until everything appended so far is done. Raises nothing: see `error`.

        Outside of a body that still runs (`stream=True`) that is what it has appended by now.
        """
        self.branch.mark().wait()

    def error(self) -> BaseException | None:
        """Wait as `sync`; what went wrong, if anything did."""
        self.sync()
        return self.branch.error

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Text, or one variable's, as it comes with `run(stream=True)`; in one piece otherwise.

        The text ends with the run. Raises the error that ended it, after what came before.
        """
        cell = self._cell(var_name)
        if self.branch.run.stream:
            yield from cell.pieces()
        elif var_name is None:
            yield self.text()
        else:
            yield cell.get()

    # --- reading: awaits

    async def get(self, name: str) -> Any:
        """`s[name]` for async bodies."""
        return await self.branch.variable(name).aget()

    async def get_meta(self, name: str) -> Any:
        """`get_meta_info` for async bodies."""
        cell = self.branch.variable(name)
        await cell.aget()
        return cell.meta

    async def async_text(self) -> str:
        """`text` for async bodies."""
        await self.branch.mark().ready()
        return self.branch.text.text()

    async def async_messages(self) -> list[dict[str, Any]]:
        """`messages` for async bodies."""
        await self.branch.mark().ready()
        return list(self.branch.messages)

    async def settled(self) -> BaseException | None:
        """`sync` and `error` for async bodies."""
        await self.branch.mark().ready()
        return self.branch.error

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for any event loop. With `return_meta_data` pairs; the report comes with a last, empty text."""
        cell = self._cell(var_name)
        if self.branch.run.stream:
            async for piece in cell.apieces():
                yield (piece, {}) if return_meta_data else piece
        else:
            piece = await self.async_text() if var_name is None else await cell.aget()
            yield (piece, {}) if return_meta_data else piece
        if return_meta_data:
            yield "", cell.meta or {}

    def _cell(self, name: str | None) -> Any:
        if name is not None:
            return self.branch.variable(name)
        self.branch.wake()
        return self.branch.text

    def __repr__(self) -> str:
        return (
            f"<State: {len(self.branch.text.text())} characters, variables: {', '.join(self.branch.cells) or 'none'}>"
        )


class StateGroup:
    """The branches of a fork. `forks += expr` appends to all; a function is called with the index, a list is dealt."""

    def __init__(self, states: list[State], src_state: State) -> None:
        self.states, self.src_state = states, src_state

    def __getitem__(self, i: int) -> State:
        return self.states[i]

    def __setitem__(self, i: int, value: State) -> None:
        if self.states[i] is not value:
            raise TypeError("the states of a fork cannot be replaced")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[State]:
        return iter(self.states)

    def __iadd__(self, other: Appendable | Sequence[Appendable] | Callable[[int], Appendable]) -> StateGroup:
        if callable(other):
            parts: Sequence[Appendable] = [other(i) for i in range(len(self.states))]
        elif isinstance(other, (list, tuple)):
            parts = other
        elif isinstance(other, (Expr, str, int, float)):
            parts = [other] * len(self.states)
        else:
            raise TypeError(f"cannot append {type(other).__name__} to a fork")
        if len(parts) != len(self.states):
            raise ValueError(f"{len(parts)} expressions for {len(self.states)} branches")
        for state, part in zip(self.states, parts, strict=True):
            state += part
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """End the branches. Waits for nothing; they can still be read.

        - gather_variable: each variable that branches have set becomes a list here, in the order of the branches, with
          None for one that failed, was cancelled or did not set it.
        - concate_and_append: what the branches wrote since the fork is appended here, in order. A branch that failed
          makes this state fail with its error; one that was cancelled adds nothing.
        """
        source, branches = self.src_state.branch, [state.branch for state in self.states]
        if mode == "gather_variable":
            source.gather(branches)
        elif mode == "concate_and_append":
            source.concatenate(branches)
        else:
            raise ValueError(f"unknown join mode {mode!r}: gather_variable or concate_and_append")
        for branch in branches:
            branch.end()

    def cancel(self, keep: State | None = None) -> None:
        """Cancel all branches but `keep`."""
        for state in self.states:
            if state is not keep:
                state.cancel()

    def errors(self) -> list[BaseException | None]:
        """Wait for all branches; the error of each."""
        return [state.error() for state in self.states]

    async def settled(self) -> list[BaseException | None]:
        """`errors` for async bodies."""
        return [await state.settled() for state in self.states]


ProgramState, ProgramStateGroup = State, StateGroup  # SGLang's names
