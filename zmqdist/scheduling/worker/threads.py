"""Slots as threads of the worker's own process, for a `WorkerServer` inside a program.

A thread cannot be killed. A cancelled function is asked to end early (`zmqdist.cancelled()`), and
the slot waits until the function ends. A slot that is a thread has one item at a time, so the
worker never takes items back from the slot.
"""

from __future__ import annotations

import queue
import threading

from zmqdist import task_context
from zmqdist.errors import FailedPreconditionError
from zmqdist.messages import BULK, ERROR, KEPT
from zmqdist.scheduling.shared import remote_results, resources
from zmqdist.scheduling.shared.references import PartsFetcher
from zmqdist.scheduling.worker.function_call import Functions, run
from zmqdist.scheduling.worker.slots import Feed, HoldResult
from zmqdist.scheduling.worker.worker_events import (
    ForgetFunctions,
    Give,
    SlotFinished,
    SlotReady,
    SlotReclaimed,
)
from zmqdist.transport.loop import Loop
from zmqdist.wire import results


class ThreadSlots:
    """The slots of one worker as threads. Call the methods in the loop's thread."""

    can_kill = False

    def __init__(
        self,
        loop: Loop,
        slots: int,
        feed: Feed,
        hold: HoldResult,
        fetcher: PartsFetcher,
        worker: task_context.Worker,
    ) -> None:
        self._loop = loop
        self._feed = feed
        self._hold = hold
        self._fetcher = fetcher
        self._worker = worker
        self._functions = Functions(fetcher)
        self._slots = [_Slot(self, number) for number in range(slots)]
        self.deaths = 0
        """Always 0, because a thread ends only with its worker."""

    @property
    def resources(self) -> int:
        """The number of per-worker resources that the slots share."""
        return len(self._functions.resources)

    def spawn(self, slot: int) -> None:
        self._slots[slot].thread.start()

    def give(self, give: Give) -> None:
        self._functions.define(give.functions)
        for item in give.items:
            self._slots[give.slot].position = item[0]
            self._slots[give.slot].items.put(item)

    def forget(self, forget: ForgetFunctions) -> None:
        self._functions.forget(forget.functions)

    def reclaim(self, slot: int) -> None:
        self._loop.call_soon(self._feed, SlotReclaimed(slot, self._slots[slot].position))

    def interrupt(self, slot: int, position: int) -> None:
        self._slots[slot].cancel = position

    def kill(self, slot: int) -> None:
        raise AssertionError("a thread cannot be killed: the machine must not return Kill here")

    def close(self) -> None:
        """End idle threads. A running function continues in its daemon thread, and its outcome is
        dropped."""
        for slot in self._slots:
            slot.items.put(None)
        for slot in self._slots:
            if not slot.busy and slot.thread.is_alive():
                slot.thread.join(1.0)

    def _serve(self, slot: _Slot) -> None:
        remote_results.use_fetcher(self._fetcher)
        resources.use_resources(self._functions.resources)
        self._report(SlotReady(slot.number))
        while (item := slot.items.get()) is not None:
            position, coordinator, fn, payload = item
            slot.busy = True
            # The lambda may refer to the loop variable, because a slot has one item at a time.
            task_context.enter(lambda: slot.cancel == position, self._worker)  # noqa: B023
            try:
                kind, result = run(self._functions, coordinator, fn, payload)
                if kind in (BULK, KEPT):
                    kind, result = BULK, self._hold(kind, result)
            except BaseException as error:  # an error such as a MemoryError fails this item only
                kind, result = ERROR, results.pack_error(error)
            task_context.leave()
            slot.busy = False
            self._report(SlotFinished(slot.number, [(position, kind, result)]))

    def _report(self, event: SlotReady | SlotFinished) -> None:
        try:
            self._loop.call_soon(self._feed, event)
        except FailedPreconditionError:  # the worker has stopped and has given up its leases
            pass


class _Slot:
    def __init__(self, owner: ThreadSlots, number: int) -> None:
        self.number = number
        self.items: queue.SimpleQueue[tuple[int, int, int, bytes] | None] = queue.SimpleQueue()
        self.position = 0
        self.cancel = 0
        self.busy = False
        self.thread = threading.Thread(
            target=owner._serve, args=(self,), name=f"zmqdist-slot-{number}", daemon=True
        )
