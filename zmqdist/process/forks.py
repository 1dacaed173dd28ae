"""Children of the template process, from the worker's side: slots of scheduled functions, and tasks of the data service.

One template, one control socket, one owner of it: this. Each child has descriptors of its own besides a pipe for standard error, whose
lines are passed on and whose last ones are kept for the error that names the child's death.

Everything here runs in the loop's thread. Not here: what children are told and tell (slots.py, data/service/task_process.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from zmqdist.limits import LEASE_S, LOG_TAIL_BYTES, LOG_TAIL_LINES
from zmqdist.process.template import BEAT, COMMAND, EXIT, KILL, PID, SPAWN, TemplateProcess
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.scheduling")

SPAWNS_AT_ONCE = 32
"""Children that the template is asked for before it has answered: its socket holds a few hundred messages."""

Exited = Callable[[int], None]
"""Gets the exit code, negative for a signal; SILENT where the template ended it because this process did not run."""


SpawnChild: TypeAlias = "Callable[[Sequence[int], Exited], Fork]"
"""Forks a child of some kind; the descriptors are for it, and closed here."""


class Fork:
    """One child.

    Attributes:
      pid: 0 until it is there.
    """

    def __init__(self, owner: Forks, kind: int, ticket: int, descriptors: Sequence[int], exited: Exited) -> None:
        self.pid = 0
        self.kind = kind
        self.ticket = ticket
        self.exited = exited
        self._owner = owner
        self._loop = owner.loop
        self._errors, their_errors = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(their_errors, True)
        self.theirs = [*descriptors, their_errors]
        self._lines: deque[bytes] = deque(maxlen=LOG_TAIL_LINES)
        self._line = b""
        self._kill_when_born = self._closed = False
        self._loop.add_fd(self._errors, self._read_errors)

    def kill(self) -> None:
        """With SIGKILL, and all that it has started; `exited` is called as ever."""
        if self.pid:
            self._owner.tell(KILL, self.pid)
        else:
            self._kill_when_born = True

    def tail(self) -> str:
        """The last lines that it wrote to standard error."""
        self._read_errors()
        lines = [*self._lines, self._line] if self._line else list(self._lines)
        return b"\n".join(lines)[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def born(self, pid: int) -> None:
        self.pid = pid
        if self._kill_when_born:
            self.kill()

    def hand_over(self) -> None:
        """The child has its descriptors: ours of the same things are closed, so that its end is seen."""
        for descriptor in self.theirs:
            os.close(descriptor)
        self.theirs = []

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_fd(self._errors)
            os.close(self._errors)

    def _read_errors(self) -> None:
        while not self._closed:
            try:
                data = os.read(self._errors, 65536)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_fd(self._errors)
                return
            os.write(2, data)
            *lines, self._line = (self._line + data).split(b"\n")
            self._lines.extend(line for line in lines if line)
            self._line = self._line[-LOG_TAIL_BYTES:]


class Forks:
    """See the module's docstring.

    Attributes:
      on_lost: called with the exit code when somebody has killed the template; all children have been told of before.
    """

    def __init__(self, loop: Loop, template: TemplateProcess) -> None:
        """Owns the template from now on: it is ended by `close`."""
        self.on_lost: list[Callable[[int | None], None]] = []
        self.loop = loop
        self._template = template
        self._control = template.control
        self._control.setblocking(False)
        self._tickets = itertools.count(1)
        self._unasked: deque[Fork] = deque()
        self._unborn: dict[int, Fork] = {}
        self._by_pid: dict[int, Fork] = {}
        self._watch_s = LEASE_S / 2
        self._closed = self._lost = False
        loop.call_soon(self._open)

    def _open(self) -> None:
        self.loop.add_fd(self._control.fileno(), self._hear)
        self._beat()

    def spawn(self, kind: int, descriptors: Sequence[int], exited: Exited) -> Fork:
        """A child of a kind (template.py).

        Args:
          descriptors: for it, and closed here when it has them.
          exited: called once when it has ended; not after `close`.
        """
        fork = Fork(self, kind, next(self._tickets), descriptors, exited)
        self._unasked.append(fork)
        self._ask()
        return fork

    def watch(self, watch_s: float) -> None:
        """From now on children are ended when this process does not run for so long."""
        self._watch_s = watch_s
        self._beat()

    def close(self) -> None:
        """End all children and the template."""
        if self._closed:
            return
        self._closed = True
        self.loop.set_timer((self, "beat"), None, self._beat)
        self.loop.remove_fd(self._control.fileno())
        for fork in (*self._unasked, *self._unborn.values(), *self._by_pid.values()):
            fork.hand_over()
            fork.close()
        self._unasked.clear()
        self._template.close()

    def _ask(self) -> None:
        """Ask the template for the next children."""
        while self._unasked and len(self._unborn) < SPAWNS_AT_ONCE and not self._lost:
            fork = self._unasked.popleft()
            self._unborn[fork.ticket] = fork
            try:
                socket.send_fds(self._control, [COMMAND.pack(SPAWN, fork.ticket, fork.kind)], fork.theirs)
            except ConnectionError:
                pass  # the template's end comes through _hear
            finally:
                fork.hand_over()

    def _hear(self) -> None:
        while not self._closed:
            try:
                data = self._control.recv(COMMAND.size)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._template_died()
                return
            verb, first, second = COMMAND.unpack(data)
            if verb == PID:
                fork = self._unborn.pop(first)
                self._by_pid[second] = fork
                fork.born(second)
                self._ask()
            elif verb == EXIT:
                self._exited(first, second)

    def _exited(self, pid: int, code: int) -> None:
        fork = self._by_pid.pop(pid)
        fork.exited(code)
        fork.close()

    def _template_died(self) -> None:
        """Somebody killed it, and all children with it."""
        self._lost = True
        code = self._template.wait(1.0)
        self.loop.remove_fd(self._control.fileno())
        log.error("the template process of the slots ended with %s; this worker cannot go on", code)
        for pid in list(self._by_pid):
            self._exited(pid, -int(signal.SIGKILL))
        for told in self.on_lost:
            told(code)

    def _beat(self) -> None:
        """Tell the template that this process runs."""
        self.tell(BEAT, round(self._watch_s * 1000))
        self.loop.set_timer((self, "beat"), self.loop.now() + self._watch_s / 4, self._beat)

    def tell(self, verb: bytes, number: int) -> None:
        """Send the template a command; without effect when it has ended."""
        try:
            self._control.send(COMMAND.pack(verb, number, 0))
        except BlockingIOError:
            pass
        except OSError:
            pass  # its end comes through _hear
