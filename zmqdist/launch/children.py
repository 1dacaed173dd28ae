"""Worker processes as children: started by command, watched by the kernel's own word, ended in good order.

A thread waits for the ends of all of them; whoever starts one is told its exit code within milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from zmqdist.dispatch.config import WorkerConfig
from zmqdist.limits import LOG_TAIL_BYTES, LOG_TAIL_LINES

Line = Callable[[str], object]


class Child:
    """One process.

    Attributes:
      name: "worker:0".
      ended: set when its exit code is known.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], lifeline: int) -> None:
        self.name = name
        self.process = process
        self.ended = threading.Event()
        self._lifeline = lifeline
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """As `subprocess`: negative for a signal; None while it runs."""
        return self.process.returncode

    @property
    def tail(self) -> str:
        """Its last lines."""
        return "\n".join(self._tail)[-LOG_TAIL_BYTES:]

    def read_lines(self, on_line: Line) -> None:
        """Pass on what it writes, line by line, in a thread."""
        self._reader = threading.Thread(
            target=self._read, args=(on_line,), name=f"zmqdist-log-{self.name}", daemon=True
        )
        self._reader.start()

    def signal(self, number: int) -> None:
        if not self.ended.is_set():
            self.process.send_signal(number)

    def let_go(self) -> None:
        """Break its lifeline: it ends by itself."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _read(self, on_line: Line) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            self._tail.append(line)
            on_line(line)

    def finish(self) -> None:
        """It has ended: collect its last lines."""
        if self._reader is not None:
            self._reader.join(2.0)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.let_go()


class Children:
    """Worker processes of this process.

    Args:
      on_exit: gets a child that has ended, in the watching thread.
    """

    def __init__(self, on_exit: Callable[[Child], object]) -> None:
        self._on_exit = on_exit
        self._children: list[Child] = []
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._watch, name="zmqdist-children", daemon=True)
        self._closing = False
        self._thread.start()

    def start_worker(self, config: WorkerConfig, environment: Mapping[str, str], on_line: Line | None = None) -> Child:
        """Start a worker.

        Args:
          on_line: gets each line that it writes; None: it writes where this process does.
        """
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "zmqdist.launch.roles", str(theirs), json.dumps(dataclasses.asdict(config))],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                stdout=None if on_line is None else subprocess.PIPE,
                stderr=None if on_line is None else subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the one who started it: it ends them in good order
            )
        finally:
            os.close(theirs)
        child = Child(f"{config.job}:{config.index}", process, ours)
        if on_line is not None:
            child.read_lines(on_line)
        with self._lock:
            self._children.append(child)
        os.write(self._wake_write, b"c")
        return child

    @property
    def running(self) -> list[Child]:
        with self._lock:
            return [child for child in self._children if not child.ended.is_set()]

    def close(self, grace_s: float) -> None:
        """End all: SIGTERM, `grace_s` to drain, then SIGKILL. Returns when all have ended. Idempotent."""
        for child in self.running:
            child.signal(signal.SIGTERM)
        until = time.monotonic() + grace_s
        for child in self.running:
            child.ended.wait(max(0.0, until - time.monotonic()))
        for child in self.running:
            child.signal(signal.SIGKILL)
            child.ended.wait(5.0)
        if not self._closing:
            self._closing = True
            os.write(self._wake_write, b"q")
            self._thread.join(5.0)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _watch(self) -> None:
        watched: dict[int, Child] = {}
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while not self._closing or watched:
            for fd, _ in poll.poll():
                if fd == self._wake_read:
                    os.read(fd, 64)
                    with self._lock:
                        for child in self._children:
                            if not child.ended.is_set() and child not in watched.values():
                                pidfd = os.pidfd_open(child.pid)
                                watched[pidfd] = child
                                poll.register(pidfd, select.POLLIN)
                    continue
                poll.unregister(fd)
                os.close(fd)
                self._ended(watched.pop(fd))

    def _ended(self, child: Child) -> None:
        child.process.wait()
        child.finish()
        child.ended.set()
        self._on_exit(child)
