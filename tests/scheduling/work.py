"""Functions that the tests schedule, and how tests and functions see each other: through files.

Functions of an importable module go by name, so workers import this module; it imports little.
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
    """The first true value of `condition`; fails when there was none for `within_s`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what or condition}"
        time.sleep(0.005)
    return value


def waits(folder: Path, name: str = "x") -> str:
    """Says that it has begun and returns its name when the test says `go`; ends early when nobody wants it."""
    from zmqdist import cancelled

    (folder / f"begun-{name}-{os.getpid()}").touch()
    while not (folder / "go").exists():
        if cancelled():
            (folder / f"cancelled-{name}").touch()
            return "cancelled"
        time.sleep(0.005)
    return name


def begun(folder: Path, name: str = "*") -> list[int]:
    """Pids of the processes in which `waits` or `writes` has begun."""
    return [int(path.name.rpartition("-")[2]) for path in folder.glob(f"begun-{name}-*")]


def go(folder: Path) -> None:
    (folder / "go").touch()


def writes(folder: Path, name: str = "x") -> None:
    """Writes on and on, and does not care whether anybody wants it."""
    (folder / f"begun-{name}-{os.getpid()}").touch()
    deadline = time.monotonic() + 30
    with (folder / f"written-{name}").open("ab", buffering=0) as file:
        while time.monotonic() < deadline:
            file.write(b".")
            time.sleep(0.001)


def written(folder: Path) -> int:
    """Bytes that all `writes` have written so far."""
    return sum(path.stat().st_size for path in folder.glob("written-*"))


def dies_first(folder: Path, name: str, times: int, how: Callable[[], None]) -> str:
    """Ends its process as `how` does for its first `times` starts."""
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
    """Appends its name to the file `order`."""
    with (folder / "order").open("a") as file:
        file.write(name)


def starts(folder: Path, name: str) -> int:
    """How often `counts` was started under this name."""
    path = folder / f"count-{name}"
    return path.stat().st_size if path.exists() else 0


def counts(folder: Path, name: str, seconds: float = 0.0) -> str:
    """Counts its starts."""
    with (folder / f"count-{name}").open("ab", buffering=0) as file:
        file.write(b".")
    time.sleep(seconds)
    return name


class Settled:
    """Counts how often each value is settled."""

    def __init__(self, values: list[Any]) -> None:
        self.counts = [0] * len(values)
        for index, value in enumerate(values):
            value.add_done_callback(lambda _, index=index: self.add(index))

    def add(self, index: int) -> None:
        self.counts[index] += 1
