"""Stacks of slots, actors and data tasks as programs want to see them: without the calls of zmqdist
around a function."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Final

from zmqdist.process import zygote
from zmqdist.process.stack_dump import Frame
from zmqdist.scheduling.worker import function_call

PACKAGE: Final = __file__[: -len(os.path.join("scheduling", "worker", "stacks.py"))]
STDLIB: Final = sysconfig.get_path("stdlib") + os.sep
PACKAGES: Final = sysconfig.get_path("purelib") + os.sep

IDLE: Final = "  waits for work"


def stacks_of_threads() -> Iterator[tuple[str, list[Frame]]]:
    """Yield the name and the stack of each slot that is a thread of this process."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name.startswith("zmqdist-slot-") and thread.ident in frames:
            walk = [*traceback.walk_stack(frames[thread.ident])][::-1]
            stack = [Frame(f.f_code.co_filename, line, f.f_code.co_name) for f, line in walk]
            yield f"slot {thread.name.rpartition('-')[2]}, thread {thread.native_id}", stack


def stack_text(stacks: Sequence[Sequence[Frame]]) -> str:
    """Return the stacks of one process as text, the main thread first."""
    parts = []
    for number, stack in enumerate(stacks):
        frames = own_frames(stack)
        lines = [f'  File "{f.file}", line {f.line or "?"}, in {f.function}' for f in frames]
        if lines:
            parts += ["  another thread:"] * (number > 0) + lines
    return "\n".join(parts) or IDLE


def own_frames(stack: Sequence[Frame], *, is_main: bool = False) -> Sequence[Frame]:
    """Return the calls of the program in a stack: those below the run of a function; no call if the
    thread waits for work, or belongs to zmqdist."""
    for number, frame in enumerate(stack):
        if frame.file == function_call.__file__ and frame.function in function_call.RUNS:
            return stack[number + 1 :]
        if frame.file == zygote.__file__ and frame.function == "_run_bound":
            return own_frames(stack[number + 1 :], is_main=True)
    foreign = [f for f in stack if not f.file.startswith(STDLIB) or f.file.startswith(PACKAGES)]
    if is_main:
        waits = not foreign or all(f.file.startswith(WAITING) for f in foreign)
    else:
        waits = bool(foreign) and foreign[0].file.startswith(PACKAGE)
    return [] if waits else stack


WAITING: Final = tuple(
    PACKAGE + folder + os.sep
    for folder in ("process", "transport", os.path.join("scheduling", "worker"))
)
"""The folders of the code that waits for work in a slot and in an actor."""
