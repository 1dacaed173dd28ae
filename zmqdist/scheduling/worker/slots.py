"""Slots as child processes, from the worker's side.

Each slot has a pipe for work and outcomes, and a page of shared memory for numbers that must arrive
sooner than a message (slot_main.py). process/bound_children.py forks the slot processes and reads
their standard error.

The code of this module runs in the loop's thread.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import signal
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zmqdist.cluster.resolvers.devices import CUDA
from zmqdist.errors import OpError, ResourceExhaustedError, UnavailableError, describe_exit
from zmqdist.messages import BULK, ERROR
from zmqdist.process.bound_children import BoundChild, BoundChildren
from zmqdist.process.zygote import SILENT
from zmqdist.scheduling.worker import slot_main
from zmqdist.scheduling.worker.run_figures import TABLE_BYTES, RunReader, new_table
from zmqdist.scheduling.worker.slot_main import (
    CANCEL,
    GIVEN_UP,
    GIVEN_UP_TO,
    INDEX,
    PAGE_BYTES,
    POSITION,
    SLOT_CODEC,
    WORKERS,
    SlotAnswer,
    SlotAsks,
    SlotEnd,
    SlotGoesOn,
    SlotMessage,
    SlotReport,
    SlotStarted,
    SlotWelcome,
    SlotWork,
)
from zmqdist.scheduling.worker.worker_events import (
    EndSlot,
    ForgetFunctions,
    Give,
    Interrupt,
    Kill,
    Reclaim,
    SlotDied,
    SlotFinished,
    SlotOverMemory,
    SlotReady,
    SlotReclaimed,
    SlotResumed,
    SlotSeen,
    SlotWaits,
    Spawn,
    WaitAnswered,
)
from zmqdist.scheduling.worker.worker_reports import OVER_MEMORY, SlotAtWork, WorkerReports
from zmqdist.task_context import Worker
from zmqdist.transport.loop import Loop
from zmqdist.transport.memory_limits import is_alive, oom_kills, private_bytes
from zmqdist.transport.pipe import LoopPipe, Parts
from zmqdist.transport.shm_pool import FROZEN, Block, Handle, PeerPool, open_peer, this_pool
from zmqdist.wire import results

MEMORY_POLL_S = 0.1
"""Seconds between two reads of the memory of the slots, if it has a bound. A process that fills
fresh memory as fast as it can takes some hundred MB in this time."""

POSITION_POLL_S = 0.02
"""Seconds between two reads of the positions of busy slots, so that the worker soon knows which
longer functions have begun."""

SLOT_FDS = 4
"""The number of descriptors of the worker for each slot: pipe, page, standard output and error."""

ACTOR_FDS = 8
"""The number of descriptors of the worker for each actor: pipe, standard output and error, and
while its process is being started their other ends, the listening socket, and the table of its
figures."""

OTHER_FDS = 96
"""The number of descriptors that the worker needs for connections, threads, and slots that are
starting."""

LINE_CHARS_MAX = 200
"""The largest number of characters of a dead slot process's last output line that are logged."""

log = logging.getLogger("zmqdist.scheduling")

COORDINATORS: Final = "zmqdist.scheduling.coordinator.coordinator"
"""The module that functions which schedule work need. The zygote imports it when the first function
schedules work, so that slots that start later have it."""

SlotEvent = (
    SlotReady
    | SlotFinished
    | SlotSeen
    | SlotReclaimed
    | SlotDied
    | SlotOverMemory
    | SlotWaits
    | SlotResumed
)
Feed = Callable[[SlotEvent], None]
LeaseAt = Callable[[int, int], "int | None"]
HoldResult = Callable[[int, list[Any]], bytes]


