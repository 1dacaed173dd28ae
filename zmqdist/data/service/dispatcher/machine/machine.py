"""The dispatcher of a data service: who reads what, which worker has which task, and which positions go where.

Theory
    Questions come with a token and are answered when there is something to say: a worker always has one `Work` outstanding, a client one
    `Watch`, so that news travel at once and nobody asks at intervals.

    With a journal, what an event changes is applied at once, but nothing leaves before it is durable: group_commit.py.

Promises, checked by tests/machines/splits and tests/sim
    D1  a position of a DYNAMIC iteration is given to one task once, to the same question the same positions
    D2  the n-th iterators of jobs with one name read one iteration; a finished one gives nothing
    D3  no answer shows a change that a restart would not bring back
    D4  an iteration ends when its last living task has, whoever died: DYNAMIC at once, else after `worker_timeout_s`; but DYNAMIC not
        before one of its tasks has found nothing left: what others left behind a living worker does. After a restart a worker that was
        there before counts as living for RETURN_S
    D5  numbers only grow, also over restarts
    D6  every worker that is connected has a place, whatever happened to the journal; none that is gone for good

For what is read in portions, exactly once or in order, see portions.py.

Here are datasets, jobs and the sorting of events; the rest is in the parts, all over one tables.py: clients.py, workers.py,
split_assignment.py, rounds.py, portions.py.
Not here: sockets, files, what a pipeline is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import inf
from typing import Final

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import questions as q
from zmqdist.data.service.dispatcher.machine import range_math
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.clients import Clients
from zmqdist.data.service.dispatcher.machine.figures import Figures
from zmqdist.data.service.dispatcher.machine.portions import Portioning
from zmqdist.data.service.dispatcher.machine.rounds import CoordinatedRounds
from zmqdist.data.service.dispatcher.machine.snapshot import PlaceRow
from zmqdist.data.service.dispatcher.machine.split_assignment import Dealing
from zmqdist.data.service.dispatcher.machine.state import State
from zmqdist.data.service.dispatcher.machine.tables import Book, Refusal, Rules
from zmqdist.data.service.dispatcher.machine.worker_slots import not_in_list
from zmqdist.data.service.dispatcher.machine.workers import WorkerTable
from zmqdist.events import Ticked

LOOK_AGAIN_S: Final = 0.5
"""After the state was read back: not at once, since a journal that failed may fail again."""

FIRST_WATCH_S: Final = 3600.0
"""A reader that has opened and never asks for news, because it was killed in between, is taken for silent from then on."""


class Splits:
    """See the module's docstring."""

    def __init__(self, rules: Rules, number: int, now: float) -> None:
        """`number` tells this state from that of a dispatcher before or after: random."""
        self._book = Book(rules, number)
        self._clients = Clients(self._book)
        self._workers = WorkerTable(self._book, self._clients)
        self._dealing = Dealing(self._book)
        self._portions = Portioning(self._book, self._clients, self._workers)
        self._rounds = CoordinatedRounds(self._book, self._clients, self._workers)
        self.figures = Figures(self._book)
        self._next_check = now + rules.gc_check_s
        self._look_at = inf
        self.checks_count = 0
        """How often it has looked for readers and iterations to give up."""

    @property
    def state(self) -> State:
        """What a restart brings back. Nobody else changes it."""
        return self._book.state

    def restore(self, snapshot: State | None, records: Iterable[r.Change], now: float) -> None:
        """Become what a journal has. Everybody counts as heard just now; workers are missing until they join."""
        self._book.restore(snapshot, records, now)
        self._look_at = now + LOOK_AGAIN_S

    @property
    def deadline(self) -> float:
        """When `handle(Ticked(), now)` is next worth calling."""
        due = min(self._next_check, self._look_at)
        if self._book.missing:
            due = min(due, min(self._book.missing.values()) + self._book.rules.worker_timeout_s, self._book.back_by)
        if self._book.watching:
            due = min(due, next(iter(self._book.watching.values()))[1] + self._clients.watch_s)
        return due

    @property
    def places(self) -> frozenset[int]:
        """Lives of the workers that have a place and are not missing."""
        return frozenset(life for life, number in self._book.places.items() if number not in self._book.missing)

    def place_rows(self) -> tuple[PlaceRow, ...]:
        """A row for each worker that has a place."""
        return tuple(
            PlaceRow(each.name, each.address, each.life, each.index, number not in self._book.missing)
            for number, each in self._book.state.workers.items()
        )

    @property
    def num_tasks(self) -> int:
        """Tasks that have not ended."""
        return sum(map(len, self._book.tasks_of.values()))

    def waiting_for(self, life: int) -> int:
        """Tasks that wait for this life of a worker, or another in its place."""
        number = self._book.places.get(life)
        return 0 if number is None else len(self._book.tasks_of.get(number, ()))

    def admit(self, address: str) -> None:
        """Whether a worker that is at this address can have a place. Raises FailedPreconditionError."""
        self._book.hosts.admit(address)

    def handle(self, event: q.Event, now: float) -> list[q.Effect]:
        """Apply one event; what must be done about it, in order. Never raises for what a peer said."""
        self._book.now = now
        match event:
            case q.JournalCommitted():
                return self._book.commits.committed()
            case q.JournalFailed(code, message):
                return self._book.commits.failed(code, message) + self._book.ask_again()
            case Ticked():
                self._tick(now)
            case q.WorkerJoined():
                self._workers.joined(event)
                self._portions.look_at_lives()
            case q.WorkerGone():
                self._portions.lost(event)
                self._workers.lost(event, now)
            case q.AskerGone(token):
                self._gone(token)
            case _:
                try:
                    self._answer_to(event, now)
                except Refusal as refusal:
                    self._book.commits.effect(q.FailRequest(event.token, refusal.code, refusal.message))
        self._portions.serve()
        return self._book.commits.flush()

    def _gone(self, token: q.Token) -> None:
        if not (self._clients.gone(token) or self._portions.gone(token)):
            self._workers.gone(token)

    def _answer_to(self, question: q.Question, now: float) -> None:
        match question:
            case q.RegisterRequest():
                self._register(question)
            case q.Open():
                self._open(question, now)
            case q.Watch():
                self._rounds.check(question)
                self._clients.watch(question, now)
                self._rounds.decide(question.client)
                self.figures.heard_reader(question.client, question.target_s)
            case q.ReleaseRequest():
                self._clients.release(question, now, self._collect)
            case q.AcknowledgeRequest():
                self._portions.acknowledge(question, now)
            case q.Missed():
                self._portions.missed(question)
            case q.AskPortions():
                self._portions.ask(question)
            case q.Crashed():
                self._portions.crashed(question)
            case q.WorkRequest():
                self._workers.work(question)
                self.figures.heard_worker(question.figures, now)
            case q.SplitsRequest():
                self._dealing.splits(question)
            case q.HandBack():
                self._dealing.hand_back(question)
            case q.LeaveRequest():
                self._workers.leave(question)
            case q.CompressionAsked(token, dataset, off):
                if dataset not in self._book.state.compression_off:
                    self._book.change(r.DecideCompression(dataset, off))
                self._book.answer(token, self._book.state.compression_off[dataset])
            case q.NoteSnapshot(token, path):
                if path not in self._book.state.snapshots:
                    self._book.change(r.BeginSnapshot(path))
                self._book.answer(token, None)

    def _tick(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = inf
            self._workers.reconcile()
        self._workers.tick(now)
        self._portions.look_at_lives()
        self._clients.tick(now)
        if now >= self._next_check:
            self._next_check = now + self._book.rules.gc_check_s
            self._clients.collect(now, self._collect)
            self.checks_count += 1
            self.figures.forget()

    def _collect(self, iteration: r.Iteration) -> None:
        self._workers.end(iteration, r.CollectIteration(iteration.id))

    # -- datasets and jobs --------------------------------------------------------------------------------------------------

    def _register(self, asked: q.RegisterRequest) -> None:
        known = self._book.registered.get(asked.request)
        if known is not None:
            self._book.answer(asked.token, (known, False))
            return
        if asked.id is not None and asked.id in self._book.state.datasets:
            self._book.answer(asked.token, (asked.id, self._conflict(self._book.state.datasets[asked.id], asked)))
            return
        name = asked.id
        if name is None:
            while str(self._book.state.next_dataset) in self._book.state.datasets:
                self._book.state.next_dataset += 1
            name = str(self._book.state.next_dataset)
        self._book.change(r.RegisterDataset(r.DatasetEntry(name, asked.fingerprint, asked.metadata, asked.request)))
        self._book.registered[asked.request] = name
        self._book.answer(asked.token, (name, False))

    def _conflict(self, known: r.DatasetEntry, asked: q.RegisterRequest) -> bool:
        """Whether the pipeline under the id is another; the first is kept."""
        if not _fit(known.metadata, asked.metadata):
            raise Refusal(
                errors.INVALID_ARGUMENT,
                f"Dataset with ID {known.id} is registered already, with other metadata: {known.metadata}, now "
                f"{asked.metadata}. Datasets with the same ID should have the same structure",
            )
        if known.fingerprint == asked.fingerprint:
            return False
        if asked.on_conflict == "error":
            raise Refusal(errors.ALREADY_EXISTS, f"another pipeline is registered under the dataset ID {known.id}")
        if asked.on_conflict == "replace":
            self._book.change(
                r.RegisterDataset(r.DatasetEntry(known.id, asked.fingerprint, asked.metadata, asked.request)),
            )
            return False
        return True

    def _open(self, asked: q.Open, now: float) -> None:
        known = self._book.requests.get(asked.request)
        if known is not None and known in self._book.state.clients:
            self._book.answer(asked.token, self._opened(self._book.state.clients[known]))
            return
        if asked.terms.dataset not in self._book.state.datasets:
            raise Refusal(errors.NOT_FOUND, not_registered(asked.terms.dataset))
        consumers = asked.terms.num_consumers
        if consumers and not 0 <= asked.consumer < consumers:
            raise Refusal(
                errors.FAILED_PRECONDITION,
                f"Requesting data for consumer index {asked.consumer}, but the job has only {consumers} consumers",
            )
        if asked.terms.mode not in (r.OFF, r.DYNAMIC) and not self._book.hosts.entries:
            worker = next((each.address for each in self._book.state.workers.values()), "(none yet)")
            raise Refusal(errors.NOT_FOUND, not_in_list(worker, ()))
        iteration = None if asked.saved is None else self._portions.saved_iteration(asked.saved, asked.terms.dataset)
        if iteration is None:
            job = self._job(asked)
            self._check_compression(job, asked.terms)
            iteration = self._iteration(job, asked)
            if asked.saved is not None:
                self._portions.check(asked.saved, iteration)
        client = r.ClientEntry(self._book.state.next_client, iteration.id, asked.request, asked.consumer)
        self._book.change(r.AcquireClient(client))
        self._book.requests[asked.request] = client.id
        self._book.heard[client.id] = now + FIRST_WATCH_S
        self._book.released.pop(iteration.id, None)
        if iteration.portions is not None:
            self._portions.adopt(asked, client)
        self._book.answer(asked.token, self._opened(client))

    def _opened(self, client: r.ClientEntry) -> tuple[int, int, int, tuple[int, int, int, int] | None]:
        portions = self._book.state.iterations[client.iteration].portions
        cut = None
        if portions is not None:
            first = range_math.first_open(portions, range_math.lane_of(portions, client))
            cut = portions.positions, portions.repetitions, portions.length, first
        return client.id, client.iteration, self._book.state.number, cut

    def _job(self, asked: q.Open) -> r.JobEntry:
        name = asked.job_name or asked.unnamed
        number = self._book.jobs.get(name)
        if number is None:
            job = r.JobEntry(self._book.state.next_job, name, asked.terms, anonymous=asked.job_name is None)
            self._book.change(r.CreateJob(job))
            if not job.anonymous:
                self._book.jobs[name] = job.id
            return job
        job = self._book.state.jobs[number]
        different = [
            f"Existing {what}: <{have}>; got <{got}>."
            for (what, have), (_, got) in zip(self._told(job.terms), self._told(asked.terms), strict=True)
            if have != got
        ]
        datasets = self._book.state.datasets
        if not _fit(datasets[job.terms.dataset].metadata, datasets[asked.terms.dataset].metadata, "element_spec"):
            different.append("The elements have another structure.")
        if different:
            text = f"Tried to create job with name {name}, but found an existing job with different parameters: "
            raise Refusal(errors.INVALID_ARGUMENT, text + " ".join(different))
        return job

    def _check_compression(self, job: r.JobEntry, terms: r.Terms) -> None:
        """Elements come as the job's dataset says, not as this reader's does."""
        used, expected = (self._book.state.datasets[each].metadata for each in (job.terms.dataset, terms.dataset))
        if not _fit(used, expected, "compression"):
            raise Refusal(
                errors.INVALID_ARGUMENT,
                f"Data type mismatch: job {job.name} has elements of a dataset with another `compression` than this reader's",
            )

    def _told(self, terms: r.Terms) -> list[tuple[str, object]]:
        """What all that read a job have to agree on, as a user knows it."""
        return [
            ("processing mode", r.MODES[terms.mode]),
            ("cross-trainer cache", "enabled" if terms.cache else "disabled"),
            ("target workers", terms.target_workers),
            ("number of consumers", terms.num_consumers),
            ("delivery", terms.delivery),
            ("ordered", terms.ordered),
        ]

    def _iteration(self, job: r.JobEntry, asked: q.Open) -> r.Iteration:
        key = (job.name, asked.repetition)
        number = self._book.keys.get(key)
        if number is not None and not self._book.state.iterations[number].collected:
            return self._book.state.iterations[number]
        iteration = r.Iteration(
            self._book.state.next_iteration, job.id, asked.repetition, [r.Cursor(count) for count in asked.sources]
        )
        if job.terms.portioned:
            assert asked.grain is not None, "whoever opens a job in portions says how it can be cut"
            iteration.portions = range_math.cut(*asked.grain, max(1, job.terms.num_consumers))
        self._book.change(r.CreateIteration(iteration))
        if not job.anonymous:
            self._book.keys[key] = iteration.id
        for worker in self._workers.staying():
            self._workers.create_task(iteration, worker)
        return iteration


def _fit(metadata: str, other: str, *names: str) -> bool:
    """Whether two datasets are alike in what is known of both; `names`: in this alone."""
    one, two = json.loads(metadata or "{}"), json.loads(other or "{}")
    keys = names or one.keys() | two.keys()
    return all(
        one.get(key) == two.get(key) or (None in (one.get(key), two.get(key)) and key == "element_spec") for key in keys
    )


def not_registered(dataset: str) -> str:
    return f"Dataset id {dataset} not found. It must be registered with `register_dataset` before it is read."
