"""The dispatcher of a data service: who reads what, which worker has which task, and which positions go where.

Theory
    Questions come with a token and are answered when there is something to say: a worker always has one `Work` outstanding, a client one
    `Watch`, so that news travel at once and nobody asks at intervals.

    With a journal, what an event changes is applied at once, but nothing leaves before it is durable: commits.py.

Promises, checked by tests/core/splits and tests/sim
    D1  a position of a DYNAMIC iteration is given to one task once, to the same question the same positions
    D2  the n-th iterators of jobs with one name read one iteration; a finished one gives nothing
    D3  no answer shows a change that a restart would not bring back
    D4  an iteration ends when its last living task has, whoever died: DYNAMIC at once, else after `worker_timeout_s`
    D5  numbers only grow, also over restarts

For what is read in portions, exactly once or in order, see portions.py.

Here are datasets, jobs and the sorting of events; the rest is in the parts: clients.py, workers.py, dealing.py, portions.py, all over
one book.py.
Not here: sockets, files, what a pipeline is.
"""

from __future__ import annotations

from collections.abc import Iterable

from zmqdist import errors
from zmqdist.core.splits import cutting
from zmqdist.core.splits import questions as q
from zmqdist.core.splits import records as r
from zmqdist.core.splits.book import Book, Refusal, Rules
from zmqdist.core.splits.clients import Clients
from zmqdist.core.splits.dealing import Dealing
from zmqdist.core.splits.portions import Portioning, is_portioned
from zmqdist.core.splits.state import State
from zmqdist.core.splits.workers import Workers