class ProcessSlots:
    """The slot processes of one worker.

    Args:
      feed: called with each event of a slot.
      hold: holds the parts of a BULK or KEPT result, and returns the encoded reference to the
        result.
      address, key: the address at which slots reach this worker, and the worker's public key.
      children: forks the slot processes.
      worker: returns the worker's index and the number of workers.
      dispatcher: the address of the dispatcher.
      lease_at: returns the lease of an item, by slot and position.
      gpus: the ids of the worker's GPUs, by number.
      memory_bytes_max: the largest amount of private memory of a slot process; None means no bound.
      facts: gets what the slots report for the facts.

    Attributes:
      deaths: the number of slot processes that ended without being killed by this worker.
    """

    can_kill = True
    resources = None
    """None, because each slot process has its own resources, and the worker cannot count them."""

    def __init__(
        self,
        loop: Loop,
        slots: int,
        feed: Feed,
        hold: HoldResult,
        address: str,
        key: bytes,
        children: BoundChildren,
        worker: Worker,
        dispatcher: str,
        lease_at: LeaseAt,
        gpus: Sequence[str],
        memory_bytes_max: float | None,
        facts: WorkerReports,
    ) -> None:
        self.loop = loop
        self.facts = facts
        self.dispatcher = dispatcher
        self._lease_at = lease_at
        self._nested = False
        self._gpus = gpus
        self.address = address
        self.key = key
        self._feed = feed
        self._hold = hold
        self._slots: list[_SlotProcess | None] = [None] * slots
        self._children = children
        self._worker = worker
        children.on_lost.append(self._zygote_died)
        self._memory_bytes_max = memory_bytes_max
        if memory_bytes_max is not None:
            loop.call_soon(self._read_memory)
        self._poll_scheduled = False
        self._can_fork = True
        self.deaths = 0

    # -- effects of the machine --------------------------------------------------------------------

    def spawn(self, spawn: Spawn) -> None:
        if not self._can_fork:
            return  # `_zygote_died` has reported the deaths of all slots, or the worker ends
        if spawn.slot == len(self._slots):
            self._slots.append(None)
        process = self._slots[spawn.slot] = _SlotProcess(self, spawn.slot)
        process.child = self._children.spawn(
            slot_main.__name__,
            process.child_fds(),
            lambda code: self._exited(process, code),
            self.variables(spawn.devices),
            f"slot {spawn.slot}",
        )

    def variables(self, devices: tuple[int, ...]) -> dict[str, str]:
        """Return the environment variables of a process for these devices."""
        return {CUDA: ",".join(self._gpus[device] for device in devices)} if devices else {}

    def give(self, give: Give) -> None:
        process = self._slots[give.slot]
        assert process is not None
        process.given_to = give.items[-1][0]
        # The slot must know the index before it runs an item.
        process.cells[INDEX], process.cells[WORKERS] = self._worker()
        self._schedule_poll()
        process.pipe.send(SlotWork(give.functions, give.items, []))

    def forget(self, forget: ForgetFunctions) -> None:
        process = self._slots[forget.slot]
        if process is not None:
            self.facts.take_runs(process.runs)
            process.pipe.send(SlotWork([], [], forget.functions))

    def reclaim(self, reclaim: Reclaim) -> None:
        """Take back the items that the slot has not begun. slot_main.py explains why the range is
        written before POSITION is read."""
        process = self._slots[reclaim.slot]
        if process is None:
            return
        cells = process.cells
        before = cells[POSITION]
        cells[GIVEN_UP] = before
        cells[GIVEN_UP_TO] = process.given_to
        os.sched_yield()
        position = cells[POSITION]
        self.loop.call_soon(self._feed, SlotReclaimed(reclaim.slot, position))

    def interrupt(self, interrupt: Interrupt) -> None:
        process = self._slots[interrupt.slot]
        if process is not None:
            process.cells[CANCEL] = interrupt.position

    def kill(self, kill: Kill) -> None:
        process = self._slots[kill.slot]
        if process is not None:
            process.killed = True
            process.child.kill()

    def end(self, end: EndSlot) -> None:
        process = self._slots[end.slot]
        if process is not None:
            process.killed = True
            process.pipe.send(SlotEnd())

    def answer(self, answer: WaitAnswered) -> None:
        """Reply to the SlotAsks of a function that wants to wait."""
        process = self._slots[answer.slot]
        if process is not None:
            process.pipe.send(SlotAnswer(0, answer.refusal))

    def close(self) -> None:
        """Release pipes and pages. The slot processes end together with the zygote."""
        self.loop.set_timer((self, "look"), None, self._poll_positions)
        self.loop.set_timer((self, "memory"), None, self._read_memory)
        self._can_fork = False  # the machine may still ask for a slot
        for process in filter(None, self._slots):
            process.close()

    def at_work(self) -> list[SlotAtWork]:
        """Return the slots that have a process."""
        return [
            SlotAtWork(process.slot, process.child.pid, process.runs, process.cells[POSITION])
            for process in self._slots
            if process is not None and process.child.pid
        ]

    # -- events of the slots -----------------------------------------------------------------------

    def _exited(self, process: _SlotProcess, code: int) -> None:
        # Outcomes that the slot has sent before its death still count.
        process.pipe.drain()
        self._slots[process.slot] = None
        self.facts.take_runs(process.runs)
        running = process.running
        position = process.cells[POSITION] if running else 0
        process.close()
        code = -int(signal.SIGKILL) if code == SILENT else code
        tail = process.child.tail()
        if not process.killed:
            kills = oom_kills() - process.oom_kills
            if code == -int(signal.SIGKILL) and kills > 0:
                tail += f"\n(while it ran, the kernel of this host killed {kills} processes because memory ran out)"
            self._note_death(process.slot, code, running, tail)
        self._feed(SlotDied(process.slot, position, code, tail))

    def _note_death(self, slot: int, code: int, running: bool, tail: str) -> None:
        self.deaths += 1
        last_line = tail.strip().rpartition("\n")[2]
        log.warning(
            "the process of slot %d died %s: %s%s",
            slot,
            "while it ran a function" if running else "without work",
            describe_exit(code),
            f"; it last wrote: {last_line[:LINE_CHARS_MAX]}" if last_line else "",
        )

    def _zygote_died(self, code: int | None) -> None:
        self._can_fork = False
        # So many deaths that the machine gives up (SPAWN_FAILURES_MAX), because no slot can start.
        for slot in range(len(self._slots)):
            for _ in range(3):
                self._feed(
                    SlotDied(slot, 0, code, "the process that slots are forked from has ended")
                )

    def handle_message(self, process: _SlotProcess, message: SlotMessage, parts: Parts) -> None:
        if isinstance(message, SlotStarted):
            process.peer_pool = None if message.memory is None else open_peer(message.memory)
            self._feed(SlotReady(process.slot))
        elif isinstance(message, SlotAsks):
            if not self._nested:
                self._nested = True
                self._children.import_module(COORDINATORS)
            if message.waits:
                self._feed(SlotWaits(process.slot, message.position))
            else:
                lease = self._lease_at(process.slot, message.position)
                process.pipe.send(SlotAnswer(lease or 0))
        elif isinstance(message, SlotGoesOn):
            self._feed(SlotResumed(process.slot, message.position))
        elif isinstance(message, SlotReport):
            outcomes = message.outcomes
            if message.failures or message.runs:
                self.facts.reported(process.slot, process.child.pid, message.failures, message.runs)
            if message.parts:
                ((position, kind, _),) = outcomes
                try:
                    if isinstance(parts, OpError):
                        raise parts
                    outcomes = [
                        (position, BULK, self._hold(kind, process.adopt_parts(message, parts)))
                    ]
                except OpError as error:
                    if not is_alive(process.child.pid):
                        # the slot process and its shared memory are gone, and `_exited` will report
                        # the death
                        return
                    outcomes = [(position, ERROR, results.pack_error(error))]
            if not outcomes:
                return
            process.finished_to = outcomes[-1][0]
            self._feed(SlotFinished(process.slot, outcomes))

    def _poll_positions(self) -> None:
        """Read the positions of busy slots and report new ones, so that the machine learns which
        items have begun."""
        self._poll_scheduled = False
        for process in self._slots:
            if process is not None and process.running:
                self._schedule_poll()
                position = process.cells[POSITION]
                if position > process.seen_at:
                    process.seen_at = position
                    self._feed(SlotSeen(process.slot, position))

    def _read_memory(self) -> None:
        """Have the machine end slots whose private memory exceeds the bound."""
        assert self._memory_bytes_max is not None
        for process in self._slots:
            if process is None or process.killed:
                continue
            used = private_bytes(process.child.pid)
            # A process that has run nothing is as small as it can be.
            if used > self._memory_bytes_max and process.given_to:
                reason = (
                    f"its slot used {used / 1e9:.3g} GB of memory, and may use "
                    f"memory_max_gb={self._memory_bytes_max / 1e9:g}: process less at a time, or "
                    f"start the worker with a higher bound"
                )
                position = process.cells[POSITION] if process.running else 0
                failure = (position, OVER_MEMORY, reason, "")
                self.facts.reported(process.slot, process.child.pid, [failure], [])
                self._feed(SlotOverMemory(process.slot, position, reason))
        self.loop.set_timer((self, "memory"), self.loop.now() + MEMORY_POLL_S, self._read_memory)

    def _schedule_poll(self) -> None:
        if not self._poll_scheduled:
            self._poll_scheduled = True
            self.loop.set_timer(
                (self, "look"), self.loop.now() + POSITION_POLL_S, self._poll_positions
            )


