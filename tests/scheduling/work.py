"""Functions that the tests schedule, and how tests and functions see each other: through files.

Functions of an importable module travel by name, so workers import this module; it imports little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from os import _exit
from pathlib import Path
from typing import Any

PATIENCE_S = 20.0


def until(condition: Callable[[], Any], what: str = "", within_s: float = PATIENCE_S) -> Any:
    """Return the first true value of `condition`; fail if there is none within `within_s`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what or condition}"
        time.sleep(0.005)
    return value


def waits(folder: Path, name: str = "x") -> str:
    """Report the start, and return the name when the test creates the file `go`; end early when the
    work is cancelled."""
    from zmqdist import cancelled

    (folder / f"begun-{name}-{os.getpid()}").touch()
    while not (folder / "go").exists():
        if cancelled():
            (folder / f"cancelled-{name}").touch()
            return "cancelled"
        time.sleep(0.005)
    return name


def begun(folder: Path, name: str = "*") -> list[int]:
    """Return the pids of the processes in which `waits` or `writes` has begun."""
    return [int(path.name.rpartition("-")[2]) for path in folder.glob(f"begun-{name}-*")]


def go(folder: Path) -> None:
    (folder / "go").touch()


def writes(folder: Path, name: str = "x") -> None:
    """Write bytes for ever, without checking whether the work is cancelled."""
    (folder / f"begun-{name}-{os.getpid()}").touch()
    deadline = time.monotonic() + 30
    with (folder / f"written-{name}").open("ab", buffering=0) as file:
        while time.monotonic() < deadline:
            file.write(b".")
            time.sleep(0.001)


def written(folder: Path) -> int:
    """Return the number of bytes that all `writes` have written so far."""
    return sum(path.stat().st_size for path in folder.glob("written-*"))


def dies_first(folder: Path, name: str, times: int, how: Callable[[], None]) -> str:
    """End the process in the way of `how` at the first `times` starts."""
    for start in range(times):
        try:
            (folder / f"start-{name}-{start}").touch(exist_ok=False)
        except FileExistsError:
            continue
        how()
    return name


def exits() -> None:
    _exit(7)


def segfaults() -> None:
    import ctypes

    ctypes.string_at(0)


def notes(folder: Path, name: str) -> None:
    """Append the name to the file `order`."""
    with (folder / "order").open("a") as file:
        file.write(name)


def starts(folder: Path, name: str) -> int:
    """Return how often `counts` was started under this name."""
    path = folder / f"count-{name}"
    return path.stat().st_size if path.exists() else 0


def counts(folder: Path, name: str, seconds: float = 0.0) -> str:
    """Count the starts of this function."""
    with (folder / f"count-{name}").open("ab", buffering=0) as file:
        file.write(b".")
    time.sleep(seconds)
    return name


class Settled:
    """Count how often each value is settled."""

    def __init__(self, values: list[Any]) -> None:
        self.counts = [0] * len(values)
        for index, value in enumerate(values):
            value.add_done_callback(lambda _, index=index: self.add(index))

    def add(self, index: int) -> None:
        self.counts[index] += 1
