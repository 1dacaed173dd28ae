"""Cells of a notebook that are interrupted: the work that such a cell has scheduled is cancelled, for
coordinators whose cluster was made with `cancel_on_interrupt`.

Promises, checked by tests/engines/test_notebooks.py
    an interrupted cell cancels what was scheduled since it began, by any thread, and no more
    a cell that ends in another way cancels nothing
    a coordinator that is closed is forgotten; a notebook has one callback of each kind
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime

_begins: weakref.WeakKeyDictionary[CoordinatorRuntime, tuple[Iterator[int], int]] = (
    weakref.WeakKeyDictionary()
)
"""The numbers of later work, and the first one that work of this cell may have, by coordinator."""


def watch(target: Any, runtime: CoordinatorRuntime, numbers: Iterator[int]) -> None:
    """Cancel the work of interrupted cells, if the cluster `target` says so. Without IPython there
    are no cells."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and getattr(target, "cancel_on_interrupt", False):
        _begins[runtime] = numbers, next(numbers)
        # a callback that is registered already stays the only one
        shell.events.register("pre_run_cell", _note_begin)
        shell.events.register("post_run_cell", _note_end)


def _note_begin(*_: Any) -> None:
    for runtime, (numbers, _first) in [*_begins.items()]:
        _begins[runtime] = numbers, next(numbers)


def _note_end(result: Any) -> None:
    import asyncio  # imported here, because it is slow to import, and a kernel has it

    # a cell with `await` ends with the error of its task, which the kernel cancels
    if type(result.error_in_exec) in (KeyboardInterrupt, asyncio.CancelledError):
        for runtime, (numbers, first) in [*_begins.items()]:
            if not runtime.closed:
                runtime.cancel_all(next(numbers), first)