def check_descriptors(slots: int) -> None:
    """Raise ResourceExhaustedError if this process may not open enough descriptors for `slots`
    slots. Call it before creating slots."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = slots * SLOT_FDS + OTHER_FDS
    if limit != resource.RLIM_INFINITY and descriptors > limit:
        problem = (
            f"{slots} slots need {descriptors} descriptors, but this process may open only {limit}: "
            f"start it with fewer slots,"
            f" or after `ulimit -n {descriptors}`"
        )
        raise ResourceExhaustedError(problem)


def within_descriptors(slots: int, actors_max: int, nested_slots_max: int) -> tuple[int, int]:
    """Return how many actors and extra slots this worker may have, at most so many. Both are scaled
    down alike if this process may not open enough descriptors for all of them beside its slots."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = actors_max * ACTOR_FDS + nested_slots_max * SLOT_FDS
    room = max(limit - slots * SLOT_FDS - OTHER_FDS, 0)
    if limit == resource.RLIM_INFINITY or wanted <= room:
        return actors_max, nested_slots_max
    actors, nested = actors_max * room // wanted, nested_slots_max * room // wanted
    log.warning(
        "this worker takes %d actors and %d extra slots, and not %d and %d, because it may open only "
        "%d descriptors",
        actors,
        nested,
        actors_max,
        nested_slots_max,
        limit,
    )
    return actors, nested


