"""The common part of the modules of benchmarks/peers. A system is a class, its methods are questions, and a line of JSON asks a question.

    python -m benchmarks.peers.NAME [VARIANT]

The first line out is {"answers": [questions]}, or {"missing": REASON} where the system is not installed. Then each line in,
{"do": QUESTION, "count": 200, ...}, is answered by one line out: {"values": [...]} in seconds, pieces a second, bytes a second or
bytes; or {"failed": REASON}. {"do": "version"} is answered by {"version": ...}, and {"do": "rest"} is answered when the system has come to
rest. The process ends when its standard input is closed. The output of a system goes to standard error.

This module imports only the standard library, because the Python of another system may not have the packages of zmqdist.
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
"""By what a value is multiplied before that is added to it: it may be done as often as one likes."""
REST_LIMIT_S, REST_LOOK_S, REST_SHARE = 2.0, 0.1, 0.2
"""So long somebody may take to come to rest, so often it is looked, and so much of a core is next to nothing."""


class System:
    """A system that answers questions. Each public method of a subclass is a question of that name; `count` says how many.

    What several questions need is made once, at first use, and put on `stack`, which is left at the end.

    Attributes:
      package: what must be there for the system to be.
      loads: what a program imports to schedule something; the package where nothing is said.
      variant: the word after the module's name; empty for none.
    """

    package = ""
    loads: tuple[str, ...] = ()

    def __init__(self, variant: str = "") -> None:
        self.variant = variant
        self.stack = contextlib.ExitStack()

    def version(self) -> str:
        """What is measured, as `importlib.metadata` has it."""
        from importlib.metadata import version

        return version(self.package)

    def imports(self) -> list[float]:
        """Seconds of its import, NumPy's not counted; asked of a fresh process."""
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy")
        start = perf_counter()
        for name in self.loads or (self.package,):
            importlib.import_module(name)
        return [perf_counter() - start]

    def rest(self) -> list[float]:
        """Wait until this process and all that descend from it do next to nothing, but not for ever.

        What a question has left behind, such as buffers that are filled for nobody, would go on in the time of somebody else.
        """
        spent = tree_processor_s()
        for _ in range(int(REST_LIMIT_S / REST_LOOK_S)):
            sleep(REST_LOOK_S)
            before, spent = spent, tree_processor_s()
            if spent - before <= REST_SHARE * REST_LOOK_S:
                break
        return []

    def answers(self) -> list[str]:
        """The questions that this one knows."""
        own = [name for name, value in vars(type(self)).items() if name[0] != "_" and callable(value)]
        return ["imports", *(name for name in own if name not in vars(System))]


class Model:
    """An object with a large array, whose method is scheduled."""

    def __init__(self, size: int) -> None:
        import numpy as np

        self.weights = np.ones(size, np.uint8)

    def predict(self, number: int) -> int:
        return int(self.weights[number % len(self.weights)])


def timed(ask: Callable[[], object], count: int) -> list[float]:
    """The seconds of each of `count` questions."""
    took = []
    for _ in range(count):
        start = perf_counter()
        ask()
        took.append(perf_counter() - start)
    return took


def rate(work: Callable[[], object], count: int) -> list[float]:
    """`count` pieces of work, done by one call, as pieces a second."""
    start = perf_counter()
    work()
    return [count / (perf_counter() - start)]


def echoed(echo: Callable[[Any], Any], size: int, count: int) -> list[float]:
    """Bytes a second each way, of `count` echoes of an array: its size by half of the round trip.

    The array is written to before each echo, as a program would that has something new to say.
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
    """A task that lasts as long as a file is there: what is queued behind it stays queued."""
    import os
    import time

    while os.path.exists(path):
        time.sleep(0.01)


def queued_bytes(submit: Callable[[int], Any], hold: Callable[[str], Any], count: int) -> list[float]:
    """Bytes that a queued task costs in all processes of this system together.

    Args:
      submit: queues so many no-op tasks and gives their results to come.
      hold: keeps all workers busy as long as there is a file of this name.
    """
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="zmqdist-bench-") as file:
        held = hold(file.name)
        kept = submit(count // 10 + 1)  # what the first ones cost once is not counted
        before = settled_memory()
        more = submit(count)
        values = [(settled_memory() - before) / count]
        del kept, more, held
    return values


def settled_memory() -> int:
    """The resident bytes of this process and all that descend from it, when they have stopped growing."""
    import time

    seen = [-1, tree_memory()]
    for _ in range(100):
        time.sleep(0.2)
        seen.append(tree_memory())
        if seen[-1] <= max(seen[-2], seen[-3]) * 1.001:
            break
    return seen[-1]


def tree_memory() -> int:
    """The bytes that this process and all that descend from it hold, what they share counted once."""
    return sum(_proportional(pid) for pid in _family())


def tree_processor_s() -> float:
    """The seconds that this process and all that descend from it have run."""
    ticks = 0
    for pid in _family():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _family() -> list[int]:
    """This process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents.setdefault(int(file.read().rpartition(b") ")[2].split()[1]), []).append(int(name))
    family = [os.getpid()]
    for pid in family:
        family += parents.get(pid, [])
    return family


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):  # it has just gone
        return 0


def run(kind: type[System]) -> None:
    """Answer questions until standard input ends; the word on the command line is the variant."""
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
