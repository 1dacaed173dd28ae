"""Slots as child processes, from the worker's side.

Each slot has a pipe for work and outcomes, a page of memory for what must not wait for a message (slot_main.py), and a pipe for
standard error, whose lines are passed on and whose last ones are kept for the error that names the slot's death.

Everything here runs in the loop's thread.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.core.worker_events import (
    ForgetFunctions,
    Give,
    SlotDied,
    SlotFinished,
    SlotReady,
    SlotReclaimed,
    SlotSeen,
)
from zmqdist.dispatch.pipe import LoopPipe, PipeMessage, Ready, Report, Welcome, Work
from zmqdist.dispatch.slot_main import CANCEL, GIVEN_UP, GIVEN_UP_TO, PAGE_BYTES, POSITION
from zmqdist.dispatch.template import BEAT, COMMAND, EXIT, KILL, PID, SPAWN, TemplateProcess
from zmqdist.errors import OpError, ResourceExhaustedError, UnavailableError
from zmqdist.limits import LEASE_S, LOG_TAIL_BYTES, LOG_TAIL_LINES
from zmqdist.messages import BULK, ERROR
from zmqdist.net.arena import FROZEN, Block, Handle, this_arena
from zmqdist.net.lent import PeerArena, open_peer
from zmqdist.net.loop import Loop
from zmqdist.net.processes import is_alive
from zmqdist.wire import trusted

log = logging.getLogger("zmqdist.dispatch")

LOOK_S = 0.02
"""How often the positions of busy slots are looked at: a function that runs for longer than this is known to have started."""

SPAWNS_AT_ONCE = 32
"""Slots that the template is asked for before it has answered: its socket holds a few hundred messages."""

SLOT_FDS = 3
"""Descriptors of this process for one slot: work, page, standard error."""

OTHER_FDS = 96
"""Descriptors for everything else that a worker does: connections, threads, and slots that are being made."""

SlotEvent = SlotReady | SlotFinished | SlotSeen | SlotReclaimed | SlotDied
Feed = Callable[[SlotEvent], None]
Bulk = Callable[[int, list[Any]], bytes]


class ProcessSlots:
    """The slot processes of one worker.

    Args:
      feed: gets what happens to the slots.
      hold: keeps the parts of a result that is BULK or KEPT and gives a reference to them.
      address: of this worker, for its slots.
      template: what they are forked from; ended with them.
    """

    can_kill = True

    def __init__(self, loop: Loop, slots: int, feed: Feed, hold: Bulk, address: str, template: TemplateProcess) -> None:
        self._loop = loop
        self.address = address
        self._feed = feed
        self._hold = hold
        self._unasked: deque[_SlotProcess] = deque()
        self._unborn = 0
        self._slots: list[_SlotProcess | None] = [None] * slots
        self._by_pid: dict[int, _SlotProcess] = {}
        self._watch_s = LEASE_S / 2
        self._template = template
        self._control = template.control
        self._control.setblocking(False)
        self._closed = False
        self._looking = False
        self._template_lost = False
        loop.call_soon(self._open)

    def _open(self) -> None:
        self._loop.add_fd(self._control.fileno(), self._hear)
        self._beat()

    # -- what the machine asks for --------------------------------------------------------------------------------

    def spawn(self, slot: int) -> None:
        if self._template_lost:
            return  # the machine is being told that nothing starts any more
        process = _SlotProcess(self, slot)
        self._slots[slot] = process
        self._unasked.append(process)
        self._ask()

    def _ask(self) -> None:
        """Ask the template for the next slots."""
        while self._unasked and self._unborn < SPAWNS_AT_ONCE:
            process = self._unasked.popleft()
            self._unborn += 1
            try:
                socket.send_fds(self._control, [COMMAND.pack(SPAWN, process.slot, 0)], process.theirs)
            except ConnectionError:
                pass  # the template's end comes through _hear
            finally:
                process.hand_over()

    def give(self, give: Give) -> None:
        process = self._slots[give.slot]
        assert process is not None
        process.given_to = give.items[-1][0]
        self._look_soon()
        process.pipe.send(Work(give.functions, give.items, []))

    def forget(self, forget: ForgetFunctions) -> None:
        process = self._slots[forget.slot]
        if process is not None:
            process.pipe.send(Work([], [], forget.functions))

    def reclaim(self, slot: int) -> None:
        """Write the range, then read the position: slot_main.py tells why this order."""
        process = self._slots[slot]
        if process is None:
            return
        cells = process.cells
        before = cells[POSITION]
        cells[GIVEN_UP] = before
        cells[GIVEN_UP_TO] = process.given_to
        os.sched_yield()
        position = cells[POSITION]
        self._loop.call_soon(self._feed, SlotReclaimed(slot, position))

    def interrupt(self, slot: int, position: int) -> None:
        process = self._slots[slot]
        if process is not None:
            process.cells[CANCEL] = position

    def kill(self, slot: int) -> None:
        process = self._slots[slot]
        if process is None:
            return
        if process.pid:
            self._tell(KILL, process.pid)
        else:
            process.kill_when_born = True

    def close(self) -> None:
        """End all slots and the template."""
        if self._closed:
            return
        self._closed = True
        self._loop.set_timer((self, "look"), None, self._look)
        self._loop.set_timer((self, "beat"), None, self._beat)
        self._loop.remove_fd(self._control.fileno())
        for process in self._unasked:
            process.hand_over()
        self._unasked.clear()
        for process in (*self._by_pid.values(), *filter(None, self._slots)):
            process.close()
        self._template.close()

    # -- what the template and the slots tell ----------------------------------------------------------------------

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
                self._born(first, second)
            elif verb == EXIT:
                self._exited(first, second)

    def _born(self, slot: int, pid: int) -> None:
        process = self._slots[slot]
        assert process is not None
        process.pid = pid
        self._by_pid[pid] = process
        self._unborn -= 1
        self._ask()
        if process.kill_when_born:
            self._tell(KILL, pid)

    def _exited(self, pid: int, code: int) -> None:
        process = self._by_pid.pop(pid)
        process.exit_code = code
        process.drain()
        self._slots[process.slot] = None
        position = process.cells[POSITION] if process.running else 0
        process.close()
        self._feed(SlotDied(process.slot, position, code, process.tail()))

    def _template_died(self) -> None:
        """Somebody killed it, and all slots with it."""
        self._template_lost = True
        code = self._template.wait(1.0)
        self._loop.remove_fd(self._control.fileno())
        log.error("the template process of the slots ended with %s; this worker cannot go on", code)
        for process in list(self._by_pid.values()):
            self._exited(process.pid, -9)
        for slot in range(len(self._slots)):
            for _ in range(3):
                self._feed(SlotDied(slot, 0, code, "the template process that slots are forked from has ended"))

    def finished(self, process: _SlotProcess, message: PipeMessage, parts: list[bytearray]) -> None:
        if isinstance(message, Ready):
            process.arena = None if message.memory is None else open_peer(message.memory)
            self._feed(SlotReady(process.slot))
        elif isinstance(message, Report):
            outcomes = message.outcomes
            if message.parts:
                ((position, kind, _),) = outcomes
                try:
                    outcomes = [(position, BULK, self._hold(kind, process.taken_over(message, parts)))]
                except OpError as error:
                    if not is_alive(process.pid):
                        return  # with its memory; its end is about to be told
                    outcomes = [(position, ERROR, trusted.pack_error(error))]
            process.finished_to = outcomes[-1][0]
            self._feed(SlotFinished(process.slot, outcomes))

    def _look(self) -> None:
        """Tell the machine where busy slots are."""
        self._looking = False
        for process in self._slots:
            if process is not None and process.running:
                self._look_soon()
                position = process.cells[POSITION]
                if position > process.seen_at:
                    process.seen_at = position
                    self._feed(SlotSeen(process.slot, position))

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.set_timer((self, "look"), self._loop.now() + LOOK_S, self._look)

    def _beat(self) -> None:
        """Tell the template that this process runs."""
        self._tell(BEAT, round(self._watch_s * 1000))
        self._loop.set_timer((self, "beat"), self._loop.now() + self._watch_s / 4, self._beat)

    def watch(self, watch_s: float) -> None:
        """From now on slots are ended when this process does not run for so long."""
        self._watch_s = watch_s
        self._beat()

    def _tell(self, verb: bytes, number: int) -> None:
        try:
            self._control.send(COMMAND.pack(verb, number, 0))
        except BlockingIOError:
            pass
        except OSError:
            pass  # its end comes through _hear


def check_descriptors(slots: int) -> None:
    """Before anything is made: raises ResourceExhaustedError when this process may not have the descriptors for so many slots."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = slots * SLOT_FDS + OTHER_FDS
    if limit != resource.RLIM_INFINITY and wanted > limit:
        problem = (
            f"{slots} slots need {wanted} descriptors, and this process may have {limit}: start it with fewer slots,"
            f" or after `ulimit -n {wanted}`"
        )
        raise ResourceExhaustedError(None, None, problem)