class _SlotProcess:
    """The worker's side of one slot process: its pipe, its page of shared memory, and the positions
    of its items.

    Attributes:
      given_to: the position of the last item that the slot got.
      finished_to: the position of the last item with an outcome. Invariant: finished_to <=
        given_to.
      seen_at: the last position that the machine was told of.
      killed: whether this worker has killed the process.
      oom_kills: how many processes the kernel had killed for lack of memory when this process
        started.
    """

    def __init__(self, owner: ProcessSlots, slot: int) -> None:
        self.slot = slot
        self.child: BoundChild
        self.given_to = 0
        self.finished_to = 0
        self.seen_at = 0
        self.peer_pool: PeerPool | None = None
        self._page_fd = new_table("zmqdist-slot", PAGE_BYTES)
        self._page = mmap.mmap(self._page_fd, PAGE_BYTES + TABLE_BYTES)
        self.cells = memoryview(self._page).cast("Q")
        self.runs = RunReader(self._page, PAGE_BYTES)
        self.runs.observe(owner.facts.runs_per_table)
        self._closed = False
        self.killed = False
        self.oom_kills = oom_kills()
        self.pipe = LoopPipe(
            owner.loop,
            SLOT_CODEC,
            lambda message, parts: owner.handle_message(self, message, parts),
        )
        self.pipe.send(SlotWelcome(owner.address, owner.key, owner.dispatcher))

    def adopt_parts(self, report: SlotReport, piped: list[bytearray]) -> list[Any]:
        """Take over the parts of a bulk result, so that they outlive the slot process.

        Raises UnavailableError if the shared memory of the slot process cannot be opened.
        """
        received = iter(piped)
        return [
            next(received) if handle is None else self._adopt(handle) for handle in report.parts
        ]

    def _adopt(self, handle: Handle) -> Block | NDArray[np.uint8]:
        pool = this_pool()
        if pool is None or self.peer_pool is None:
            raise UnavailableError(
                f"shared memory of slot process {self.child.pid} cannot be opened here"
            )
        if handle[-1] == FROZEN:
            return self.peer_pool.attach(handle)
        segment, lease = self.peer_pool.adopt(handle)
        return Block(pool, segment, handle[3], handle[4], base=lease)

    def child_fds(self) -> list[int]:
        """Return the descriptors that the slot process inherits."""
        return [self.pipe.theirs, self._page_fd]

    @property
    def running(self) -> bool:
        """Whether the slot has an item without an outcome."""
        return self.given_to > self.finished_to

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.pipe.close()
            self.cells.release()
            self.runs.close()
            self._page.close()
