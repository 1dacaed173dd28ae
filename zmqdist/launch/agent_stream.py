"""What carries the lines between a launcher and an agent: `AgentStream`, and the one over a process such as ssh."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

NOTES_MAX: Final = 20
"""Last lines of standard error that are kept for the sentence about the end of a stream."""
END_S: Final = 5.0
"""Seconds that the process may take to end once its standard input is closed; then it is killed."""

NoteHandler = Callable[[str], object]
Explain = Callable[[int, str], str]
"""Returns a phrase about the end of the process, given its exit code and its last lines of standard error."""


class AgentStream(Protocol):
    """Lines to an agent and from it. The three methods are called by different threads."""

    def send(self, line: bytes) -> None:
        """Send a line; may block while the other side does not read. Raises OSError: the stream has ended."""

    def receive(self) -> bytes:
        """Wait for a line and return it with its end; b"": the stream has ended."""

    def close(self) -> None:
        """End the agent's standard input, wait for the end of what carries it, by force in the end. Idempotent."""

    def why_ended(self) -> str:
        """After the end: a phrase with the cause and, where there is one, the remedy. It does not name the host."""


class ProcessStream:
    """The standard input and output of a process.

    Args:
      command: what to start, as `ssh HOST PYTHON ...`.
      explain: see `Explain`.
      on_note: called with each line of its standard error.
      environment: of the process; None: that of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        explain: Explain,
        on_note: NoteHandler,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process. Raises OSError."""
        self._explain = explain
        self._on_note = on_note
        self._notes: deque[str] = deque(maxlen=NOTES_MAX)
        self._closing = threading.Lock()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # a buffer has a lock, for which `close` would wait while a write is stuck
            env=environment,
            start_new_session=True,  # Ctrl-C is for the launcher, which closes its agents in good order
        )
        assert self._process.stdout is not None
        self._output = os.fdopen(os.dup(self._process.stdout.fileno()), "rb")
        self._process.stdout.close()
        self._reader = threading.Thread(target=self._read_notes, name="zmqdist-agent-notes", daemon=True)
        self._reader.start()

    def send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except ValueError:  # `close` came first
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
                self._process.kill()
                self._process.wait()
            self._reader.join(END_S)

    def why_ended(self) -> str:
        self.close()
        return self._explain(self._process.returncode, "\n".join(self._notes))

    def _read_notes(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr:
            for raw in self._process.stderr:
                line = raw.decode(errors="replace").rstrip("\r\n")
                self._notes.append(line)
                self._on_note(line)
