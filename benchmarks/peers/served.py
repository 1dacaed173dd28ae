"""The common part of the modules of benchmarks/peers. Each system is a class whose methods answer
questions, which arrive as lines of JSON.

    python -m benchmarks.peers.NAME [VARIANT]

The first line that the process writes is {"answers": [questions]}, or {"missing": REASON} if the
system is not installed. The process then replies to each line {"do": QUESTION, "count": 200, ...}
with one line: {"values": [...]} in seconds, pieces a second, bytes a second or bytes; or {"failed":
REASON}. The reply to {"do": "version"} is {"version": ...}. The reply to {"do": "rest"} comes when
the system has come to rest. The process ends when its standard input is closed. The output of a
system goes to standard error.

This module imports only the standard library, because the Python of another system may not have the
packages of zmqdist.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

REASON_CHARACTERS_MAX = 160
TABLE = 100_000, 64
"""Rows and columns of the table of `ps_rows`."""
SHRINKS = -0.001
"""The factor of an update: a task adds SHRINKS times a value to the value. The values stay small,
however many tasks run."""
REST_LIMIT_S, REST_LOOK_S, REST_SHARE = 2.0, 0.1, 0.2
"""The most seconds to wait until a system has come to rest, the seconds between two checks, and the
share of a core that counts as rest."""


class System:
    """A system that answers questions. Each public method of a subclass answers the question of its
    name, with `count` pieces of work.

    Objects that several questions need are made at first use. `stack` closes them at the end.

    Attributes:
      package: the package without which the system is not installed.
      loads: the modules that a program imports to schedule a function; empty means `package`.
      variant: the word after the module's name on the command line; empty if there is none.
    """

    package = ""
    loads: tuple[str, ...] = ()

    def __init__(self, variant: str = "") -> None:
        self.variant = variant
        self.stack = contextlib.ExitStack()

    def version(self) -> str:
        """Return the version of the package that is measured."""
        from importlib.metadata import version

        return version(self.package)

    def imports(self) -> list[float]:
        """Return the seconds of the import of the system, without the import of NumPy. Call this in
        a fresh process."""
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy")
        start = perf_counter()
        for name in self.loads or (self.package,):
            importlib.import_module(name)
        return [perf_counter() - start]

    def rest(self) -> list[float]:
        """Wait until this process and its descendants use almost no processor time, but not longer
        than REST_LIMIT_S.

        Work that a question has left behind, such as filling buffers that no code reads, would slow
        down the next block of another system.
        """
        spent = tree_processor_s()
        for _ in range(int(REST_LIMIT_S / REST_LOOK_S)):
            sleep(REST_LOOK_S)
            before, spent = spent, tree_processor_s()
            if spent - before <= REST_SHARE * REST_LOOK_S:
                break
        return []

    def answers(self) -> list[str]:
        """Return the names of the questions that this system can answer."""
        own = [
            name for name, value in vars(type(self)).items() if name[0] != "_" and callable(value)
        ]
        return ["imports", *(name for name in own if name not in vars(System))]


class Model:
    """An object with a large array, whose method is scheduled."""

    def __init__(self, size: int) -> None:
        import numpy as np

        self.weights = np.ones(size, np.uint8)

    def predict(self, number: int) -> int:
        return int(self.weights[number % len(self.weights)])


def timed(ask: Callable[[], object], count: int) -> list[float]:
    """Call `ask` `count` times, and return the seconds of each call."""
    took = []
    for _ in range(count):
        start = perf_counter()
        ask()
        took.append(perf_counter() - start)
    return took


def rate(work: Callable[[], object], count: int) -> list[float]:
    """Call `work`, which does `count` pieces of work, once. Return the number of pieces a second,
    in a list."""
    start = perf_counter()
    work()
    return [count / (perf_counter() - start)]


def echoed(echo: Callable[[Any], Any], size: int, count: int) -> list[float]:
    """Return the bytes a second of each of `count` echoes of an array: its size divided by half of
    the round-trip time.

    This function writes to the array before each echo, because a program also sends new data each
    time.
    """
    import numpy as np

    array = np.ones(size, np.uint8)
    values = []
    for number in range(count):
        array[0] = number % 250
        start = perf_counter()
        back = echo(array)
        values.append(2 * size / (perf_counter() - start))
        if len(back) != size or back[0] != array[0]:
            raise ValueError(f"{size} bytes went out and others came back")
    return values


def waited(path: str) -> None:
    """Run as long as a file exists. Tasks that are queued behind this task then stay queued."""
    import os
    import time

    while os.path.exists(path):
        time.sleep(0.01)


def queued_bytes(
    submit: Callable[[int], Any], hold: Callable[[str], Any], count: int
) -> list[float]:
    """Return the bytes that a queued task takes in all processes of this system together.

    Args:
      submit: a function that queues a number of no-op tasks, and returns their futures.
      hold: a function that keeps all workers busy as long as the file of this name exists.
    """
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="zmqdist-bench-") as file:
        held = hold(file.name)
        # not counted, because the first tasks also cause allocations that happen once
        kept = submit(count // 10 + 1)
        before = settled_memory()
        more = submit(count)
        values = [(settled_memory() - before) / count]
        del kept, more, held
    return values


def settled_memory() -> int:
    """Wait until the memory of this process and its descendants has stopped growing, and return it
    in bytes."""
    import time

    seen = [-1, tree_memory()]
    for _ in range(100):
        time.sleep(0.2)
        seen.append(tree_memory())
        if seen[-1] <= max(seen[-2], seen[-3]) * 1.001:
            break
    return seen[-1]


def tree_memory() -> int:
    """Return the bytes of memory of this process and its descendants. Memory that they share counts
    once."""
    return sum(_proportional(pid) for pid in _family())


def tree_processor_s() -> float:
    """Return the seconds of processor time that this process and its descendants have used."""
    ticks = 0
    for pid in _family():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _family() -> list[int]:
    """Return the pids of this process and its descendants."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents.setdefault(int(file.read().rpartition(b") ")[2].split()[1]), []).append(
                    int(name)
                )
    family = [os.getpid()]
    for pid in family:
        family += parents.get(pid, [])
    return family


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):  # the process has just ended
        return 0


def run(kind: type[System]) -> None:
    """Answer questions until standard input ends. The word on the command line, if there is one, is
    the variant of the system."""
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        answer.write(json.dumps(what) + "\n")

    top = kind.package.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        say(missing=f"no module named {top!r}")
        return
    system = kind(*sys.argv[1:])
    with system.stack:
        say(answers=system.answers())
        for line in sys.stdin:
            question = json.loads(line)
            name = question.pop("do")
            try:
                said = getattr(system, name)(**question)
            except Exception as error:
                say(failed=_reason(error))
            else:
                say(**{"version" if name == "version" else "values": said})


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:REASON_CHARACTERS_MAX]
