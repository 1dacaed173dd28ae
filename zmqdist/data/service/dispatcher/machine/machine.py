"""The machine of a data service's dispatcher decides which client reads which iteration, which
worker runs which task, and which task gets which positions.

Theory
    A `WorkRequest` of a worker and a `WatchRequest` of a client get their replies when there is
    news. Each worker and each client sends the next such request as soon as it has the reply, so
    that news arrives at once and no process polls.

    With a journal, the machine applies the changes of an event at once, but returns no effect until
    the changes are durable (tables.py).

Promises, checked by tests/data/service/dispatcher/machine and tests/sim
    D1  A position of a DYNAMIC iteration is given to only one task, once. If a task repeats a
        request, it gets the same positions again.
    D2  Readers that open a job of the same name for the same repetition read the same iteration. A
        finished iteration gives no more elements.
    D3  A reply shows only changes that survive a restart of the dispatcher.
    D4  An iteration ends when its last live task has ended. The tasks of a lost worker count as
        ended: at once if the iteration is DYNAMIC, otherwise after `worker_timeout_s`. A DYNAMIC
        iteration ends only after one of its tasks has found no position left, so that a live worker
        computes the positions that leaving workers returned. After a restart of the dispatcher, a
        worker that was registered before counts as live for RETURN_S.
    D5  The numbers of datasets, jobs, iterations, tasks and clients are never used twice, not even
        across restarts.
    D6  Every connected worker has a place, even after the journal has failed. A worker that has
        left for good has no place.

portions.py has the promises for jobs that are read in portions, which are those with exactly-once
delivery or ordered reading.

This file handles datasets and jobs, and passes every other event to a part of the machine:
clients.py, workers.py, rounds.py or portions.py. All parts share one
DispatcherTables (tables.py).
Not here: sockets, files, the content of a pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import inf
from typing import Final

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.clients import Clients
from zmqdist.data.service.dispatcher.machine.figures import Figures
from zmqdist.data.service.dispatcher.machine.portions import PortionAssignment, SplitAssignment
from zmqdist.data.service.dispatcher.machine.rounds import CoordinatedRounds
from zmqdist.data.service.dispatcher.machine.snapshot import PlaceRow
from zmqdist.data.service.dispatcher.machine.state import DurableState
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables, Refusal, Rules
from zmqdist.data.service.dispatcher.machine.worker_list import not_in_list
from zmqdist.data.service.dispatcher.machine.workers import WorkerTable
from zmqdist.events import Ticked

LOOK_AGAIN_S: Final = 0.5
"""Seconds between `restore` and the repair of the restored state. The repair is delayed because it
writes to the journal, and a journal that has just failed may fail again."""

FIRST_WATCH_S: Final = 3600.0
"""Seconds within which a reader has to send its first watch request after it has opened its
iteration. If a reader was killed before its first watch request, the machine waits for this time
and then for `client_timeout_s`, and releases the reader."""


class DataDispatcherMachine:
    """The machine of a data service's dispatcher. The docstring of the module gives the
    promises.
    """

    def __init__(self, rules: Rules, number: int, now: float) -> None:
        """Start with an empty state. `number` is random, and distinguishes this state from the
        states of earlier and later dispatchers."""
        self._tables = DispatcherTables(rules, number, now)
        self._clients = Clients(self._tables)
        self._workers = WorkerTable(self._tables, self._clients)
        self._split_assignment = SplitAssignment(self._tables)
        self._portions = PortionAssignment(self._tables, self._clients, self._workers)
        self._rounds = CoordinatedRounds(self._tables, self._clients, self._workers)
        self.figures = Figures(self._tables)
        self._next_check = now + rules.gc_check_s
        self._look_at = inf
        self.checks_count = 0
        """How often the machine has searched for silent clients and unread iterations."""

    @property
    def state(self) -> DurableState:
        """The durable state, which a restart brings back. Do not change it."""
        return self._tables.state

    def restore(
        self, snapshot: DurableState | None, records: Iterable[r.Change], now: float
    ) -> None:
        """Replace the state by the state in a journal. Each client counts as silent since `now`,
        and each worker counts as missing until it registers.
        """
        self._tables.restore(snapshot, records, now)
        self._look_at = now + LOOK_AGAIN_S

    @property
    def deadline(self) -> float:
        """The time at which the runtime has to call `handle(Ticked(), now)` next."""
        due = min(self._next_check, self._look_at)
        if self._tables.missing:
            due = min(
                due,
                min(self._tables.missing.values()) + self._tables.rules.worker_timeout_s,
                self._tables.return_deadline,
            )
        if self._tables.watches:
            due = min(due, next(iter(self._tables.watches.values()))[1] + self._clients.watch_s)
        return due

    def place_rows(self) -> tuple[PlaceRow, ...]:
        """Return a row for each worker that has a place."""
        return tuple(
            PlaceRow(
                worker.name,
                worker.address,
                worker.incarnation,
                worker.index,
                number not in self._tables.missing,
            )
            for number, worker in self._tables.state.workers.items()
        )

    @property
    def num_tasks(self) -> int:
        """The number of tasks that have not ended."""
        return sum(map(len, self._tables.tasks_of.values()))

    def waiting_for(self, incarnation: int) -> int:
        """Return the number of unfinished tasks of the worker with this incarnation."""
        number = self._tables.worker_numbers.get(incarnation)
        return 0 if number is None else len(self._tables.tasks_of.get(number, ()))

    def admit(self, address: str) -> None:
        """Check that a worker with this address can have a place. Raises FailedPreconditionError if
        it cannot."""
        self._tables.worker_list.admit(address)

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Apply one event, and return the effects in order. If a request is invalid, an effect
        sends an error to its caller, and this method does not raise.
        """
        self._tables.now = now
        match event:
            case ev.JournalCommitted():
                return self._tables.commits.committed()
            case ev.JournalFailed(code, message):
                return self._tables.commits.failed(code, message) + self._tables.refuse_pending()
            case Ticked():
                self._tick(now)
            case ev.WorkerJoined():
                for earlier in self._workers.joined(event):
                    self._portions.replaced(earlier)
                self._portions.check_incarnations()
            case ev.WorkerGone():
                self._portions.lost(event)
                self._workers.lost(event, now)
            case ev.CallerGone(token):
                self._tables.drop_caller(token)
            case _:
                try:
                    self._handle_request(event, now)
                except Refusal as refusal:
                    self._tables.commits.effect(
                        ev.FailRequest(event.token, refusal.code, refusal.message)
                    )
        # last, because each part may have changed which portions are free
        self._portions.serve()
        return self._tables.commits.flush()

    def _handle_request(self, question: ev.Request, now: float) -> None:
        match question:
            case ev.RegisterRequest():
                self._register(question)
            case ev.OpenRequest():
                self._open(question, now)
            case ev.WatchRequest():
                self._rounds.check(question)
                self._clients.watch(question, now)
                self._rounds.decide(question.client)
                self.figures.note_reader_report(question.client, question.target_s)
            case ev.ReleaseRequest():
                self._clients.release(question, now, self._collect)
            case ev.AcknowledgeRequest():
                self._portions.acknowledge(question, now)
            case ev.MissedRequest():
                self._portions.missed(question)
            case ev.PortionsRequest():
                self._portions.ask(question)
            case ev.CrashReport():
                self._portions.crashed(question)
            case ev.WorkRequest():
                self._workers.work(question)
                self.figures.note_worker_report(question.figures, now)
            case ev.SplitsRequest():
                self._split_assignment.splits(question)
            case ev.HandBackRequest():
                self._split_assignment.hand_back(question)
            case ev.LeaveRequest():
                self._workers.leave(question)
            case ev.CompressionRequest(token, dataset, off):
                if dataset not in self._tables.state.datasets:
                    raise Refusal(errors.NOT_FOUND, not_registered(dataset))
                if dataset not in self._tables.state.compression_off:
                    self._tables.change(r.DecideCompression(dataset, off))
                self._tables.reply(token, self._tables.state.compression_off[dataset])
            case ev.NoteSnapshotRequest(token, path):
                if path not in self._tables.state.snapshots:
                    self._tables.change(r.BeginSnapshot(path))
                self._tables.reply(token, None)

    def _tick(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = inf
            # now and not in `restore`, because a journal that has just failed may fail again
            self._workers.reconcile()
        self._workers.tick(now)
        self._portions.check_incarnations()
        self._clients.tick(now)
        if now >= self._next_check:
            self._next_check = now + self._tables.rules.gc_check_s
            self._clients.collect(now, self._collect)
            self.checks_count += 1
            self.figures.forget()

    def _collect(self, iteration: r.Iteration) -> None:
        self._workers.end(iteration, r.CollectIteration(iteration.id))

    # -- datasets and jobs -------------------------------------------------------------------------

    def _register(self, call: ev.RegisterRequest) -> None:
        dataset_id = self._tables.dataset_by_request.get(call.request)
        if dataset_id is not None:  # the client repeats a request whose reply was lost
            self._tables.reply(call.token, (dataset_id, False))
            return
        if call.id is not None and call.id in self._tables.state.datasets:
            self._tables.reply(
                call.token, (call.id, self._conflict(self._tables.state.datasets[call.id], call))
            )
            return
        name = call.id
        if name is None:
            # promise D5: a user may have chosen the next number as the id of a dataset
            while str(self._tables.state.next_dataset) in self._tables.state.datasets:
                self._tables.state.next_dataset += 1
            name = str(self._tables.state.next_dataset)
        self._tables.change(
            r.RegisterDataset(r.DatasetEntry(name, call.fingerprint, call.metadata, call.request))
        )
        self._tables.dataset_by_request[call.request] = name
        self._tables.reply(call.token, (name, False))

    def _conflict(self, entry: r.DatasetEntry, call: ev.RegisterRequest) -> bool:
        """Apply `on_conflict` to an id that is registered already. Return True if the id keeps
        another pipeline than that of `call`."""
        if not _fit(entry.metadata, call.metadata):
            raise Refusal(
                errors.INVALID_ARGUMENT,
                f"Dataset with ID {entry.id} is registered already, with other metadata: it has "
                f"{entry.metadata}, the new one "
                f"{call.metadata}. Datasets with the same ID should have the same structure",
            )
        if entry.fingerprint == call.fingerprint:
            return False
        if call.on_conflict == "error":
            raise Refusal(
                errors.ALREADY_EXISTS,
                f"another pipeline is registered under the dataset ID {entry.id}",
            )
        if call.on_conflict == "replace":
            self._tables.change(
                r.RegisterDataset(
                    r.DatasetEntry(entry.id, call.fingerprint, call.metadata, call.request)
                ),
            )
            return False
        return True

    def _open(self, call: ev.OpenRequest, now: float) -> None:
        client_id = self._tables.client_by_request.get(call.request)
        # If the client repeats a request whose reply was lost, repeat the reply.
        if client_id is not None and client_id in self._tables.state.clients:
            self._tables.reply(call.token, self._opened(self._tables.state.clients[client_id]))
            return
        if call.terms.dataset not in self._tables.state.datasets:
            raise Refusal(errors.NOT_FOUND, not_registered(call.terms.dataset))
        consumers = call.terms.num_consumers
        if consumers and not 0 <= call.consumer < consumers:
            raise Refusal(
                errors.FAILED_PRECONDITION,
                f"Requesting data for consumer index {call.consumer}, but the job has only "
                f"{consumers} consumers",
            )
        # A worker's static shard is its index in the fixed list of workers. Without such a list no
        # worker has a static shard.
        if call.terms.mode not in (r.OFF, r.DYNAMIC) and not self._tables.worker_list.entries:
            worker = next(
                (entry.address for entry in self._tables.state.workers.values()), "(none yet)"
            )
            raise Refusal(errors.NOT_FOUND, not_in_list(worker, ()))
        iteration = (
            None
            if call.saved is None
            else self._portions.saved_iteration(call.saved, call.terms.dataset)
        )
        if iteration is None:
            job = self._job(call)
            self._check_compression(job, call.terms)
            iteration = self._iteration(job, call)
            if call.saved is not None:
                self._portions.check(call.saved, iteration)
        if iteration.portions is not None:
            self._portions.check_again(call, iteration, iteration.portions)
        client = r.ClientEntry(
            self._tables.state.next_client, iteration.id, call.request, call.consumer, call.reader
        )
        self._tables.change(r.AcquireClient(client))
        self._tables.client_by_request[call.request] = client.id
        self._tables.last_heard[client.id] = now + FIRST_WATCH_S
        self._tables.unread_since.pop(iteration.id, None)
        if iteration.portions is not None:
            self._portions.adopt(call, client)
        self._tables.reply(call.token, self._opened(client))

    def _opened(
        self, client: r.ClientEntry
    ) -> tuple[int, int, int, tuple[int, int, int, int] | None]:
        portions = self._tables.state.iterations[client.iteration].portions
        cut = None
        if portions is not None:
            first = portions.first_open(portions.lane_of(client))
            cut = portions.positions, portions.repetitions, portions.length, first
        return client.id, client.iteration, self._tables.state.number, cut

    def _job(self, call: ev.OpenRequest) -> r.JobEntry:
        name = call.job_name or call.unnamed
        number = self._tables.job_by_name.get(name)
        if number is None:
            job = r.JobEntry(
                self._tables.state.next_job, name, call.terms, anonymous=call.job_name is None
            )
            self._tables.change(r.CreateJob(job))
            if not job.anonymous:
                self._tables.job_by_name[name] = job.id
            return job
        job = self._tables.state.jobs[number]
        different = [
            f"Existing {name_of_term}: <{expected}>; got <{value}>."
            for (name_of_term, expected), (_, value) in zip(
                self._comparable_terms(job.terms), self._comparable_terms(call.terms), strict=True
            )
            if expected != value
        ]
        datasets = self._tables.state.datasets
        if not _fit(
            datasets[job.terms.dataset].metadata,
            datasets[call.terms.dataset].metadata,
            "element_spec",
        ):
            different.append("The elements have another structure.")
        if different:
            text = f"Tried to create job with name {name}, but found an existing job with different parameters: "
            raise Refusal(errors.INVALID_ARGUMENT, text + " ".join(different))
        return job

    def _check_compression(self, job: r.JobEntry, terms: r.Terms) -> None:
        """Refuse a reader whose dataset has another compression than the job's dataset, because the
        workers use the compression of the job's dataset.
        """
        used, expected = (
            self._tables.state.datasets[dataset].metadata
            for dataset in (job.terms.dataset, terms.dataset)
        )
        if not _fit(used, expected, "compression"):
            raise Refusal(
                errors.INVALID_ARGUMENT,
                f"Data type mismatch: job {job.name} has elements of a dataset with another "
                f"`compression` than this reader's",
            )

    def _comparable_terms(self, terms: r.Terms) -> list[tuple[str, object]]:
        """Return the terms that must be equal for all readers of a job, as pairs (name in the
        user's API, value)."""
        return [
            ("processing mode", r.MODES[terms.mode]),
            ("cross-trainer cache", "enabled" if terms.cache else "disabled"),
            ("target workers", terms.target_workers),
            ("number of consumers", terms.num_consumers),
            ("delivery", terms.delivery),
            ("ordered", terms.ordered),
        ]

    def _iteration(self, job: r.JobEntry, call: ev.OpenRequest) -> r.Iteration:
        key = (job.name, call.repetition)
        number = self._tables.iteration_by_key.get(key)
        if number is not None:
            earlier = self._tables.state.iterations[number]
            # a collected iteration has lost its elements, so a later reader begins another one
            if earlier.state is not r.IterationState.COLLECTED:
                return earlier
        iteration = r.Iteration(
            self._tables.state.next_iteration,
            job.id,
            call.repetition,
            [r.Cursor(count) for count in call.sources],
        )
        # cut now, so that the lengths do not depend on the workers (promise E6)
        if job.terms.portioned:
            assert call.grain is not None, "a request to open a job in portions has a grain"
            iteration.portions = r.PortionsEntry.cut(*call.grain, max(1, job.terms.num_consumers))
        self._tables.change(r.CreateIteration(iteration))
        if not job.anonymous:
            self._tables.iteration_by_key[key] = iteration.id
        for worker in self._workers.workers_for_new_tasks():
            self._workers.create_task(iteration, worker)
        return iteration


def _fit(metadata: str, other_metadata: str, *names: str) -> bool:
    """Return whether two datasets have equal metadata. `names` restricts the comparison to these
    keys. An unknown element_spec equals any other.
    """
    fields, other_fields = json.loads(metadata or "{}"), json.loads(other_metadata or "{}")
    keys = names or fields.keys() | other_fields.keys()
    return all(
        fields.get(key) == other_fields.get(key)
        or (None in (fields.get(key), other_fields.get(key)) and key == "element_spec")
        for key in keys
    )


def not_registered(dataset: str) -> str:
    return f"Dataset id {dataset} not found. It must be registered with `register_dataset` before it is read."
