"""A simulated data service: the real machines of dispatcher, workers and readers, and models of the
computed elements, in virtual time.

The membership and the workers are real machines, so workers may come back in any order and under
other names.

These are the faults. A worker is killed and restarts at its address or at another address. A worker
loses its connection. A worker is added. A reader is killed. The dispatcher is killed and restarted,
with or without its journal, and perhaps a worker is restarted with it. Writing the journal fails. A
worker's reply to a reader is lost. After FAULTS_S there are no more faults, and every reader must
reach the end of its iteration.

At the end of a run, `check` compares the elements of all readers with the table of
docs/delivery.md. For each way of reading, the table states which elements may be missing because of
the faults. These are at most the elements that a lost incarnation held and the elements in a lost
reply.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from tests.sim.simulations.clock import SimClock
from tests.sim.simulations.data_links import SimLink
from tests.sim.simulations.data_parts import DELAY_S, SimDataWorker, SimDispatcher, SimTask
from tests.sim.simulations.data_portions import SimPortionTask
from tests.sim.simulations.data_readers import SimPortionReader, SimReader
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.portions import DEATHS_MAX
from zmqdist.data.service.dispatcher.machine.snapshot import iteration_rows, next_numbers
from zmqdist.data.service.worker.tasks_machine import WorkerTask
from zmqdist.errors import FAILED_PRECONDITION, NOT_FOUND, UNAVAILABLE

KINDS = ("worker", "cut", "add", "dispatcher", "reader", "journal", "both")
FAULTS_S = 4.0
CALM_S = 16.0
"""The time before which no run ends, in seconds. By then each time-out of the rules has passed
since the last fault."""
END_S = 40.0


class DataSim:
    """One simulated data service with seeded faults. `simulate_data_service` runs and checks it.

    Attributes:
      trace: the events of the run, one text each.
    """

    def __init__(self, seed: int, faults: int = 12) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.clock = SimClock()
        # Each run has only some kinds of faults, because a loss of elements that one kind permits
        # hides a wrong loss by another kind.
        self._kinds = self.random.sample(KINDS, self.random.randint(1, len(KINDS)))
        self.trace: list[str] = []
        self.count = self.random.choice((0, 1, 60, 400, 1200))
        self.lose_answers = self.random.choice((0.0, 0.0, 0.02)) if faults else 0.0
        self.answers_lost = self.workers_lost = self.restarts = self.readers_killed = self.added = 0
        self.incarnations_lost: set[int] = set()
        self._away: set[int] = set()
        """The lost incarnations that have not registered again."""
        self._most_away = 0
        self._given: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )
        """(state, task) -> incarnation of the worker -> the positions that the dispatcher handed to
        this incarnation."""
        self._unseen: dict[tuple[int, int], set[int]] = defaultdict(set)
        """(state, iteration) -> the elements in lost replies."""
        self._begun: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
        """(state, iteration) -> (task, address of the worker) of each task that a worker has
        begun.
        """
        self._named = self.random.random() < 0.5
        """Whether workers register with an index. If False, the dispatcher assigns the indices."""
        self.disk_full_until = 0.0
        self._portions = self.random.random() < 0.4
        self.faults_until = FAULTS_S if faults else 0.0
        self._names = 0
        self.dispatcher = SimDispatcher(
            self, fault_tolerant=self.random.random() < 0.7 or not faults
        )
        self.workers: list[SimDataWorker] = []
        self.readers: list[SimReader] = []
        for _ in range(self.random.randint(1, 4)):
            self._new_worker()
        self.register(lambda: None)
        self.first_workers = len(self.workers)
        for _ in range(self.random.randint(1, 4)):
            self.clock.after(self.random.uniform(0.1, 1.0), self._new_reader)
        for _ in range(faults):
            self.clock.after(self.random.uniform(0.2, FAULTS_S), self._fault)

    def run(self) -> None:
        self.clock.run(CALM_S)
        self.clock.run(
            END_S, lambda: all(reader.ended or not reader.alive for reader in self.readers)
        )

    def soon(self, fn: Callable[[], object]) -> None:
        self.clock.after(self.random.expovariate(1 / DELAY_S), fn)

    def in_order(self, link: SimLink, way: str, fn: Callable[[], object]) -> None:
        """Call `fn` after a short random time, but not before the functions that were passed
        earlier for this direction of the link."""
        at = max(self.clock.now + self.random.expovariate(1 / DELAY_S), link.last.get(way, 0.0))
        link.last[way] = at
        self.clock.at(at, fn)

    def faulty(self) -> bool:
        return self.clock.now < self.faults_until

    def note(self, what: str) -> None:
        self.trace.append(f"{self.clock.now:.3f} {what}")

    def register(self, then: Callable[[], object]) -> None:
        """Register the dataset under its id; repeat the request until it succeeds, then call
        `then`."""
        request = self.random.getrandbits(40)

        def attempt() -> None:
            self.dispatcher.ask(
                self.dispatcher.connect(),
                lambda pending: ev.RegisterRequest(pending, request, "data", "print", "{}"),
                done,
            )

        def done(_: Any, code: int) -> None:
            if code:
                self.clock.after(0.05, attempt)
            else:
                then()

        attempt()

    def end_link(self, link: SimLink) -> None:
        """End a connection. Each side notices the end at a random time."""
        if not link.open:
            return
        link.open = False
        pending, link.pending = link.pending, []
        for each in pending:
            self.soon(partial(each.end, None, UNAVAILABLE))
            self.soon(partial(self.dispatcher.handle, ev.CallerGone(each)))
        self.soon(partial(self.dispatcher.gone, link))
        self.soon(link.closed)

    def watch_worker(
        self, worker: SimDataWorker, fail: Callable[[], None], open_: Callable[[], bool]
    ) -> None:
        """Call `fail` some time after the death of a worker, if `open_()` is true at that time.
        This simulates the poll by which a waiting reader notices the death.
        """
        since_s = self.clock.now

        def died() -> None:
            if open_():
                self.clock.at(
                    self.clock.next_poll(since_s, 0.1), lambda: fail() if open_() else None
                )

        worker.died.append(died)

    # -- facts of the run, for the checks ----------------------------------------------------------

    def lost(self, incarnation: int) -> None:
        """Record that the dispatcher counts an incarnation of a worker as lost."""
        self.incarnations_lost.add(incarnation)
        self._away.add(incarnation)
        self._most_away = max(self._most_away, len(self._away))
        self.workers_lost += any(
            worker.incarnation == incarnation and worker.alive for worker in self.workers
        )

    def joined(self, incarnation: int) -> None:
        """Record that the dispatcher has registered an incarnation of a worker, for the first time
        or again."""
        self._away.discard(incarnation)

    def gave(self, request: ev.SplitsRequest, given: dict[int, tuple[int, int, int, int]]) -> None:
        """Record the positions that the dispatcher has just handed to a task. The reply with them
        may be lost."""
        number, _, start, length = given.get(request.source, (0, 0, 0, 0))
        if number == request.request:
            self._given[request.state, request.task][request.incarnation].update(
                range(start, start + length)
            )

    def lose_answer(self, reader: SimReader, elements: list[Any]) -> None:
        """Record that the reply with these elements was lost, so that the reader does not get
        them.
        """
        self.answers_lost += len(elements)
        if not isinstance(reader, SimPortionReader):
            self._unseen[reader.state, reader.iteration].update(elements)

    def _may_miss(self, reader: SimReader) -> set[int]:
        """Return the elements that a DYNAMIC iteration may lack: the elements of lost incarnations
        of workers, and the elements in lost replies."""
        missed = set(self._unseen[reader.state, reader.iteration])
        for task, _ in self._begun[reader.state, reader.iteration]:
            for incarnation, given in self._given[reader.state, task].items():
                if incarnation in self.incarnations_lost:
                    missed |= given
        return missed

    # -- workers, readers and faults ---------------------------------------------------------------

    def _new_worker(self) -> None:
        self._names += 1
        index = self._names if self._named else -1
        self.workers.append(
            SimDataWorker(self, f"worker {self._names}", f"host:{self._names}", index)
        )

    def task(self, worker: SimDataWorker, task: WorkerTask, state: int) -> SimTask:
        """Return the simulated task that a worker begins."""
        self._begun[state, task.iteration].append((task.id, worker.address))
        return (SimPortionTask if task.terms.portioned else SimTask)(worker, task, state)

    def _new_reader(self) -> None:
        if self._portions:
            ordered = self.random.random() < 0.4
            job = None if ordered else self.random.choice((None, "exact", "exact"))
            self.readers.append(SimPortionReader(self, job, ordered))
            return
        job = self.random.choice((None, "shared", "shared"))
        mode = (
            r.DYNAMIC if (job is None and self.random.random() < 0.5) or job == "shared" else r.OFF
        )
        self.readers.append(SimReader(self, job, mode, 0))

    def _fault(self) -> None:
        kind = self.random.choice(self._kinds)
        alive = [worker for worker in self.workers if worker.alive]
        if kind == "worker" and alive:
            victim = self.random.choice(alive)
            back = self.random.random() < 0.7 or len(alive) == 1
            self._kill(
                victim,
                self.random.choice((victim.address, f"new-{victim.address}")) if back else "",
            )
        elif kind == "cut" and alive:
            victim = self.random.choice(alive)
            if victim.link is not None and victim.link.open:
                self.note(f"{victim.name} loses its connection")
                victim.cut()
        elif kind == "add":
            self.note("a worker is added")
            self.added += 1
            self._new_worker()
        elif kind in ("dispatcher", "both") and self.dispatcher.alive:
            self.note("the dispatcher is killed")
            self.restarts += 1
            self.dispatcher.kill()
            self.clock.after(self.random.uniform(0.05, 0.8), self.dispatcher.start)
            if kind == "both" and alive:
                victim = self.random.choice(alive)
                self._kill(victim, victim.address)
        elif kind == "journal":
            self.note("the disk is full")
            self.disk_full_until = self.clock.now + self.random.uniform(0.05, 0.5)
        elif kind == "reader" and self.readers:
            victim_reader = self.random.choice(self.readers)
            if victim_reader.alive and not victim_reader.ended:
                self.note("a reader is killed")
                self.readers_killed += 1
                victim_reader.kill()

    def _kill(self, victim: SimDataWorker, address: str) -> None:
        """Kill a worker, and restart it later at this address. If the address is "", do not restart
        it."""
        self.note(f"{victim.name} is killed")
        victim.kill()
        self.workers_lost += 1
        self.incarnations_lost.add(victim.incarnation)
        if address:
            self.clock.after(
                self.random.uniform(0.05, 1.0), lambda: self._come_back(victim, address)
            )

    def _come_back(self, victim: SimDataWorker, address: str) -> None:
        self.note(f"{victim.name} is back at {address}")
        self.workers.append(SimDataWorker(self, victim.name, address, victim.index))

    # -- checks at the end -------------------------------------------------------------------------

    def check(self) -> None:
        for reader in self.readers:
            if reader.alive:
                self._check_end(reader)
        for worker in self.workers:
            rows = self.dispatcher.machine.place_rows()
            placed = worker.incarnation in {row.incarnation for row in rows if row.connected}
            assert placed == worker.alive, (
                f"D6: {worker.name} {'has no' if worker.alive else 'still has a'} place"
            )
        groups: dict[tuple[Any, ...], list[SimReader]] = {}
        for reader in self.readers:
            if reader.client:
                groups.setdefault((reader.state, reader.job, reader.repetition), []).append(reader)
        for readers in groups.values():
            self._check_group(readers)
        self._check_rows()

    def _check_rows(self) -> None:
        """Check what the dispatcher's status shows: ended iterations have no tasks, the iteration
        of each reader has a row, and the next numbers are not in use.
        """
        state = self.dispatcher.machine.state
        rows = {row.id: row for row in iteration_rows(state)}
        for row in rows.values():
            assert not (row.tasks and (row.finished or row.collected)), (
                f"an iteration has ended, and has tasks: {row}"
            )
        numbers = next_numbers(state)
        for reader in self.readers:
            if reader.client and reader.state == state.number:
                assert reader.client < numbers.client, (
                    f"D3: number {reader.client} of a client is in use, and the next are {numbers}"
                )
                assert reader.iteration in rows, f"iteration {reader.iteration} is not shown"

    def _check_end(self, reader: SimReader) -> None:
        lost_state = self.restarts and not self.dispatcher.rules.fault_tolerant
        assert reader.ended, (
            "D4: a reader has not reached its end, although there were no more faults"
        )
        if reader.error:
            allowed: tuple[int, ...] = (NOT_FOUND, FAILED_PRECONDITION) if lost_state else ()
            if reader.failed and self._most_away >= DEATHS_MAX:
                allowed = (UNAVAILABLE,)
            assert reader.error in allowed, (
                f"a reader ended in error {reader.error} {reader.failed}"
            )

    def _check_group(self, readers: list[SimReader]) -> None:
        got = Counter(element for reader in readers for element in reader.got)
        lossless = not (self.workers_lost or self.answers_lost or self.readers_killed)
        kept = self.dispatcher.rules.fault_tolerant or not self.restarts
        assert set(got) <= set(range(self.count)), "an element that is not in the dataset"
        if isinstance(readers[0], SimPortionReader):
            self._check_portions(readers, kept)
        elif readers[0].mode == r.DYNAMIC:
            iterations = {reader.iteration for reader in readers}
            assert len(iterations) == 1, f"D2: one job has the iterations {iterations} at once"
            twice = [element for element, times in got.items() if times > 1]
            assert not twice, f"D1: elements {twice[:5]} were given more than once"
            if kept and any(reader.alive for reader in readers):
                never = set(range(self.count)) - set(got) - self._may_miss(readers[0])
                assert not never, (
                    f"D1: {len(never)} of {self.count} elements were never given, as "
                    f"{sorted(never)[:5]}"
                )
        elif kept and readers[0].alive and not readers[0].lost_answers:
            self._check_shares(readers[0], got)
            if not lossless or self.added:
                return
            wrong = {
                element: times for element, times in got.items() if times != self.first_workers
            }
            assert not wrong, f"OFF: not {self.first_workers} times each: {wrong}"
            assert len(got) == self.count, (
                f"OFF: {self.count - len(got)} of {self.count} elements were never given"
            )

    def _check_shares(self, reader: SimReader, got: Counter[int]) -> None:
        """Check an OFF iteration: every live worker whose address has a task of the iteration must
        have delivered the whole dataset."""
        there = {worker.address for worker in self.workers if worker.alive}
        # Take the last address of each task, because a task may have moved to another worker.
        last = dict(self._begun[reader.state, reader.iteration])
        shares = len(there & set(last.values()))
        least = min((got[element] for element in range(self.count)), default=shares)
        assert least >= shares, (
            f"OFF: an element was delivered {least} times, and {shares} workers had the dataset"
        )

    def _check_portions(self, readers: list[Any], kept: bool) -> None:
        """Check that each element was delivered and acknowledged once. If the dispatcher did not
        reply to an acknowledgment of a killed reader, the acknowledgment may or may not have taken
        effect.
        """
        sure = Counter(
            element for each in readers for element in (each.got if each.alive else each.confirmed)
        )
        maybe = Counter(
            element for each in readers if not each.alive for element in each.acknowledged
        )
        twice = [element for element, times in sure.items() if times > 1]
        assert not twice, f"exactly once: elements {twice[:5]} were acknowledged more than once"
        for each in readers:
            assert not each.ordered or each.got == sorted(each.got), (
                "in order: elements came out of their order"
            )
        if kept and any(each.alive and not each.error for each in readers):
            never = [element for element in range(self.count) if not sure[element] + maybe[element]]
            assert not never, (
                f"exactly once: {len(never)} of {self.count} elements were never given, as "
                f"{never[:5]}"
            )


def simulate_data_service(seed: int, faults: int = 12) -> DataSim:
    """Run a simulated data service with seeded faults to its end, and check the delivered elements.

    Use this function to search for seeds that break a promise, for example after you have changed a
    machine of the data service.

    Raises:
      AssertionError: a promise was broken; the text has the seed and the trace of the run.
    """
    sim = DataSim(seed, faults)
    try:
        sim.run()
        sim.check()
    except AssertionError as error:
        trace = "\n".join(sim.trace)
        raise AssertionError(f"{error}\nreplay: pytest tests/sim --seed {seed}\n{trace}") from error
    return sim
