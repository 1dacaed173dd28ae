"""A reader that is no reader: answers of a task's runner, taken by a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from zmqdist.data.service.elements import unpack
from zmqdist.data.service.reader.delivery import END, FAILED, SOME
from zmqdist.data.service.worker.task_runner import Packed

PATIENCE_S = 20.0


class Answer:
    """A Reply. `result` waits; SKIPPED stands for a skip, END for the end."""

    SKIPPED, END = "skipped", "end"

    def __init__(self) -> None:
        self._future: Future[Any] = Future()
        self.tag: Any = None
        self.is_wanted = True
        self.answered = False

    def result(self) -> Any:
        return self._future.result(PATIENCE_S)

    @property
    def waits(self) -> bool:
        return not self._future.done()

    def wanted(self) -> bool:
        return self.is_wanted

    def soon(self, fn: Callable[[], None]) -> bool:
        threading.Thread(target=fn, name="zmqdist-soon").start()
        return True

    def answer(self, kind: int, value: Any = None, tag: Any = None) -> None:
        self.tag, self.answered = tag, True
        if kind == FAILED:
            self._future.set_exception(value)
        elif kind == SOME:
            elements = unpack(value.form(""), "test") if isinstance(value, Packed) else value
            self._future.set_result([element.tolist() for element in elements])
        else:
            self._future.set_result(self.END if kind == END else self.SKIPPED)
