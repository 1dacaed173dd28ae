"""Functions in child processes, for `map(..., executor="process")`: for Python code that would hold the interpreter's lock.

Rules
    A child runs one function, one call at a time, asked over a pair of pipes. It is started by command and not forked, which is right in
    any process whatever its threads do, in scripts without a `__main__` guard, and in one that was forked itself. It takes the
    module path of its parent, and some tenths of a second to start.

    An error keeps its class and text. A child that dies costs the call that it was at; the next call gets a new child.

    Children end with whoever started them: killed by `close`, by the kernel when that thread is gone, or at the end of their pipe.

Values are pickled (wire/trusted.py): both ends are the same program.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from zmqdist.errors import CancelledError, InternalError
from zmqdist.wire import trusted

_PR_SET_PDEATHSIG = 1
_PIPE_BYTES = 2**20
_COUNT = struct.Struct("<Q")
_VALUE, _ERROR = b"v", b"e"


class Processes:
    """Calls of one function in children; any number of threads may call at once, each has a child for the time."""

    def __init__(self, function: bytes) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._closed = False

    def __call__(self, x: Any) -> Any:
        """The function's value of an element.

        Raises:
          InternalError: the child died of it. CancelledError: closed meanwhile. Exception: what the function raised.
        """
        child = self._taken()
        try:
            kind, parts = child.ask(x)
        except BaseException:
            self._ended(child)
            raise
        with self._lock:
            self._idle.append(child)
        if kind == _ERROR:
            raise trusted.unpack_error(parts[0])
        return trusted.unpack_parts(parts)

    def _taken(self) -> _Child:
        with self._lock:
            if self._idle and not self._closed:
                return self._idle.pop()
        child = _Child(self._function)
        with self._lock:
            self._children.add(child)
        if self._closed:
            self._ended(child)
            raise CancelledError("the iterator was closed")
        return child

    def _ended(self, child: _Child) -> None:
        with self._lock:
            self._children.discard(child)
        child.kill()
        child.close()

    def close(self) -> None:
        """Kill the children, also those that are at a call. Harmless when called twice."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for child in self._children:
                child.kill()
        for child in idle:  # the others are closed by who waits for them
            self._ended(child)


class _Child:
    """One child from its parent's side."""

    def __init__(self, function: bytes) -> None:
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        for end in (our_in, our_out):
            with contextlib.suppress(OSError):  # more than this user may have
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._in, self._out = os.fdopen(our_in, "rb"), os.fdopen(our_out, "wb")
        program = f"import sys; sys.path[:] = {sys.path!r}; from zmqdist.data.processes import main; "
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{program}main({their_in}, {their_out})"],
                stdin=subprocess.DEVNULL,
                pass_fds=(their_in, their_out),
            )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(their_in)
            os.close(their_out)
        self._told: bytes | None = function

    def ask(self, x: Any) -> tuple[bytes, list[Any]]:
        """Have the function called. Raises InternalError where the child died."""
        packed = trusted.pack(x)
        parts = packed if isinstance(packed, list) else [packed]
        try:
            if self._told is not None:
                _send(self._out, [self._told])
                self._told = None
            _send(self._out, parts)
            answer = _receive(self._in)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise InternalError(f"the process that ran the function of map for this element {self._end()}")
        return bytes(answer[0]), answer[1:]

    def _end(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"died by {signal.Signals(-code).name}" if code < 0 else f"ended itself with exit code {code}"

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Let go of its pipes, and of it."""
        for file in (self._in, self._out):
            with contextlib.suppress(OSError):  # what it did not read any more
                file.close()
        if hasattr(self, "_process"):
            self._process.wait()


def _send(file: IO[bytes], parts: Sequence[Any]) -> None:
    """The number of parts, the length of each, the parts."""
    lengths = [memoryview(part).nbytes for part in parts]
    file.write(struct.pack(f"<{1 + len(parts)}Q", len(parts), *lengths))
    for part in parts:
        file.write(part)
    file.flush()


def _receive(file: IO[bytes]) -> list[Any] | None:
    """The parts that were sent; None at the end of the pipe."""
    head = file.read(_COUNT.size)
    if len(head) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack(head)
    lengths = file.read(_COUNT.size * count)
    if len(lengths) < _COUNT.size * count:
        return None
    parts = [bytearray(length) for length in struct.unpack(f"<{count}Q", lengths)]
    complete = all(file.readinto(part) == len(part) for part in parts)  # type: ignore[attr-defined]
    return parts if complete else None


def main(ours: int, theirs: int) -> None:
    """The child: calls what it is told first with what it is told then, until nobody tells it anything."""
    import faulthandler

    from zmqdist.data.structure import element

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's matter
    faulthandler.enable()
    with os.fdopen(ours, "rb") as asked, os.fdopen(theirs, "wb") as answers:
        told = _receive(asked)
        function: Any = None
        while told is not None and (parts := _receive(asked)) is not None:
            try:
                function = function or trusted.unpack(told[0])
                x = trusted.unpack_parts(parts)
                packed = trusted.pack(element(function(*x) if type(x) is tuple else function(x)))
                answer = [_VALUE, *(packed if isinstance(packed, list) else [packed])]
            except BaseException as error:
                answer = [_ERROR, trusted.pack_error(trusted.tamed(error))]
            sys.stdout.flush()  # what the function has printed, before the parent may end this process
            try:
                _send(answers, answer)
            except BrokenPipeError:
                return