class Splits:
    """See the module's docstring."""

    def __init__(self, rules: Rules, number: int, now: float) -> None:
        """`number` tells this state from that of a dispatcher before or after: random."""
        self._book = Book(rules, number)
        self._clients = Clients(self._book)
        self._workers = Workers(self._book, self._clients)
        self._dealing = Dealing(self._book)
        self._portions = Portioning(self._book, self._clients, self._workers)
        self._next_check = now + rules.gc_check_s

    @property
    def state(self) -> State:
        """What a restart brings back. Nobody else changes it."""
        return self._book.state

    def restore(self, snapshot: State | None, records: Iterable[r.Change], now: float) -> None:
        """Become what a journal has. Everybody counts as heard just now; workers are missing until they join."""
        self._book.restore(snapshot, records, now)

    @property
    def deadline(self) -> float:
        """When `handle(Ticked(), now)` is next worth calling."""
        due = self._next_check
        if self._book.missing:
            due = min(due, min(self._book.missing.values()) + self._book.rules.worker_timeout_s)
        if self._book.watching:
            due = min(due, next(iter(self._book.watching.values()))[1] + self._clients.watch_s)
        return due

    @property
    def num_tasks(self) -> int:
        """Tasks that have not ended."""
        return sum(map(len, self._book.tasks_of.values()))

    def waiting_for(self, life: int) -> int:
        """Tasks that wait for this life of a worker, or another in its place."""
        number = self._book.places.get(life)
        return 0 if number is None else len(self._book.tasks_of.get(number, ()))

    def handle(self, event: q.Event, now: float) -> list[q.Effect]:
        """Apply one event; what must be done about it, in order. Never raises for what a peer said."""
        self._book.now = now
        match event:
            case q.JournalCommitted():
                return self._book.commits.committed()
            case q.JournalFailed(code, message):
                return self._book.commits.failed(code, message) + self._book.ask_again()
            case q.Ticked():
                self._tick(now)
            case q.WorkerJoined():
                self._workers.joined(event)
                self._portions.look_for_dead()
            case q.WorkerLost():
                self._portions.lost(event)
                self._workers.lost(event, now)
            case q.AskerGone(token):
                self._gone(token)
            case _:
                try:
                    self._answer_to(event, now)
                except Refusal as refusal:
                    self._book.commits.effect(q.Fail(event.token, refusal.code, refusal.message))
        self._portions.serve()
        return self._book.commits.flush()

    def _gone(self, token: q.Token) -> None:
        if not (self._clients.gone(token) or self._portions.gone(token)):
            self._workers.gone(token)

    def _answer_to(self, question: q.Question, now: float) -> None:
        match question:
            case q.Register():
                self._register(question)
            case q.Open():
                self._open(question, now)
            case q.Watch():
                self._clients.watch(question, now)
            case q.Release():
                self._clients.release(question, now)
            case q.Acknowledge():
                self._portions.acknowledge(question, now)
            case q.Missed():
                self._portions.missed(question)
            case q.AskPortions():
                self._portions.ask(question)
            case q.Work():
                self._workers.work(question)
            case q.Splits():
                self._dealing.splits(question)
            case q.HandBack():
                self._dealing.hand_back(question)
            case q.CompressionAsked(token, dataset, off):
                if dataset not in self._book.state.compression_off:
                    self._book.change(r.DecideCompression(dataset, off))
                self._book.answer(token, self._book.state.compression_off[dataset])

    def _tick(self, now: float) -> None:
        self._workers.tick(now)
        self._portions.look_for_dead()
        self._clients.tick(now)
        if now >= self._next_check:
            self._next_check = now + self._book.rules.gc_check_s
            self._clients.collect(now, lambda each: self._workers.end(each, r.CollectIteration(each.id)))

    # -- datasets and jobs --------------------------------------------------------------------------------------------------

    def _register(self, asked: q.Register) -> None:
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
        self._book.change(r.RegisterDataset(r.Dataset(name, asked.fingerprint, asked.metadata, asked.request)))
        self._book.registered[asked.request] = name
        self._book.answer(asked.token, (name, False))

    def _conflict(self, known: r.Dataset, asked: q.Register) -> bool:
        """Whether the pipeline under the id is another; the first is kept."""
        if known.metadata != asked.metadata:
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
                r.RegisterDataset(r.Dataset(known.id, asked.fingerprint, asked.metadata, asked.request)),
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
        iteration = None if asked.saved is None else self._portions.saved_iteration(asked.saved, asked.terms.dataset)
        if iteration is None:
            iteration = self._iteration(self._job(asked), asked)
            if asked.saved is not None:
                self._portions.check(asked.saved, iteration)
        client = r.Client(self._book.state.next_client, iteration.id, asked.request, asked.consumer)
        self._book.change(r.AcquireClient(client))
        self._book.requests[asked.request] = client.id
        self._book.heard[client.id] = now
        self._book.released.pop(iteration.id, None)
        if iteration.portions is not None:
            self._portions.adopt(asked, client)
        self._book.answer(asked.token, self._opened(client))

    def _opened(self, client: r.Client) -> tuple[int, int, int, tuple[int, int, int, int] | None]:
        portions = self._book.state.iterations[client.iteration].portions
        cut = None
        if portions is not None:
            first = cutting.first_open(portions, cutting.lane_of(portions, client))
            cut = portions.positions, portions.repetitions, portions.length, first
        return client.id, client.iteration, self._book.state.number, cut

    def _job(self, asked: q.Open) -> r.Job:
        name = asked.job_name or asked.unnamed
        number = self._book.jobs.get(name)
        if number is None:
            job = r.Job(self._book.state.next_job, name, asked.terms)
            self._book.change(r.CreateJob(job))
            self._book.jobs[name] = job.id
            return job
        job = self._book.state.jobs[number]
        if job.terms.cache != asked.terms.cache:
            words = {True: "<enabled>", False: "<disabled>"}
            raise Refusal(
                errors.INVALID_ARGUMENT,
                f"Tried to create job with name {name}, but found an existing job with different parameters: "
                f"Existing cross-trainer cache: {words[job.terms.cache]}; got {words[asked.terms.cache]}",
            )
        different = [
            f"{field}: existing {getattr(job.terms, field)!r}, got {getattr(asked.terms, field)!r}"
            for field in asked.terms.__struct_fields__
            if field != "dataset" and getattr(job.terms, field) != getattr(asked.terms, field)
        ]
        if different:
            raise Refusal(
                errors.INVALID_ARGUMENT,
                f"Tried to create job with name {name}, but found an existing job with different parameters: "
                + "; ".join(different),
            )
        return job

    def _iteration(self, job: r.Job, asked: q.Open) -> r.Iteration:
        key = (job.name, asked.repetition)
        number = self._book.keys.get(key)
        if number is not None and not self._book.state.iterations[number].collected:
            return self._book.state.iterations[number]
        iteration = r.Iteration(
            self._book.state.next_iteration, job.id, asked.repetition, [r.Cursor(count) for count in asked.sources]
        )
        if is_portioned(job.terms):
            assert asked.grain is not None, "whoever opens a job in portions says how it can be cut"
            iteration.portions = cutting.cut(*asked.grain, max(1, job.terms.num_consumers))
        self._book.change(r.CreateIteration(iteration))
        self._book.keys[key] = iteration.id
        for worker in list(self._book.state.workers):
            self._workers.create_task(iteration, worker)
        return iteration


def not_registered(dataset: str) -> str:
    return f"Dataset id {dataset} not found. It must be registered with `register_dataset` before it is read."
