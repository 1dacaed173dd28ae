"""The tables that the parts of the machine share: the durable state, facts that are not durable,
indexes into the state, and effects."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, Final

import msgspec

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.state import DurableState
from zmqdist.data.service.dispatcher.machine.worker_list import WorkerList

RETURN_S: Final = 10.0
"""Seconds within which workers have to register again after a restart of the dispatcher. A worker
without a dispatcher tries to connect at least once a second."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings from the dispatcher's config that the machine needs. Times are in seconds; `inf`
    means never."""

    worker_timeout_s: float = 600.0
    client_timeout_s: float = 300.0
    gc_check_s: float = 600.0
    gc_timeout_s: float = 300.0
    gc_dynamic: bool = False
    fault_tolerant: bool = False
    worker_addresses: tuple[str, ...] = ()
    deployment_mode: str = ""


class Refusal(Exception):
    """An error for the caller of the current request. A part of the machine raises it, and `handle`
    turns it into an effect."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message


class GroupCommit:
    """The effects of the machine, which wait until the changes on which they depend are in the
    journal. Without a journal no effect waits.

    The machine applies the changes of an event to its state at once, but returns no effect of the
    event until these changes are durable. The runtime writes one group of records at a time. The
    changes that are made meanwhile form the next group, so that a slow disk leads to larger groups
    and not to more of them. While a group is being written, an effect waits even if its event
    changed nothing, because the effect may show changes of the group.

    When the journal fails, every waiting reply becomes an error, and the runtime loads the state
    from the journal again. A caller that waits for news gets the error UNAVAILABLE and sends its
    request again, because the changes that the request caused may be lost.
    """

    def __init__(self, journaled: bool) -> None:
        self._journaled = journaled
        self._records: list[bytes] = []
        self._effects: list[ev.Effect] = []
        self._waiting_effects: list[ev.Effect] = []
        """Effects to return when the group that is being written is durable."""
        self._next: list[ev.Effect] = []
        """Effects to return when the next group, whose writing has not begun, is durable."""
        self._committing = False

    def record(self, record: bytes) -> None:
        """Add the record of a change that the current event made."""
        if self._journaled:
            self._records.append(record)

    def effect(self, effect: ev.Effect) -> None:
        """Add an effect of the current event."""
        self._effects.append(effect)

    def flush(self) -> list[ev.Effect]:
        """End the current event. Return its effects if they need not wait for the journal.
        Otherwise return a CommitJournal, or no effect while an earlier group is being written.
        """
        effects, self._effects = self._effects, []
        # the effect may show changes of the group that is being written (promise D3)
        if self._committing:
            self._next += effects
            return []
        if self._records:
            self._waiting_effects = effects
            return [self._group()]
        return effects

    def committed(self) -> list[ev.Effect]:
        """Record that the group that was being written is durable. Return the effects that no
        longer have to wait, and a CommitJournal if there is a next group.
        """
        ready, self._waiting_effects, self._next = self._waiting_effects, self._next, []
        self._committing = False
        if self._records:
            return [*ready, self._group()]
        ready += self._waiting_effects
        self._waiting_effects = []
        return ready

    def failed(self, code: int, message: str) -> list[ev.Effect]:
        """Record that the group could not be written. Return the effects that reload the state and
        fail every waiting request."""
        waiting = self._waiting_effects + self._next
        self._waiting_effects, self._next, self._records = [], [], []
        self._committing = False
        refused: list[ev.Effect] = []
        for effect in waiting:
            # the changes that the request caused may be lost, and its next reply shows the restored
            # state
            if isinstance(effect, ev.ReplyToRequest) and effect.news:
                refused.append(
                    ev.FailRequest(
                        effect.token, errors.UNAVAILABLE, f"send the request again: {message}"
                    )
                )
            elif isinstance(effect, ev.ReplyToRequest | ev.FailRequest):
                refused.append(ev.FailRequest(effect.token, code, message))
        return [ev.Reload(), *refused]

    def _group(self) -> ev.CommitJournal:
        records, self._records = tuple(self._records), []
        self._committing = True
        return ev.CommitJournal(records)


