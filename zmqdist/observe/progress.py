"""`zmqdist.progress`: how many of the scheduled functions have ended, while a loop takes their
values.

On a terminal it is a bar of rich, in a notebook a bar of HTML. Elsewhere, such as in a log file, it
is at most a line every LINE_S, because a bar would fill the file with control characters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from html import escape
from typing import Any, Final, TextIO, TypeVar

from zmqdist import clock as time
from zmqdist.field_types import checked
from zmqdist.html_repr import in_notebook
from zmqdist.messages import KEPT, VALUE
from zmqdist.scheduling.coordinator.completion import AsCompleted
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, work_of

T = TypeVar("T")

LINE_S: Final = 10.0
"""Seconds between two lines, if the output is no terminal."""

UPDATE_S: Final = 0.2
"""Seconds between two updates of a notebook's bar, each of which is a message to the browser."""

LABEL_CHARS_MAX: Final = 40
"""The most characters of a label that the bar shows."""


@checked
def progress(
    values: Iterable[RemoteValue[T]],
    *,
    label: str = "",
    timeout: float | None = None,
    file: TextIO | None = None,
) -> Iterator[RemoteValue[T]]:
    """Yield the RemoteValues in the order in which their functions end, as `as_completed` does, and
    show how many have ended and how many have failed.

    >>> import io
    >>> for value in zd.progress(coordinator.map(abs, [-2, 2]), file=(log := io.StringIO())):
    ...     value.result()
    2
    2
    >>> log.getvalue()
    '2 of 2, ... s\\n'

    The bar begins and ends with the loop. A function that has failed or was cancelled is counted,
    and its error is raised by `result()` as ever. With an AsCompleted, values that the loop adds
    are counted, too.

    Args:
      values: RemoteValues, or what `as_completed` returns.
      label: a text before the bar.
      timeout: as of `as_completed`; None for an AsCompleted, which has its own.
      file: where to write. None means standard error. Plain lines are written if it is no terminal
        and this process is no notebook.

    Raises:
      TypeError, DeadlineExceededError: as `as_completed`.
      ValueError: `timeout` is given beside an AsCompleted.
    """
    if isinstance(values, AsCompleted):
        if timeout is not None:
            raise ValueError("timeout: give it to as_completed, which made `values`")
        completed = values
    else:
        completed = AsCompleted(values, timeout)
    if file is not None and not hasattr(file, "isatty"):
        raise TypeError(f"file is {file!r:.100}, wants an open text file, or None")
    output = sys.stderr if file is None else file
    display: Display = _bar if output.isatty() else _lines
    if file is None and in_notebook():
        display = _cell
    label = "".join(char if char.isprintable() else "?" for char in label[:LABEL_CHARS_MAX])
    return _watched(completed, display, label, output)


class _Count:
    """How many values a loop has taken, of how many, and how many of them have no result."""

    def __init__(self, completed: AsCompleted[Any], label: str) -> None:
        self._completed = completed
        self._prefix = f"{label}: " if label else ""
        self._begin_s = time.monotonic()
        self.taken = self.failed = 0

    def add(self, value: RemoteValue[Any]) -> None:
        self.taken += 1
        # `value.exception()` would count as seen by the program, and join() would not raise it
        self.failed += work_of(value).kind not in (VALUE, KEPT)

    @property
    def total(self) -> int:
        return self.taken + len(self._completed)

    def text(self) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{self.taken:,} of {self.total:,}{failed}"

    def line(self) -> str:
        return f"{self._prefix}{self.text()}, {time.monotonic() - self._begin_s:.1f} s"


Display = Callable[[_Count, str, TextIO], AbstractContextManager[Callable[[], object]]]


def _watched(
    completed: AsCompleted[T], display: Display, label: str, output: TextIO
) -> Iterator[RemoteValue[T]]:
    count = _Count(completed, label)
    with display(count, label, output) as show:
        for value in completed:
            count.add(value)
            show()
            yield value


def _every(interval_s: float, show: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls `show` if `interval_s` has passed since the last time."""
    due_s = time.monotonic() + interval_s

    def show_if_due() -> None:
        nonlocal due_s
        if (now_s := time.monotonic()) >= due_s:
            due_s = now_s + interval_s
            show()

    return show_if_due


@contextmanager
def _lines(count: _Count, _: str, output: TextIO) -> Iterator[Callable[[], object]]:
    def show() -> None:
        print(count.line(), file=output, flush=True)

    try:
        yield _every(LINE_S, show)
    finally:
        show()


@contextmanager
def _bar(count: _Count, label: str, output: TextIO) -> Iterator[Callable[[], object]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=output)) as bar:
        row = bar.add_task(label, total=count.total, count=count.text())
        yield lambda: bar.update(row, completed=count.taken, total=count.total, count=count.text())


@contextmanager
def _cell(count: _Count, _: str, __: TextIO) -> Iterator[Callable[[], object]]:
    # not by rich, whose bars need ipywidgets in a notebook
    from IPython.display import HTML, display

    def html() -> Any:
        return HTML(
            f"<progress value='{count.taken}' max='{max(count.total, 1)}'></progress> "
            f"{escape(count.line())}"
        )

    shown = display(html(), display_id=True)
    try:
        yield _every(UPDATE_S, lambda: shown.update(html()))
    finally:
        shown.update(html())
