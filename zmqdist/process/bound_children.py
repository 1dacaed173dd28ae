"""Children that are bound to the zygote of a worker (zygote.py), from the worker's side: slots of functions, and tasks of the data service.

One zygote, one control socket, one owner of it: this. Each child has descriptors of its own besides a pipe for standard error, whose
lines are passed on and whose last ones are kept for the error that names the child's death.

Everything here runs in the loop's thread. Not here: what children are told and tell (slots.py, data/service/worker/task_process.py).
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
from zmqdist.process.zygote import BEAT, BORN, CONTROL_RECORD, KILL, SPAWN, Order
from zmqdist.process.zygote_process import ZygoteProcess
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.scheduling")

SPAWNS_AT_ONCE = 32
"""Children that the zygote is asked for before it has answered: the kernel bounds how many descriptors may be on their way."""

Exited = Callable[[int], None]
"""Gets the exit code, negative for a signal; SILENT where the zygote ended it because this process did not run."""


SpawnChild: TypeAlias = "Callable[[Sequence[int], Exited], BoundChild]"
"""Forks a child that runs a certain module; the descriptors are for it, and closed here."""


class BoundChild:
    """One child.

    Attributes:
      pid: 0 until it is there.
      ticket: 0 until the zygote is asked for it.
      killed: it is to end, whether it is there already or not.
    """

    def __init__(self, owner: BoundChildren, module: str, descriptors: Sequence[int], exited: Exited) -> None:
        self.pid = 0
        self.ticket = 0
        self.exited = exited
        self._owner = owner
        self._module = module
        self._loop = owner.loop
        self._errors, their_errors = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(their_errors, True)
        self._theirs = [their_errors, *descriptors]
        self._lines: deque[bytes] = deque(maxlen=LOG_TAIL_LINES)
        self._last_line = b""
        self.killed = self._closed = False
        self._loop.add_fd(self._errors, self._read_errors)

    def kill(self) -> None:
        """With SIGKILL, and all that it has started; `exited` is called as ever."""
        self.killed = True
        if self.ticket:
            self._owner.send_record(KILL, self.ticket)

    def tail(self) -> str:
        """The last lines that it wrote to standard error."""
        self._read_errors()
        lines = [*self._lines, self._last_line] if self._last_line else list(self._lines)
        return b"\n".join(lines)[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def take_order(self, ticket: int) -> list[int]:
        """The zygote is asked for it: return the descriptors that go there, and are closed here then, so that its end is seen."""
        self.ticket = ticket
        theirs, self._theirs = self._theirs, []
        return [Order("", self._module, [], None, [2], ticket).to_memfd(), *theirs]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_fd(self._errors)
            for descriptor in (self._errors, *self._theirs):
                os.close(descriptor)

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
            *lines, self._last_line = (self._last_line + data).split(b"\n")
            self._lines.extend(line for line in lines if line)
            self._last_line = self._last_line[-LOG_TAIL_BYTES:]


class BoundChildren:
    """See the module's docstring.

    Attributes:
      on_lost: called with the exit code when somebody has killed the zygote; all children have been told of before.
    """

    def __init__(self, loop: Loop, zygote: ZygoteProcess) -> None:
        """Owns the zygote from now on: it is ended by `close`."""
        self.on_lost: list[Callable[[int | None], None]] = []
        self.loop = loop
        self._zygote = zygote
        self._control = zygote.control
        self._control.setblocking(False)
        self._tickets = itertools.count(1)
        self._unordered: deque[BoundChild] = deque()
        self._children: dict[int, BoundChild] = {}
        """Those that the zygote was asked for and that have not ended, by ticket."""
        self._being_forked = 0
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        """What the control socket had no room for: messages, with descriptors that are closed when they are sent."""
        self._watch_s = LEASE_S / 2
        self._closed = self._lost = self._blocked = False
        loop.call_soon(self._open)

    def _open(self) -> None:
        self.loop.add_fd(self._control.fileno(), self._read_control, self._send_queued)
        self._send_beat()

    def spawn(self, module: str, descriptors: Sequence[int], exited: Exited) -> BoundChild:
        """Fork a child that runs `main` of a module with these descriptors.

        Args:
          descriptors: for it, and closed here when it has them.
          exited: called once when it has ended; not after `close`.
        """
        child = BoundChild(self, module, descriptors, exited)
        self._unordered.append(child)
        self._order_next()
        return child

    def watch(self, watch_s: float) -> None:
        """From now on children are ended when this process does not run for so long."""
        self._watch_s = watch_s
        self._send_beat()

    def send_record(self, verb: bytes, ticket: int, number: int = 0) -> None:
        """Send the zygote a word; without effect when it has ended."""
        self._send(CONTROL_RECORD.pack(verb, ticket, number), [])

    def close(self) -> None:
        """End all children and the zygote."""
        if self._closed:
            return
        self._closed = True
        self.loop.set_timer((self, "beat"), None, self._send_beat)
        self.loop.remove_fd(self._control.fileno())
        for child in (*self._unordered, *self._children.values()):
            child.close()
        self._unordered.clear()
        self._drop_unsent()
        self._zygote.close()

    def _order_next(self) -> None:
        """Ask the zygote for the next children."""
        while self._unordered and self._being_forked < SPAWNS_AT_ONCE and not self._lost:
            child = self._unordered.popleft()
            ticket = next(self._tickets)
            self._children[ticket] = child
            self._being_forked += 1
            self._send(SPAWN, child.take_order(ticket))
            if child.killed:
                child.kill()

    def _send(self, message: bytes, descriptors: list[int]) -> None:
        self._unsent.append((message, descriptors))
        if not self._blocked:
            self._send_queued()

    def _send_queued(self) -> None:
        while self._unsent and not self._closed and not self._lost:
            message, descriptors = self._unsent[0]
            try:
                socket.send_fds(self._control, [message], descriptors)
            except BlockingIOError:
                break
            except OSError:  # its end comes through _hear
                self._drop_unsent()
                break
            self._unsent.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        if bool(self._unsent) != self._blocked and not self._closed and not self._lost:
            self._blocked = not self._blocked
            self.loop.watch_writable(self._control.fileno(), self._blocked)

    def _drop_unsent(self) -> None:
        for _, descriptors in self._unsent:
            for descriptor in descriptors:
                os.close(descriptor)
        self._unsent.clear()

    def _read_control(self) -> None:
        while not self._closed:
            try:
                data = self._control.recv(CONTROL_RECORD.size)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._zygote_died()
                return
            verb, ticket, number = CONTROL_RECORD.unpack(data)
            if verb == BORN:
                self._children[ticket].pid = number
                self._being_forked -= 1
                self._order_next()
            else:
                self._exited(ticket, number)

    def _exited(self, ticket: int, code: int) -> None:
        child = self._children.pop(ticket)
        child.exited(code)
        child.close()

    def _zygote_died(self) -> None:
        """Somebody killed it, and all children with it."""
        self._lost = True
        self._drop_unsent()
        code = self._zygote.wait(1.0)
        self.loop.remove_fd(self._control.fileno())
        log.error("the process that slots are forked from ended with %s; this worker cannot go on", code)
        for ticket in list(self._children):
            self._exited(ticket, -int(signal.SIGKILL))
        for callback in self.on_lost:
            callback(code)

    def _send_beat(self) -> None:
        """Tell the zygote that this process runs."""
        self.send_record(BEAT, 0, round(self._watch_s * 1000))
        self.loop.set_timer((self, "beat"), self.loop.now() + self._watch_s / 4, self._send_beat)
