"""A reader that is no reader: answers of a task's runner, taken by a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from zmqdist.data.service.elements import unpack
from zmqdist.data.service.worker.element_replies import Packed

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

    def _give(self, value: Any, tag: Any = None) -> None:
        self.tag, self.answered = tag, True
        self._future.set_result(value)

    def elements(self, elements: list[Any], tag: Any = None) -> None:
        self._give([each.tolist() for each in elements], tag)

    def packed(self, batch: Packed) -> None:
        self._give([each.tolist() for each in unpack(batch.form(""), "test")])

    def end(self) -> None:
        self._give(self.END)

    def skip(self, tag: Any = None) -> None:
        self._give(self.SKIPPED, tag)

    def fail(self, error: BaseException) -> None:
        self.answered = True
        self._future.set_exception(error)
