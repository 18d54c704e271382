"""Calls a stranger's function so that it cannot keep its caller for ever."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)
Job = Callable[[], Any]
Answer = tuple[Any, BaseException | None]


class Deadline:
    """One thread that runs functions while the caller waits, up to a limit. Some 20 microseconds a call.

    A function that hangs is left behind with its thread, which cannot be killed; the next call gets a new thread.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._name, self._limit = name, limit_s
        self._queues: tuple[queue.SimpleQueue[Job | None], queue.SimpleQueue[Answer]] | None = None

    def call(self, function: Job) -> Any:
        """What `function` returns or raises; TimeoutError if it does neither in time."""
        if self._queues is None:
            self._queues = self._start()
        jobs, answers = self._queues
        jobs.put(function)
        try:
            result, error = answers.get(timeout=self._limit)
        except queue.Empty:
            self._queues = None
            jobs.put(None)  # should it ever return
            raise TimeoutError(f"no answer within {self._limit:g} s") from None
        if error is not None:
            raise error
        return result

    def _start(self) -> tuple[queue.SimpleQueue[Job | None], queue.SimpleQueue[Answer]]:
        jobs, answers = queue.SimpleQueue[Job | None](), queue.SimpleQueue[Answer]()
        threading.Thread(target=_work, args=(jobs, answers), name=f"phloem-{self._name}", daemon=True).start()
        weakref.finalize(self, jobs.put, None)
        return jobs, answers


def _work(jobs: queue.SimpleQueue[Job | None], answers: queue.SimpleQueue[Answer]) -> None:
    while (job := jobs.get()) is not None:
        try:
            answers.put((job(), None))
        except BaseException as error:  # the caller's to deal with
            answers.put((None, error))
        del job  # nothing of a request is kept until the next