class _SlotProcess:
    """One life of one slot."""

    def __init__(self, owner: ProcessSlots, slot: int) -> None:
        self.slot = slot
        self.pid = 0
        self.exit_code: int | None = None
        self.kill_when_born = False
        self.given_to = 0
        self.finished_to = 0
        self.seen_at = 0
        self.arena: PeerArena | None = None
        self._loop = owner._loop
        ours, self._their_pipe = socket.socketpair()
        self._page_fd = os.memfd_create("zmqdist-slot", os.MFD_CLOEXEC)
        os.ftruncate(self._page_fd, PAGE_BYTES)
        self._page = mmap.mmap(self._page_fd, PAGE_BYTES)
        self.cells = memoryview(self._page).cast("Q")
        self._errors, self._their_errors = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._their_errors, True)
        self._lines: deque[bytes] = deque(maxlen=LOG_TAIL_LINES)
        self._line = b""
        self._closed = False
        self.pipe = LoopPipe(self._loop, ours, lambda message, parts: owner.finished(self, message, parts))
        self._loop.add_fd(self._errors, self._read_errors)
        self.pipe.send(Welcome(owner.address))

    def taken_over(self, report: Report, piped: list[bytearray]) -> list[Any]:
        """The parts of a bulk result, which outlive the slot. Raises UnavailableError when its memory cannot be opened."""
        came = iter(piped)
        return [next(came) if isinstance(part, int) else self._adopt(part) for part in report.parts]

    def _adopt(self, handle: Handle) -> Block | NDArray[np.uint8]:
        arena = this_arena()
        if arena is None or self.arena is None:
            raise UnavailableError(None, None, f"shared memory of slot process {self.pid} cannot be opened here")
        if handle[-1] == FROZEN:
            return self.arena.attach(handle)
        segment, lease = self.arena.adopt(handle)
        return arena.adopt(segment, handle[3], handle[4], lease)

    @property
    def theirs(self) -> list[int]:
        return [self._their_pipe.fileno(), self._page_fd, self._their_errors]

    def hand_over(self) -> None:
        """The child has its descriptors: ours of the same things are closed, so that its end is seen."""
        self._their_pipe.close()
        os.close(self._page_fd)
        os.close(self._their_errors)

    @property
    def running(self) -> bool:
        """Whether it has work that it did not report."""
        return self.given_to > self.finished_to

    def drain(self) -> None:
        """It has ended: read what it still said."""
        self.pipe.drain()
        self._read_errors()

    def tail(self) -> str:
        """Its last lines."""
        lines = [*self._lines, self._line] if self._line else list(self._lines)
        return b"\n".join(lines)[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.pipe.close()
        self._loop.remove_fd(self._errors)
        os.close(self._errors)
        self.cells.release()
        self._page.close()

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
