"""The program of a task's process. Its arguments, LIFELINE and PIPE, are two descriptors that it
inherits from its parent.

The process, and all processes that it has started, end with the parent, even if the parent crashes.
The lifeline is a pipe whose other end the parent holds. When the parent's end is closed, the kernel
sends SIGKILL to the whole process group. So a process ends even if its function is stuck in C code
and holds the interpreter's lock.

On SIGTERM, and when it crashes, the process writes the stacks of all threads to standard error and
ends.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib.util
import logging
import multiprocessing
import os
import select
import signal
import sys
import traceback
from typing import Any

from zmqdist.errors import OpError
from zmqdist.testing.runner.barrier import TASK_CODEC, Barrier, TaskPipe, set_barrier
from zmqdist.transport.pipe import BlockingPipe, Parts
from zmqdist.wire import trusted


def main() -> int:
    """Run the functions that the parent sends, until one is marked as the last or the parent closes
    the pipe. Return the exit code."""
    _end_with_parent(int(sys.argv[1]))
    pipe = BlockingPipe(int(sys.argv[2]), TASK_CODEC)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    # Standard output has `reconfigure`, because no code of the user has run yet that could have
    # replaced standard output.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    (_, facts), _ = pipe.receive()
    # Take the parent's key, because a process needs it to use the objects of `manager`.
    multiprocessing.current_process().authkey = bytes.fromhex(facts["authkey"])
    set_barrier(Barrier(pipe, facts["parties"]))
    while True:
        try:
            (_, facts), payloads = pipe.receive()
        except EOFError:
            return 0
        succeeded = _run(pipe, facts["module"], payloads)
        sys.stdout.flush()
        if facts["last"]:
            return 0 if succeeded else 1


def _end_with_parent(lifeline: int) -> None:
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        # the parent ended before F_SETSIG, so no signal comes
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _run(pipe: TaskPipe, module: list[str] | None, payloads: Parts) -> bool:
    """Run one function, and report its result or error. Return True if the function has returned.
    SystemExit is not caught, so that its code becomes the exit code of the process.
    """
    try:
        if module is not None:
            _make_importable(*module)
        if isinstance(payloads, OpError):
            raise payloads
        code, *arguments = payloads
        fn = trusted.unpack(code)
        args, kwargs = trusted.unpack_parts(arguments)
        packed = trusted.pack(fn(*args, **kwargs))
    except SystemExit:
        raise
    except BaseException as error:
        # not only Exception, because pytest.fail and pytest.skip raise other BaseExceptions
        error.__traceback__ = _without_us(error)
        traceback.print_exception(error)
        pipe.send(("raised", None), [trusted.pack_error(error)])
        return False
    pipe.send(("returned", None), packed if isinstance(packed, list) else [packed])
    return True


def _without_us(error: BaseException) -> Any:
    """Return the error's traceback without the frame of `_run`. If `_run` itself has raised the
    error, return the whole traceback."""
    trace = error.__traceback__
    return trace.tb_next if trace is not None and trace.tb_next is not None else trace


def _make_importable(name: str, path: str) -> None:
    """Import a test's module from its file, as pytest does, unless it is on the path. Pickled
    functions refer to this module by name."""
    if name in sys.modules:
        return
    try:
        if importlib.util.find_spec(name) is not None:
            return
    except ImportError:  # a parent package of the module cannot be imported
        pass
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is not None and spec.loader is not None:
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
