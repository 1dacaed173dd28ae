"""What workers compute. Portions are parts of the data: PortionAssignment decides which worker
computes which portion for which client, until the client has acknowledged all elements of the
portion. The jobs of DYNAMIC splits have no portions: SplitAssignment gives positions of their
sources to tasks, first come, first served, and takes back the positions that leaving workers
return.

Theory
    A task requests portions on behalf of a client. The client acknowledges, for each portion, how
    many elements its consumer has finished. Each element is delivered exactly once because
    (portion, offset) identifies it. When a worker is lost, the machine gives its unfinished
    portions to another worker, whose task skips the acknowledged elements. The client drops
    elements that it has already received.

    When a worker, or a process of a worker, dies, the machine charges the death to every portion
    that was being computed there. From then on it gives such a portion to a worker that computes no
    other portion, so that the next death shows which portion is the cause. If a lost incarnation
    registers again, it had only lost its connection, and the machine revokes the charge. In ordered
    reading, the worker that computes a charged portion also gets the portions before it, because
    the reader can acknowledge the charged portion only after these.

    In ordered reading, the machine gives out a portion only when it is less than a window ahead of
    the lowest unfinished portion. This bounds the elements that a reader has to hold until their
    turn.

Promises, checked by tests/data/service/dispatcher/machine/test_portions.py
    E1  A portion belongs to at most one client at a time, and at most one incarnation of a worker
        computes it.
    E2  An iteration ends when every portion is acknowledged as done, and not earlier, unless E7
        ends it.
    E3  When a worker is lost, the machine gives out its unfinished portions again at once, before
        new portions and without the acknowledged elements.
    E4  When a client is released, its unfinished portions go to other clients. A client that takes
        over from another client gets all unfinished portions of that client.
    E5  When a client continues from a saved state, elements that were acknowledged after the state
        was saved are delivered again, and so are those of later passes of the job. Elements that
        were acknowledged before are not.
    E6  The lanes and lengths of portions do not depend on the workers. In ordered reading, each
        portion that is given out is less than a window ahead of the lowest unfinished portion.
    E7  If DEATHS_MAX workers, or processes of workers, have died while they computed a portion, the
        iteration ends with an error that names the portion and the workers.

Not here: how a record changes an iteration's portions (records.py), the content of a portion.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Final

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine import runs as sets
from zmqdist.data.service.dispatcher.machine.clients import Clients
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables, Refusal
from zmqdist.data.service.dispatcher.machine.workers import WorkerTable

SHARES: Final = 4
"""One reply gives a task at most the remaining positions divided by (SHARES x number of tasks), so
that near the end every task still gets positions."""

DEATHS_MAX: Final = 3
"""When this many deaths are charged to one portion, the machine takes the pipeline for their cause,
and ends the iteration (promise E7)."""

WINDOW_PER_TASK: Final = 2
WINDOW_MIN: Final = 4
"""The window of ordered reading has WINDOW_PER_TASK portions for each task, and at least WINDOW_MIN
in all."""


class PortionAssignment:
    """The part of DataDispatcherMachine that gives out portions. The docstring of the module gives the
    promises."""

    def __init__(self, tables: DispatcherTables, clients: Clients, workers: WorkerTable) -> None:
        self._tables = tables
        self._clients = clients
        self._workers = workers

    # -- clients -----------------------------------------------------------------------------------

    def adopt(self, call: ev.OpenRequest, client: r.ClientEntry) -> None:
        """Give a new client its first portions. A client with a saved state gets the portions of
        that state. If each lane has only one reader at a time, a client without a saved state takes
        over the portions of the earlier reader of its lane.
        """
        iteration, portions = self._of(client)
        done_runs, open_ = (
            ([], []) if call.saved is None else (list(call.saved.done_runs), list(call.saved.open))
        )
        for earlier in self._earlier(call, iteration, client.id):
            self._restore(client, earlier, done_runs, open_)
        if call.saved is not None:
            self._resume_saved(call.saved, client)
        terms = self._tables.terms_of(iteration)
        if call.saved is None and (terms.ordered or terms.num_consumers > 0):
            # A second reader of a lane takes over the portions of the first reader, because a lane
            # has one reader at a time.
            lane = portions.lane_of(client)
            for number in list(iteration.clients):
                other_client = self._tables.state.clients[number]
                if number != client.id and portions.lane_of(other_client) == lane:
                    self._take_over(client, number)
        self._tables.iterations_to_serve.add(iteration.id)

    def _earlier(self, call: ev.OpenRequest, iteration: r.Iteration, client: int = 0) -> list[int]:
        """Return the other clients whose elements the client of a request gets again: from the
        beginning of the pass or, if a state of another iteration was loaded before in this one,
        from this state on.
        """
        assert iteration.portions is not None
        again = call.again if call.saved is None else self._is_elsewhere(call.saved, iteration.id)
        readers = iteration.portions.readers.items() if again else ()
        return [
            client_id
            for client_id, reader in readers
            if reader == call.reader and client_id != client
        ]

    def check_again(
        self, call: ev.OpenRequest, iteration: r.Iteration, portions: r.PortionsEntry
    ) -> None:
        """Raise Refusal if a client would not get again all that earlier clients of its reader have
        acknowledged."""
        done_runs, elements = (
            ([], {}) if call.saved is None else (list(call.saved.done_runs), dict(call.saved.open))
        )
        for earlier in self._earlier(call, iteration):
            self._check_continued(iteration, portions, earlier, done_runs, elements)

    def _of(self, client: r.ClientEntry) -> tuple[r.Iteration, r.PortionsEntry]:
        iteration = self._tables.state.iterations[client.iteration]
        if iteration.portions is None:
            raise Refusal(
                errors.FAILED_PRECONDITION, f"iteration {iteration.id} is not read in portions"
            )
        return iteration, iteration.portions

    def saved_iteration(self, saved: ev.SavedRequest, dataset: str) -> r.Iteration | None:
        """Return the iteration of a saved state, or None if this dispatcher does not have that
        iteration.

        Raises:
          Refusal: the saved state does not fit that iteration, or the client cannot continue in it
            without losing elements.
        """
        iteration = self._tables.state.iterations.get(saved.iteration)
        elsewhere = saved.state != self._tables.state.number
        if elsewhere or iteration is None or iteration.state is r.IterationState.COLLECTED:
            return None
        self.check(saved, iteration)
        portions = iteration.portions
        assert portions is not None
        prints = {
            self._tables.state.datasets[dataset_id].fingerprint
            for dataset_id in (dataset, self._tables.terms_of(iteration).dataset)
        }
        if len(prints) > 1:
            raise Refusal(
                errors.FAILED_PRECONDITION,
                f"the state is of iteration {iteration.id}, which reads another pipeline",
            )
        self._check_continued(
            iteration,
            portions,
            self._successor(saved.client),
            list(saved.done_runs),
            dict(saved.open),
        )
        return iteration

    def _check_continued(
        self,
        iteration: r.Iteration,
        portions: r.PortionsEntry,
        old: int,
        done_runs: sets.Runs,
        elements: dict[int, int],
    ) -> None:
        """Raise Refusal if other clients have continued portions of the released client `old`
        beyond the elements of a saved state."""
        for number, acked in portions.left.get(old, ()):
            portion = portions.open.get(number)
            taken_over = portion is None or portion.client != 0
            is_finished = sets.end_of(done_runs, number // len(portions.next)) is not None
            if taken_over and not is_finished and acked > elements.get(number, 0):
                raise Refusal(
                    errors.FAILED_PRECONDITION,
                    f"The reader of this state was away for longer than `client_timeout_ms`, or "
                    f"was closed, and other readers of iteration "
                    f"{iteration.id} have continued the portions that it had begun: elements "
                    f"{elements.get(number, 0)} to {acked - 1} of "
                    f"portion {number} would be lost. Read without the state, or give each reader "
                    f"a part of its own by `consumer_index`.",
                )

    def check(self, saved: ev.SavedRequest, iteration: r.Iteration) -> None:
        """Check that a saved state fits an iteration. Raises Refusal if it does not."""
        portions = iteration.portions
        cut = (
            None
            if portions is None
            else (portions.positions, portions.repetitions, portions.length)
        )
        lanes = 0 if portions is None else len(portions.next)
        if (cut, lanes) != (saved.cut, saved.lanes):
            raise Refusal(
                errors.FAILED_PRECONDITION,
                f"the state is of a dataset that is cut into {saved.cut} (positions, repetitions, "
                f"positions of a portion) for "
                f"{saved.lanes} readers, this one into {cut} for {lanes}: load it into a reader "
                f"with the same dataset and arguments",
            )
        assert portions is not None
        entry = self._tables.state.clients.get(saved.client)
        mine = saved.state == self._tables.state.number and saved.iteration == iteration.id
        stranger = saved.client >= self._tables.state.next_client or (
            entry is not None and entry.iteration != iteration.id
        )
        edges = [edge for run in saved.done_runs for edge in run]
        last = portions.total()
        if (
            (mine and stranger)
            or any(one >= next_edge for one, next_edge in pairwise((-1, *edges)))
            or any(not (0 <= number < last and elements >= 0) for number, elements in saved.open)
        ):
            raise Refusal(
                errors.INVALID_ARGUMENT,
                "the state is damaged: no reader of this dataset can have been at this position",
            )

    def _successor(self, client: int) -> int:
        while client in self._tables.state.successors:
            client = self._tables.state.successors[client]
        return client

    def _is_elsewhere(self, saved: ev.SavedRequest, iteration: int) -> bool:
        """Return whether a state was saved in another iteration, of this dispatcher or another
        one.
        """
        return saved.state != self._tables.state.number or saved.iteration != iteration

    def _resume_saved(self, saved: ev.SavedRequest, client: r.ClientEntry) -> None:
        done_runs, open_ = list(saved.done_runs), list(saved.open)
        # the numbers of another iteration say nothing about the clients of this one
        if self._is_elsewhere(saved, client.iteration):
            self._tables.change(r.SkipSaved(client.id, done_runs, open_))
        else:
            self._restore(client, self._successor(saved.client), done_runs, open_)

    def _restore(
        self, client: r.ClientEntry, old: int, done_runs: sets.Runs, open_: list[tuple[int, int]]
    ) -> None:
        iteration, portions = self._of(client)
        self._take_over(client, old)
        finished = iteration.state is r.IterationState.FINISHED or portions.failed != ""
        self._tables.change(r.RestoreSaved(client.id, done_runs, open_))
        if finished and iteration.state is r.IterationState.OPEN:
            for worker in self._workers.workers_for_new_tasks():
                self._workers.create_task(iteration, worker)

    def _take_over(self, client: r.ClientEntry, old: int) -> None:
        before = self._tables.state.clients.get(old)
        self._tables.change(r.TakeOver(client.id, old))
        if before is not None:
            self._clients.forget(before)

    def acknowledge(self, call: ev.AcknowledgeRequest, now: float) -> None:
        client = self._clients.registered_client(call.state, call.client)
        iteration, portions = self._of(client)
        self._tables.last_heard[client.id] = now
        marks = [
            mark
            for mark in call.marks
            if (portion := portions.open.get(mark[0])) is not None and portion.client == client.id
        ]
        if marks:
            self._tables.change(r.Acknowledge(client.id, marks))
            if any(is_complete for _, _, is_complete in marks):
                self._tables.iterations_to_serve.add(iteration.id)
        self._tables.reply(call.token, None)

    def missed(self, call: ev.MissedRequest) -> None:
        client = self._clients.registered_client(call.state, call.client)
        iteration, portions = self._of(client)
        self._lose(iteration, portions, call.incarnation, client.id, "")
        self._tables.reply(call.token, None)

    # -- workers -----------------------------------------------------------------------------------

    def lost(self, event: ev.WorkerGone) -> None:
        """Free the portions that a lost incarnation of a worker was computing, and refuse the
        pending requests of this incarnation."""
        # First revoke the charges of incarnations that are connected again. A failed write of the
        # journal may have undone an earlier revocation, and with the wrong charges the loss of this
        # worker could raise the deaths of a portion to DEATHS_MAX.
        self._revoke_charges()
        number = self._tables.worker_numbers.get(event.incarnation)
        name = "" if event.left or number is None else self._tables.state.workers[number].name
        for iteration, portions in self._active():
            self._lose(iteration, portions, event.incarnation, 0, name)
        for key in [key for key in self._tables.portion_requests if key[1] == event.incarnation]:
            # A task has a connection of its own, which may still be open. Without this reply the
            # task would wait for ever.
            call = self._tables.portion_requests.pop(key)
            why = f"the worker of task {call.task} has no connection"
            self._tables.commits.effect(ev.FailRequest(call.token, errors.UNAVAILABLE, why))

    def replaced(self, worker: ev.WorkerJoined) -> None:
        """Free the portions of an incarnation whose address another process has now. That
        incarnation has died unless it was leaving."""
        died = "" if worker.incarnation in self._tables.leaving else worker.name
        for iteration, portions in self._active():
            self._lose(iteration, portions, worker.incarnation, 0, died)

    def check_incarnations(self) -> None:
        """Free the portions of incarnations that ended while no dispatcher ran. If an incarnation
        that was taken for dead is connected again, its supposed death is no longer charged to the
        portions that it was computing (E7).
        """
        self._revoke_charges()
        incarnations = {worker.incarnation for worker in self._tables.state.workers.values()}
        for iteration, portions in self._active():
            busy = {portion.incarnation for portion in portions.open.values()}
            for incarnation in busy - incarnations - {0}:
                self._lose(iteration, portions, incarnation, 0, "")

    def _revoke_charges(self) -> None:
        """Revoke the charged deaths of incarnations that are connected again, because these have
        not died."""
        for iteration, portions in self._active():
            charged = {
                incarnation for portion in portions.open.values() for incarnation in portion.lost
            }
            for incarnation in sorted(charged & self._tables.members.keys()):
                self._tables.change(r.RevokeDeath(iteration.id, incarnation))
                self._tables.iterations_to_serve.add(iteration.id)

    def _active(self) -> list[tuple[r.Iteration, r.PortionsEntry]]:
        return [
            (iteration, iteration.portions)
            for iteration in self._tables.state.iterations.values()
            if iteration.portions is not None and iteration.state is r.IterationState.OPEN
        ]

    def _lose(
        self,
        iteration: r.Iteration,
        portions: r.PortionsEntry,
        incarnation: int,
        client: int,
        died: str,
        *,
        crashed: bool = False,
    ) -> None:
        if not any(
            (each.incarnation == incarnation and client in (0, each.client))
            or (not client and incarnation in each.missed)
            for each in portions.open.values()
        ):
            return
        self._tables.change(r.LosePortions(iteration.id, incarnation, client, died, crashed))
        self._tables.iterations_to_serve.add(iteration.id)
        for number, portion in portions.open.items():
            charged = portion.charged
            # promise E7: the pipeline is the cause, and would kill the next worker too
            if len(charged) >= DEATHS_MAX and not portions.failed:
                repetition, start, length = portions.place_of(number)
                self._tables.change(
                    r.FailPortions(
                        iteration.id,
                        f"{len(charged)} processes died while they computed positions {start} to "
                        f"{start + length - 1} of the "
                        f"source (repetition {repetition}; {portion.acked} elements of it had "
                        f"been delivered): "
                        f"{', '.join(charged)}. The pipeline ends its process at these positions: "
                        f"look at the logs and the "
                        "memory of these workers.",
                    )
                )

    def ask(self, call: ev.PortionsRequest) -> None:
        task, _ = self._task_of(call)
        client = self._clients.registered_client(call.state, call.client)
        if client.iteration != task.iteration:
            raise Refusal(
                errors.INVALID_ARGUMENT,
                f"client {call.client} does not read the iteration of task {call.task}",
            )
        _, portions = self._of(client)
        before = self._tables.portion_requests.pop((client.id, call.incarnation), None)
        if before is not None:
            self._tables.reply(before.token, [])
        reply_to = call.client, call.incarnation, call.request
        again = [
            number
            for number, portion in portions.open.items()
            if (portion.client, portion.incarnation, portion.request) == reply_to
        ]
        # promise E1: repeat the reply, because the first one was lost
        if again:
            self._tables.reply(
                call.token, [self._reply_entry(portions, number) for number in again]
            )
            return
        if any(
            portion.client == client.id and call.incarnation in portion.missed
            for portion in portions.open.values()
        ):
            # This record, without portions, notes that the worker has computed all that it had,
            # even if there is nothing to give to it.
            self._tables.change(r.GivePortions(client.id, call.incarnation, call.request, []))
        self._tables.portion_requests[client.id, call.incarnation] = call
        self._tables.iterations_to_serve.add(client.iteration)

    def _task_of(
        self, call: ev.PortionsRequest | ev.CrashReport
    ) -> tuple[r.TaskEntry, r.WorkerEntry]:
        task = self._tables.state.tasks.get(call.task)
        worker = None if task is None else self._tables.state.workers.get(task.worker)
        if call.state != self._tables.state.number or task is None or worker is None:
            raise Refusal(errors.NOT_FOUND, f"task {call.task} does not exist, or has ended")
        if worker.incarnation != call.incarnation:
            raise Refusal(errors.UNAVAILABLE, reassigned_text(call.task))
        if worker.number in self._tables.lost_workers:
            # The worker's connection is broken, and this request came over the task's own
            # connection. `lost` has already freed the worker's portions, and no later event would
            # free a portion that the worker gets now. The task repeats the request, which succeeds
            # when the worker has registered again.
            raise Refusal(
                errors.UNAVAILABLE, f"worker {worker.name} of task {call.task} has no connection"
            )
        return task, worker

    def crashed(self, call: ev.CrashReport) -> None:
        """Free the portions that a dead process of a live worker was computing. A repeated report
        finds no portion to free, because the worker starts the next process only after the reply.
        """
        task, worker = self._task_of(call)
        iteration = self._tables.state.iterations[task.iteration]
        portions = iteration.portions
        if portions is not None and iteration.state is r.IterationState.OPEN:
            for key in [
                key
                for key in self._tables.portion_requests
                if key[1] == call.incarnation
                and self._tables.state.clients[key[0]].iteration == iteration.id
            ]:
                # No process waits for the reply, because the process that sent the request has
                # died.
                del self._tables.portion_requests[key]
            died = f"{worker.name} ({call.how})" if call.how else ""
            self._lose(iteration, portions, call.incarnation, 0, died, crashed=True)
        self._tables.reply(call.token, None)

    def _reply_entry(
        self, portions: r.PortionsEntry, number: int
    ) -> tuple[int, int, int, int, int]:
        return number, *portions.place_of(number), portions.open[number].acked

    # -- giving out --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Finish the current event: in the iterations that it changed, give portions to waiting
        requests, and end the iterations that are complete.
        """
        iterations_to_serve, self._tables.iterations_to_serve = (
            self._tables.iterations_to_serve,
            set(),
        )
        for number in sorted(iterations_to_serve):
            iteration = self._tables.state.iterations[number]
            portions = iteration.portions
            if portions is None:
                continue
            if iteration.state is r.IterationState.OPEN and (portions.failed or portions.is_over()):
                self._workers.end(iteration, r.FinishIteration(number))
            elif len(portions.next) > 1 and any(
                portions.is_lane_over(portions.lane_of(self._tables.state.clients[client_id]))
                for client_id in iteration.clients
            ):
                self._clients.notify(number)
            for key, call in list(self._tables.portion_requests.items()):
                client = self._tables.state.clients[call.client]
                if client.iteration != number:
                    continue
                over = iteration.state is not r.IterationState.OPEN
                numbers = [] if over else self._choose(iteration, portions, client, call)
                if numbers:
                    self._tables.change(
                        r.GivePortions(client.id, call.incarnation, call.request, numbers)
                    )
                if numbers or over:
                    del self._tables.portion_requests[key]
                    self._tables.reply(
                        call.token,
                        [self._reply_entry(portions, client_id) for client_id in numbers],
                    )

    def _is_free(self, portions: r.PortionsEntry, number: int, client: r.ClientEntry) -> bool:
        portion = portions.open[number]
        return portion.state is not r.PortionState.COMPUTED and portion.client in (0, client.id)

    def _choose(
        self,
        iteration: r.Iteration,
        portions: r.PortionsEntry,
        client: r.ClientEntry,
        call: ev.PortionsRequest,
    ) -> list[int]:
        """Choose portions for a request and return their numbers: first portions that were begun
        and have no worker, the lowest number first, then new portions. A portion that is charged
        with deaths is given out alone.
        """
        lanes, lane = len(portions.next), portions.lane_of(client)
        mine = (
            number
            for number, each in portions.open.items()
            if each.incarnation == call.incarnation and each.charged
        )
        alone = min(
            (number for number in mine if portions.open[number].client == client.id), default=None
        )
        # A worker that computes a portion charged with deaths gets no other portion, so that a
        # further death shows its cause. Only if the reading is ordered, the worker may get the
        # first open portion, which the reader must acknowledge before the charged portion.
        if alone is not None:
            first = portions.first_open(lane)
            waits = (
                self._tables.terms_of(iteration).ordered
                and first < alone
                and self._is_free(portions, first, client)
            )
            return [first] if waits else []
        bound, count = inf, call.count
        if self._tables.terms_of(iteration).ordered:
            tasks = max(1, len(iteration.tasks))
            window = max(WINDOW_MIN, WINDOW_PER_TASK * tasks)
            bound = portions.first_open(lane) + window * lanes
            count = min(count, max(1, window // tasks))
        numbers: list[int] = []
        for number in sorted(portions.open):
            portion = portions.open[number]
            free = self._is_free(portions, number, client) and number % lanes == lane
            if free and number < bound and len(numbers) < count:
                if portion.charged:
                    return numbers or [number]
                numbers.append(number)
        last = portions.total()
        if last != inf:  # near the end of the data, leave portions for the other workers
            new = (
                int(last - portions.next[lane] * lanes)
                // lanes
                // (SHARES * max(1, len(iteration.tasks)))
            )
            count = min(count, max(1, new))
        step = portions.next[lane]
        while len(numbers) < count and step * lanes + lane < min(bound, last):
            if (end := sets.end_of(portions.skip[lane], step)) is not None:
                step = end
                continue
            numbers.append(step * lanes + lane)
            step += 1
        return numbers


class SplitAssignment:
    """The part of the machine that gives the positions of DYNAMIC iterations to tasks."""

    def __init__(self, tables: DispatcherTables) -> None:
        self._tables = tables

    def _task(self, call: ev.SplitsRequest | ev.HandBackRequest) -> tuple[r.TaskEntry, r.Iteration]:
        task = self._tables.state.tasks.get(call.task)
        if call.state != self._tables.state.number or task is None or task.is_over:
            raise Refusal(errors.NOT_FOUND, f"task {call.task} does not exist, or has ended")
        iteration = self._tables.state.iterations[task.iteration]
        if self._tables.state.jobs[iteration.job].terms.mode != r.DYNAMIC:
            raise Refusal(
                errors.FAILED_PRECONDITION,
                f"task {call.task} is not of a DYNAMIC job: it gets no positions from the "
                f"dispatcher",
            )
        worker = self._tables.state.workers.get(task.worker)
        if worker is None or worker.incarnation != call.incarnation:
            raise Refusal(errors.UNAVAILABLE, reassigned_text(call.task))
        if not 0 <= call.source < len(iteration.cursors):
            raise Refusal(errors.INVALID_ARGUMENT, f"task {call.task} has no source {call.source}")
        return task, iteration

    def splits(self, call: ev.SplitsRequest) -> None:
        task, iteration = self._task(call)
        reply = task.last_replies.get(call.source)
        if reply is not None and reply[0] == call.request:
            self._tables.reply(call.token, reply[2:])
            return
        if task.worker in self._tables.lost_workers:
            # The worker's connection is broken, and this request came over the task's own
            # connection. No reader reads the task now, so other tasks get the positions.
            raise Refusal(errors.UNAVAILABLE, f"the worker of task {task.id} has no connection")
        start, length = next_run(
            iteration.cursors[call.source],
            call.repetition,
            self._share(iteration, call.source, call.count),
        )
        self._tables.change(
            r.GiveSplits(task.id, call.source, call.request, call.repetition, start, length)
        )
        self._tables.reply(call.token, (start, length))

    def _share(self, iteration: r.Iteration, source: int, count: int) -> int:
        """Return how many positions to give in one reply."""
        cursor = iteration.cursors[source]
        if cursor.count != r.INFINITE:
            count = min(count, (cursor.count - cursor.position) // (SHARES * len(iteration.tasks)))
        return max(1, count)

    def hand_back(self, call: ev.HandBackRequest) -> None:
        task, iteration = self._task(call)
        if call.request in task.handed_back:
            self._tables.reply(call.token, None)
            return
        cursor = iteration.cursors[call.source]
        sane = all(
            start >= 0 and length > 0 and start + length <= cursor.position
            for start, length in call.runs
        )
        if not sane:
            raise Refusal(
                errors.INVALID_ARGUMENT,
                f"task {call.task} returns positions that were never given out",
            )
        self._tables.change(
            r.ReturnSplits(task.id, call.source, call.repetition, list(call.runs), call.request)
        )
        self._tables.reply(call.token, None)


def reassigned_text(task: int) -> str:
    """Return the error text for a worker whose place another worker has taken.

    The error's code is UNAVAILABLE, because the worker may register again. Then it gets the place
    back, or the dispatcher tells it to drop the task. With NOT_FOUND the worker would conclude that
    the task has ended, and would wrongly report it as done.
    """
    return f"task {task} belongs to another worker now"


def next_run(cursor: r.Cursor, repetition: int, count: int) -> tuple[int, int]:
    """Return the next positions of a source as (start, length). A length of 0 means that the
    repetition has no positions left.

    A request for a later repetition starts at the source's first position again, and a request for
    an earlier repetition gets no positions. Each source has a repetition of its own.
    """
    if repetition < cursor.repetition:
        return 0, 0
    position, returned = (
        (0, []) if repetition > cursor.repetition else (cursor.position, cursor.returned)
    )
    if returned:
        start, length = returned[0]
        return start, min(count, length)
    left = inf if cursor.count == r.INFINITE else cursor.count - position
    return (position, int(min(count, left))) if left > 0 else (position, 0)
