"""The worker's side of the child processes that are bound to its zygote (zygote.py). The children
run the worker's slots and its tasks of the data service.

`BoundChildren` owns the zygote and the control socket to it. Each child has file descriptors of its
own, and writes its standard output and error to pipes. The lines go into a LogBook, and whole lines
to the worker's own output (own_output.py), unless the worker was told not to echo them. The worker
also keeps the last lines of the standard error, for the error that reports that the child has
crashed.

All code of this module runs in the loop thread. Not here: the messages to and from children
(slots.py, data/service/worker/task_process.py).
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from zmqdist import clock
from zmqdist.limits import LEASE_S, LOG_TAIL_BYTES, LOG_TAIL_LINES
from zmqdist.process.log_book import STDERR, STDOUT, ChildOutput, LogBook
from zmqdist.process.own_output import OwnOutput
from zmqdist.process.zygote import BEAT, BORN, CONTROL_RECORD, KEEP, KILL, SPAWN, Order
from zmqdist.process.zygote_client import ZygoteProcess
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.scheduling")

SPAWNS_AT_ONCE = 32
"""Largest number of children that are ordered and not yet forked. It is bounded because the kernel
limits the number of file descriptors that are in transit on a socket.
"""

READ_BYTES: Final = 65536
READS_PER_TURN: Final = 16

Exited = Callable[[int], None]
"""A function that is called with the exit code of a child. The code is -n if signal n ended the
child, and SILENT if the zygote killed the child because the worker did not run.
"""


SpawnChild: TypeAlias = "Callable[[Sequence[int], Exited], BoundChild]"
"""`BoundChildren.spawn` with its argument `module` already given, so that the function needs only
the file descriptors for the child and `exited`.
"""


class BoundChild:
    """One child process. The object exists before the zygote has forked the child.

    Attributes:
      title: what the child is, for people: "slot 0".
      pid: the pid of the child. 0 until the zygote has forked the child.
      ticket: the number by which the zygote knows the child. 0 until the zygote was ordered to fork
        the child.
      killed: whether `kill` was called. If the child was not ordered yet, it is killed as soon as
        it is ordered.
    """

    def __init__(
        self,
        owner: BoundChildren,
        module: str,
        descriptors: Sequence[int],
        exited: Exited,
        variables: dict[str, str],
        title: str,
    ) -> None:
        self.title = title
        self.pid = 0
        self.ticket = 0
        self.exited = exited
        self._owner = owner
        self._module = module
        self._variables = variables
        self._loop = owner.loop
        self._theirs = [*descriptors]
        self._pipes: dict[int, int] = {}
        """The reading ends of the child's standard output and error, by stream."""
        for stream in (STDERR, STDOUT):
            self._pipes[stream], theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(theirs, True)
            self._theirs.insert(0, theirs)
        self._output = ChildOutput(owner.book, title)
        self._unechoed = {STDOUT: b"", STDERR: b""}
        self._lines: deque[bytes] = deque(maxlen=LOG_TAIL_LINES)
        self._last_line = b""
        self.killed = self._closed = False
        for stream in self._pipes:
            self.watch(stream)

    def kill(self) -> None:
        """Have the zygote send SIGKILL to the child's process group. `exited` is called when the
        child has ended."""
        self.killed = True
        if self.ticket:
            self._owner.send_record(KILL, self.ticket)

    def keep(self, silence_s: float) -> None:
        """Have the zygote kill the child, which was forked, only when this process has not run for
        so many seconds."""
        self._owner.send_record(KEEP, self.ticket, round(silence_s * 1000))

    def tail(self) -> str:
        """Return the last lines that the child has written to standard error. Call this in the loop
        thread, which also reads the pipe."""
        self._read(STDERR, whole=True)
        lines = [*self._lines, self._last_line] if self._last_line else list(self._lines)
        return b"\n".join(lines)[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def take_order(self, ticket: int) -> list[int]:
        """Return the file descriptors to send to the zygote. The first of them is a memfd with the
        order.

        The caller must close the descriptors after it has sent them. If they stayed open here, the
        pipe of the child's standard error would not end when the child ends.
        """
        self.ticket = ticket
        theirs, self._theirs = self._theirs, []
        order = Order("", self._module, [], None, [1, 2], ticket, self._variables)
        return [order.to_memfd(), *theirs]

    def close(self) -> None:
        """Close the file descriptors that this process has open for the child. Idempotent."""
        if not self._closed:
            self.read_left()  # the loop may not have read the child's last lines yet
            self._closed = True
            self._output.end(self._loop.now())
            for stream, fd in self._pipes.items():
                self._echo(stream, b"\n" if self._unechoed[stream] else b"")
                self._loop.remove_fd(fd)
            for fd in (*self._pipes.values(), *self._theirs):
                os.close(fd)

    def read_left(self) -> None:
        """Read what the child has written until now."""
        for stream in self._pipes:
            self._read(stream, whole=True)

    def watch(self, stream: int) -> None:
        """Have the loop read a stream of the child, at first or again."""
        if not self._closed:
            self._loop.add_fd(self._pipes[stream], partial(self._read, stream))

    def tick(self) -> None:
        self._output.tick(self._loop.now())
        self._owner.on_lines()

    def _read(self, stream: int, *, whole: bool = False) -> None:
        """Read at most READS_PER_TURN times, because a child may write without end, or with `whole`
        what fits into the pipe."""
        if not whole and self._owner.holds_back(self, stream):
            self._loop.remove_fd(self._pipes[stream])
            return
        for _ in range(READS_PER_TURN):
            try:
                data = b"" if self._closed else os.read(self._pipes[stream], READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                if not self._closed:
                    self._loop.remove_fd(self._pipes[stream])
                return
            self._echo(stream, data)
            resume_at = self._output.feed(stream, data, self._loop.now())
            if resume_at is not None:
                self._loop.set_timer((self, "flood"), resume_at, self.tick)
            if stream == STDERR:
                *lines, self._last_line = (self._last_line + data).split(b"\n")
                self._lines.extend(line for line in lines if line)
                self._last_line = self._last_line[-LOG_TAIL_BYTES:]
            self._owner.on_lines()

    def _echo(self, stream: int, data: bytes) -> None:
        """Write whole lines, and states of progress bars, to the worker's own output."""
        if self._owner.own_output is None:
            return
        data = self._unechoed[stream] + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > READ_BYTES:
            end = len(data)
        self._unechoed[stream] = data[end:]
        if end:
            self._owner.own_output.write(stream, data[:end])


class BoundChildren:
    """The child processes of one zygote. The module's docstring has the rules.

    Attributes:
      on_lost: functions that are called when the zygote has ended unexpectedly, with its exit code,
        or with None if the exit code is not known. The function `exited` of each ordered child is
        called before them.
      on_lines: called when children have written something.
      book: the last lines of the children.
      own_output: the copy to the worker's own output; None without one.
    """

    def __init__(self, loop: Loop, zygote: ZygoteProcess, *, echo: bool = True) -> None:
        """Take ownership of a zygote. `close` ends it."""
        self.on_lost: list[Callable[[int | None], None]] = []
        self.on_lines: Callable[[], object] = int
        self.loop = loop
        self.book = LogBook(clock.time() - loop.now())
        self.own_output = OwnOutput(lambda: loop.call_soon(self._go_on)) if echo else None
        self._held_back: list[tuple[BoundChild, int]] = []
        self._zygote = zygote
        self._control = zygote.control
        self._control.setblocking(False)
        self._tickets = itertools.count(1)
        self._unordered: deque[BoundChild] = deque()
        self._children: dict[int, BoundChild] = {}
        """The children that were ordered and have not ended, by ticket."""
        self._being_forked = 0
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        """The messages to the zygote that are not sent yet, each with its file descriptors, which
        are closed after the message was sent."""
        self._watch_s = LEASE_S / 2
        self._closed = self._lost = self._blocked = False
        loop.call_soon(self._open)

    def _open(self) -> None:
        self.loop.add_fd(self._control.fileno(), self._read_control, self._send_queued)
        self._send_beat()

    def spawn(
        self,
        module: str,
        descriptors: Sequence[int],
        exited: Exited,
        variables: dict[str, str] | None = None,
        title: str = "data task",
    ) -> BoundChild:
        """Have the zygote fork a child that runs `main` of a module. This method returns before the
        child exists.

        Args:
          descriptors: the file descriptors that the child gets as arguments of `main`. They are
            closed in this process after they were sent.
          exited: a function that is called once, when the child has ended. It is not called after
            `close`, or if the zygote ends before the child was ordered.
          variables: environment variables of this child, beside those of the zygote.
          title: what the child is, for people.
        """
        child = BoundChild(self, module, descriptors, exited, variables or {}, title)
        if self._closed:
            child.close()
            return child
        self._unordered.append(child)
        self._order_next()
        return child

    def holds_back(self, child: BoundChild, stream: int) -> bool:
        """Return whether this stream must not be read now; the child is watched again later."""
        if self.own_output is None or not self.own_output.is_full:
            return False
        self._held_back.append((child, stream))
        return True

    def _go_on(self) -> None:
        held_back, self._held_back = self._held_back, []
        for child, stream in held_back:
            child.watch(stream)

    def read_left(self) -> None:
        """Read what the children have written until now."""
        for child in self._children.values():
            child.read_left()

    @property
    def zygote_pid(self) -> int:
        """The pid of the process whose children the children are."""
        return self._zygote.pid

    @property
    def present(self) -> list[tuple[str, int]]:
        """The title and pid of each child that runs."""
        return [(child.title, child.pid) for child in self._children.values() if child.pid]

    def import_module(self, module: str) -> None:
        """Have the zygote import a module before it forks further children."""
        self._send(json.dumps([module, []]).encode(), [])

    def watch(self, watch_s: float) -> None:
        """Have the zygote kill the children if this process does not run for `watch_s` seconds.
        This replaces the earlier watch."""
        self._watch_s = watch_s
        self._send_beat()

    def send_record(self, verb: bytes, ticket: int, number: int = 0) -> None:
        """Send a control record to the zygote. If the zygote has ended, this does nothing."""
        self._send(CONTROL_RECORD.pack(verb, ticket, number), [])

    def close(self) -> None:
        """End all children and the zygote. Idempotent."""
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
        if self.own_output is not None:
            self.own_output.close()

    def _order_next(self) -> None:
        """Order the next children from the zygote, as long as fewer than SPAWNS_AT_ONCE ordered
        children wait to be forked."""
        # the kernel bounds the descriptors that are on the way in a socket
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
            except OSError:  # the zygote has ended, which _read_control notices
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
            except OSError:  # the zygote has ended without reading all messages
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
        """Report the end of all children, because the zygote has ended and the kernel has killed
        its children."""
        self._lost = True
        self._drop_unsent()
        code = self._zygote.wait(1.0)
        self.loop.remove_fd(self._control.fileno())
        log.error(
            "the process from which slots are forked ended with %s; this worker cannot continue",
            code,
        )
        for ticket in list(self._children):
            self._exited(ticket, -int(signal.SIGKILL))
        for callback in self.on_lost:
            callback(code)

    def _send_beat(self) -> None:
        """Tell the zygote that this process runs, and set a timer that repeats this after a quarter
        of the watch."""
        self.send_record(BEAT, 0, round(self._watch_s * 1000))
        self.loop.set_timer((self, "beat"), self.loop.now() + self._watch_s / 4, self._send_beat)