class DispatcherTables:
    """The shared tables of the machine.

    Attributes:
      state: the durable state, which a restart brings back.
      members: the connected workers by incarnation. A worker is here as soon as it is connected,
        even if it has no place in the state.
      worker_list: assigns each worker its entry in the rules' fixed list of workers. The durable
        part of it is `WorkerEntry.index`.
      work_requests: the pending request for work of each incarnation of a worker.
      watches: the pending watch request of each client, and the time since which it waits.
      portion_requests: maps (client, incarnation of a worker) to the pending request for portions.
      iterations_to_serve: the iterations read in portions that the current event has changed. At
        the end of the event the machine gives portions to the waiting requests of these iterations,
        and ends those iterations that are complete.
      leaving: incarnations of workers that leave for good once their tasks have ended.
      worker_numbers: maps an incarnation to the number of its place (`WorkerEntry.number`).
      lost_workers: the missing workers that are known to be lost. A worker that has not
        registered since a restart of the dispatcher is added at `return_deadline`.
      return_deadline: the time from which every worker that is still missing after a restart of the
        dispatcher counts as gone.
      missing: maps each worker that has a place and no connection to the time since which it is
        missing.
      now: the time of the current event.
      last_heard: the time of each client's last sign of life. A client whose watch request is
        pending counts as alive.
      unread_since: maps each iteration without clients to the time since which it counts as unread.
      versions: the version of each iteration's news for clients.
      serving: maps a task to (the incarnation of the worker that serves it, the address at which it
        is served).
      client_by_request: maps the number of the request that opened an iteration to the client.
      dataset_by_request: maps the number of the request that registered a dataset to the dataset.
      iteration_by_key: maps (name of the job, repetition) to the iteration, for jobs that other
        clients can join.
      job_by_name: maps a name to the job, for jobs that other clients can join.
      tasks_of: maps a worker to its unfinished tasks.
    """

    def __init__(self, rules: Rules, number: int, now: float) -> None:
        self.rules = rules
        self.commits = GroupCommit(rules.fault_tolerant)
        self._fresh = number
        self.state = DurableState(number=number)
        self.members: dict[int, ev.WorkerJoined] = {}
        self.first_version = number & 0xFFFFFF
        self.leaving: set[int] = set()
        self.now = now
        self.lost_workers: set[int] = set()
        self.restore(None, (), now)

    def restore(
        self, snapshot: DurableState | None, records: Iterable[r.Change], now: float
    ) -> None:
        """Replace the state by the state in a journal. Each client counts as silent since `now`,
        and each worker counts as missing until it registers.

        Workers have at least `RETURN_S` to register, because it was the dispatcher that was away. A
        worker that was known to be lost before the journal failed stays confirmed as gone.
        """
        lost_incarnations = {self.state.workers[number].incarnation for number in self.lost_workers}
        self.state = snapshot or DurableState(number=self._fresh)
        for record in records:
            self.state.apply(record)
        self.work_requests: dict[int, ev.WorkRequest] = {}
        self.watches: dict[int, tuple[ev.WatchRequest, float]] = {}
        self.portion_requests: dict[tuple[int, int], ev.PortionsRequest] = {}
        self.iterations_to_serve: set[int] = set()
        self.worker_numbers: dict[int, int] = {
            worker.incarnation: number for number, worker in self.state.workers.items()
        }
        self.versions: dict[int, int] = {}
        self.serving: dict[int, tuple[int, str]] = {}
        self.client_by_request = {
            client.request: number for number, client in self.state.clients.items()
        }
        self.dataset_by_request = {
            entry.request: entry.id for entry in self.state.datasets.values()
        }
        self.iteration_by_key = {
            (self.state.jobs[entry.job].name, entry.repetition): number
            for number, entry in self.state.iterations.items()
            if entry.state is not r.IterationState.COLLECTED
            and not self.state.jobs[entry.job].anonymous
        }
        self.job_by_name = {
            job.name: number for number, job in self.state.jobs.items() if not job.anonymous
        }
        self.worker_list = WorkerList(self.rules.worker_addresses)
        workers = {worker.index: worker for worker in self.state.workers.values()}
        self.worker_list.restore(
            [
                (workers[index].address, workers[index].incarnation in self.members)
                if index in workers
                else ("", False)
                for index in range(len(self.rules.worker_addresses))
            ]
        )
        self.tasks_of: dict[int, dict[int, None]] = {}
        for task in self.state.tasks.values():
            if not task.is_over:
                self.tasks_of.setdefault(task.worker, {})[task.id] = None
        since = now + max(0.0, RETURN_S - self.rules.worker_timeout_s)
        self.missing: dict[int, float] = {
            n: since
            for n, worker in self.state.workers.items()
            if worker.incarnation not in self.members
        }
        self.lost_workers = {
            number
            for number in self.missing
            if self.state.workers[number].incarnation in lost_incarnations
        }
        # it was the dispatcher that was away, so give the workers time
        self.return_deadline = now + RETURN_S if self.missing else inf
        self.last_heard: dict[int, float] = dict.fromkeys(self.state.clients, now)
        self.unread_since: dict[int, float] = {
            n: now for n, entry in self.state.iterations.items() if not entry.clients
        }

    def change(self, record: r.Change) -> None:
        """Apply a change to the state, and add its record to the journal's next group."""
        # Encode before applying, because `apply` puts the record's rows into the state, where later
        # changes modify them.
        encoded = r.encode(record)
        # Apply the record before the journal gets it, because in the journal a record that cannot
        # be applied would make every restart fail.
        self.state.apply(record)
        self.commits.record(encoded)

    def terms_of(self, iteration: r.Iteration) -> r.Terms:
        """Return the terms of an iteration's job."""
        return self.state.jobs[iteration.job].terms

    def is_runnable(self, task: r.TaskEntry) -> bool:
        """Return whether a task can run: it has not ended and, if it is bound to an incarnation,
        its worker is in that incarnation."""
        worker = self.state.workers.get(task.worker)
        return not task.is_over and (
            not task.incarnation or (worker is not None and worker.incarnation == task.incarnation)
        )

    def must_stop(self, iteration: r.Iteration) -> bool:
        """Return whether the consumers of an iteration have to stop at their next round, because a
        pending task of the iteration can begin."""
        tasks = (self.state.tasks[number] for number in iteration.tasks)
        return any(
            task.state is r.DataTaskState.PENDING
            and self.is_runnable(task)
            and task.worker not in self.missing
            for task in tasks
        )

    def end_task(self, task: r.TaskEntry) -> None:
        """Remove a task that has ended from the tables."""
        self.tasks_of.get(task.worker, {}).pop(task.id, None)
        self.serving.pop(task.id, None)

    def drop_caller(self, token: ev.Token) -> None:
        """Drop the pending request with this token, because its caller has gone."""
        for client, (watch, _) in self.watches.items():
            if watch.token == token:
                del self.watches[client]
                self.last_heard[client] = self.now
                return
        pending: tuple[dict[Any, Any], ...] = (self.portion_requests, self.work_requests)
        for requests in pending:
            for key, request in requests.items():
                if request.token == token:
                    del requests[key]
                    return

    def is_forgotten(self, iteration: int) -> bool:
        """Return whether the last change made the state forget this iteration. If it did, remove
        the iteration from the tables too."""
        if iteration in self.state.iterations:
            return False
        self.versions.pop(iteration, None)
        self.unread_since.pop(iteration, None)
        self.iterations_to_serve.discard(iteration)
        return True

    def reply(self, token: ev.Token, value: Any, *, news: bool = False) -> None:
        """Reply to a request once all changes so far are durable. `news` tells whether this is a
        WatchRequest or WorkRequest."""
        self.commits.effect(ev.ReplyToRequest(token, value, news))

    def refuse_pending(self) -> list[ev.Effect]:
        """Return effects that refuse each pending request, so that its caller sends it again and
        the restored state serves it."""
        watches = (watch for watch, _ in self.watches.values())
        pending = (*self.work_requests.values(), *watches, *self.portion_requests.values())
        self.work_requests.clear()
        self.watches.clear()
        self.portion_requests.clear()
        text = "the dispatcher has gone back to the state in its journal"
        return [ev.FailRequest(request.token, errors.UNAVAILABLE, text) for request in pending]
