"""A simulated task that computes portions: the real machine of each lane, and a model of the thread
that makes elements. See data_service.py.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.sim.simulations.data_links import SimRequest
from tests.sim.simulations.data_parts import FULL_S, SendTaskReply, SimDataWorker, SimTask
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.reader.delivery import Demand
from zmqdist.data.service.worker.portions_machine import PortionSegment, PortionsLane
from zmqdist.data.service.worker.tasks_machine import WorkerTask
from zmqdist.errors import RESOURCE_EXHAUSTED, UNAVAILABLE

LANE_MAX = 8
"""The most elements in a lane's buffer."""

TOGETHER = 4
"""The most elements in a reply."""

AGAIN = (UNAVAILABLE, RESOURCE_EXHAUSTED)


class SimPortionTask(SimTask):
    """A task that computes portions, with a lane for each reader."""

    def __init__(self, worker: SimDataWorker, task: WorkerTask, state: int) -> None:
        super().__init__(worker, task, state)
        self._lanes: dict[int, SimLane] = {}

    def ask(self, wanted: Demand, then: SendTaskReply) -> None:
        lane = self._lanes.get(wanted.reader)
        if lane is None:
            lane = self._lanes[wanted.reader] = SimLane(self, wanted.reader)
        lane.machine.weighed(wanted.bytes_max // TOGETHER, LANE_MAX)
        lane.machine.add_request(wanted, then)
        lane.serve()

    def drop(self) -> None:
        """Drop the task. The worker does so when the dispatcher requests it."""
        super().drop()
        for lane in self._lanes.values():
            lane.machine.close()
            lane.serve()


class SimLane:
    """One lane of a task: it computes the portions of one reader, one after the other."""

    def __init__(self, task: SimPortionTask, client: int) -> None:
        self.machine = PortionsLane(LANE_MAX)
        self._task = task
        self._sim = task.worker.sim
        self._client = client
        self._given: deque[list[int]] = deque()
        """Portions that the dispatcher has handed out to this lane, and that the lane has not
        begun."""
        self._segment: PortionSegment | None = None
        self._coming: deque[int] = deque()
        """The elements of the current portion that were not made yet."""
        self._full_since: float | None = None
        self._more()

    @property
    def _over(self) -> bool:
        return self._task.dropped or not self._task.worker.alive

    def _more(self) -> None:
        self._get(self._sim.random.getrandbits(40), self.machine.request_size(self._sim.clock.now))

    def _get(self, request: int, count: int) -> None:
        task, worker = self._task, self._task.worker

        def request_of(pending: SimRequest) -> ev.Request:
            return ev.PortionsRequest(
                pending, task.state, task.number, worker.incarnation, self._client, request, count
            )

        def then(value: Any, code: int) -> None:
            if self._over:
                return
            if code in AGAIN:
                self._sim.clock.after(0.02, lambda: self._get(request, count))
            elif code or not value:
                self.machine.end()
                self.serve()
            else:
                self.machine.portions_received([each[0] for each in value], self._sim.clock.now)
                self._given.extend(value)
                self._make()

        worker.dispatcher.ask(worker.calls(), request_of, then)

    def _make(self) -> None:
        """Make the next element, or begin the next portion."""
        if self._over:
            return
        if self._segment is None:
            self._begin()
        elif not self._coming:
            self._segment.is_complete, self._segment = True, None
            self.serve()
            self._make()
        elif self.machine.may_add():
            self._segment.elements.append(self._coming.popleft())
            self.serve()
            self._sim.clock.after(self._sim.random.expovariate(400), self._make)
        else:
            self._full_since = self._sim.clock.now

    def _begin(self) -> None:
        if not self._given:
            self._more()
        elif self.machine.may_begin():
            number, _, start, length, skip = self._given.popleft()
            self._segment = self.machine.begin(number, skip)
            self._coming.extend(range(start + skip, start + length))
            self._make()
        else:
            self._full_since = self._sim.clock.now

    def serve(self) -> None:
        """Send the replies that are ready, and continue if the buffer has room now."""
        while (answer := self.machine.next_reply()) is not None:
            answer.reply(answer)
        if self._full_since is not None:
            clock = self._sim.clock
            since_s, self._full_since = self._full_since, None
            clock.at(clock.next_poll(since_s, FULL_S), self._make)
