"""Faults of parser plugins: each fails its request alone, with an error that says whose it is."""

from __future__ import annotations

from typing import Any

from phloem.errors import PhloemError, StepError


class Guarded:
    """A parser, or the stream of one answer, that raises PhloemErrors only. All else is the plugin's own."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def __getattr__(self, attribute: str) -> Any:
        """Methods are called through here: a few times per request, and once per part of a streamed answer."""
        found = getattr(self._inner, attribute)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                made = found(*args, **kwargs)
            except PhloemError:
                raise
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise StepError(f"parser plugin '{self._name}' failed in {attribute}: {problem}") from error
            return Guarded(made, self._name) if attribute == "stream" else made

        return call
