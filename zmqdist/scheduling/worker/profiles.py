"""A profile of the processes of a worker: in which calls their threads were, and for how long. The
time is that of the wall, so it includes waits within a function, but not those for work.

py-spy takes the samples if it is installed and may read other processes, which it does without
stopping them. Otherwise each process is signalled PERIOD_S apart to write its stacks
(process/stack_dump.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from zmqdist import clock as time
from zmqdist.errors import UnavailableError
from zmqdist.process.stack_dump import Frame, StackReader, parse_stacks, stack_reader
from zmqdist.scheduling.worker.stacks import own_frames, stacks_of_threads

Profile = dict[str, float]
"""The seconds of each stack: "function (file)" of its calls, the outermost first, with ";" between
them."""

PERIOD_S: Final = 0.02
REST: Final = 4
"""Of the time of a core at most 1 / (REST + 1) goes into signals and reads."""
CYCLE_S: Final = 1.0
"""Seconds after which the files of the processes are read and emptied."""
AT_ONCE: Final = 32
"""Processes that are sampled in one cycle, because each costs two descriptors."""
TAKE_S: Final = 0.5
PY_SPY_RATE: Final = 100
PY_SPY_MORE_S: Final = 5.0
PROFILE_CHARS_MAX: Final = 4 * 1024 * 1024
"""Characters of the stacks of a profile, which is one message; those with the most time are kept."""


def record(
    seconds: float,
    processes: Callable[[], list[tuple[str, int]] | None],
    tree: int,
    reading: AbstractContextManager[object],
) -> Profile:
    """Sample for these seconds, and return the profile.

    Args:
      processes: returns the present processes; None if slots are threads of this process.
      tree: the pid of the process whose children they are.
      reading: is entered while files of the processes are used.
    """
    profile: Profile = defaultdict(float)
    until = time.monotonic() + seconds
    if processes() is None or not _by_py_spy(profile, tree, seconds):
        first = 0
        while (now := time.monotonic()) < until:
            present, end = processes(), min(until, now + CYCLE_S)
            if present is None:
                _sample_threads(profile, end)
                continue
            first = first if first < len(present) else 0
            part = [pid for _, pid in present[first : first + AT_ONCE]]
            with reading:
                _sample(profile, part, end, len(present) / max(len(part), 1))
            first += AT_ONCE
    chars, most = 0, {}
    for stack in sorted(profile, key=profile.__getitem__, reverse=True):
        chars += len(stack)
        if chars > PROFILE_CHARS_MAX:
            break
        most[stack] = profile[stack]
    return most


def _sample(profile: Profile, pids: Sequence[int], end: float, scale: float) -> None:
    with ExitStack() as files:
        readers: dict[StackReader, int] = {}
        for pid in pids:
            with suppress(UnavailableError):  # it has ended, or starts
                readers[files.enter_context(stack_reader(pid))] = 0
        begin = now = time.monotonic()
        while now < end:
            for reader in readers:
                with suppress(ProcessLookupError):
                    reader.signal()
                    readers[reader] += 1
            time.sleep(min(max(PERIOD_S, REST * (time.monotonic() - now)), max(end - now, 0.0)))
            now = time.monotonic()
        for reader, signals in readers.items():
            with suppress(UnavailableError):
                stacks = parse_stacks(reader.take(TAKE_S))
                _add(profile, stacks, scale * (now - begin) / max(signals, 1))


def _sample_threads(profile: Profile, end: float) -> None:
    while (now := time.monotonic()) < end:
        stacks = [stack for _, stack in stacks_of_threads()]
        time.sleep(PERIOD_S)
        _add(profile, stacks, time.monotonic() - now)


def _add(profile: Profile, stacks: Iterable[Sequence[Frame]], seconds: float) -> None:
    for stack in stacks:
        if frames := own_frames(stack):
            profile[";".join(map(_label, frames))] += seconds


def _label(frame: Frame) -> str:
    return f"{frame.function} ({frame.file})".replace(";", ",")


def _by_py_spy(profile: Profile, tree: int, seconds: float) -> bool:
    """Have py-spy sample the children of the process `tree`. Return False if it cannot."""
    program = shutil.which("py-spy")
    if program is None:
        return False
    with tempfile.TemporaryDirectory(prefix="zmqdist-profile-") as folder:
        output = Path(folder, "profile.json")
        options = ["--subprocesses", "--idle", "--full-filenames", "--nonblocking", "--function"]
        command = [program, "record", "--pid", str(tree), *options, "--format", "speedscope"]
        amounts = ["--rate", str(PY_SPY_RATE), "--duration", str(max(round(seconds), 1))]
        try:
            subprocess.run(
                [*command, *amounts, "--output", str(output)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds + PY_SPY_MORE_S,
                check=True,
            )
            _read_speedscope(profile, json.loads(output.read_text()), f"Process {tree} ")
        except (subprocess.SubprocessError, OSError, ValueError, KeyError):
            return False  # it may not read other processes, or does not know this Python
    return True


def _read_speedscope(profile: Profile, document: dict[str, Any], but: str) -> None:
    """Add the threads in a file of speedscope, but those whose names begin with `but`."""
    frames = [
        Frame(str(row["file"] or ""), 0, str(row["name"])) for row in document["shared"]["frames"]
    ]
    threads = [row for row in document["profiles"] if not row["name"].startswith(but)]
    for thread in threads:
        for sample, weight in zip(thread["samples"], thread["weights"], strict=True):
            # a frame without a file stands for a process
            _add(profile, [[frames[n] for n in sample if frames[n].file]], weight)
