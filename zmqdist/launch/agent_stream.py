"""The byte stream between a launcher and a host agent, read and written by lines: the interface
`AgentStream`, `AgentHost`, which opens one, and `ProcessStream`, which uses the standard input and output of a process such as
ssh.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

NOTES_MAX: Final = 20
"""How many of the last lines of standard error are kept, to explain why the byte stream has
ended.
"""
END_S: Final = 5.0
"""Seconds that the process may take to end after its standard input was closed. Then it is
killed.
"""

NoteHandler = Callable[[str], object]
Explain = Callable[[int, str], str]
"""A function that returns a phrase about the end of a process. Its arguments are the exit code of
the process and the last lines of its standard error.
"""


class AgentStream(Protocol):
    """Sends lines to an agent and receives lines from the agent. Different threads call `send`,
    `receive` and `close`."""

    def send(self, line: bytes) -> None:
        """Send a line. This may block while the agent does not read. Raises OSError if the byte
        stream has ended."""

    def receive(self) -> bytes:
        """Wait for a line, and return the line with its line break. Return b"" if the byte stream
        has ended."""

    def close(self) -> None:
        """Close the agent's standard input, and wait until the byte stream has ended. If this takes
        several seconds, end the stream by force. A second call does nothing.
        """

    def end_reason(self) -> str:
        """Return a phrase that says why the byte stream has ended and, if possible, what the user
        can do. The phrase does not name the host. Call this after the byte stream has ended.
        """


@dataclass(frozen=True)
class AgentHost:
    """A host on which a launcher can start an agent.

    Attributes:
      name: the name of the host, as the user wrote it.
      slots: the largest number of roles on the host. None means no bound.
      open: a function that starts the agent and returns the byte stream to the agent. Its argument
        is a handler that is called with each line of the agent's standard error. The function
        raises OSError if the agent cannot be started.
    """

    name: str
    slots: int | None
    open: Callable[[NoteHandler], AgentStream]


class ProcessStream:
    """An AgentStream over the standard input and output of a process.

    Args:
      command: the command of the process, such as `ssh HOST PYTHON ...`.
      explain: a function that explains the end of the process (`Explain`).
      on_note: a function that is called with each line that the process writes to standard error.
      environment: the environment of the process. None means the environment of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        explain: Explain,
        on_note: NoteHandler,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process. Raises OSError if it cannot be started."""
        self._explain = explain
        self._on_note = on_note
        self._notes: deque[str] = deque(maxlen=NOTES_MAX)
        self._closing = threading.Lock()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # no buffer, because a buffer has a lock, so that `close` would wait for a write that is
            # stuck
            bufsize=0,
            env=environment,
            # With a session of its own, the process gets no Ctrl-C: the launcher closes its agents
            # in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = os.fdopen(os.dup(self._process.stdout.fileno()), "rb")
        self._process.stdout.close()
        self._reader = threading.Thread(
            target=self._read_notes, name="zmqdist-agent-notes", daemon=True
        )
        self._reader.start()

    def send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except ValueError:  # another thread has called `close`, which closed the pipe
            raise BrokenPipeError from None

    def receive(self) -> bytes:
        line = self._output.readline()
        if not line:
            self._output.close()
        return line

    def close(self) -> None:
        with self._closing:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                # also the processes that it has started, such as a proxy of ssh
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._reader.join(END_S)

    def end_reason(self) -> str:
        self.close()
        return self._explain(self._process.returncode, "\n".join(self._notes))

    def _read_notes(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr:
            for raw in self._process.stderr:
                line = raw.decode(errors="replace").rstrip("\r\n")
                self._notes.append(line)
                self._on_note(line)
