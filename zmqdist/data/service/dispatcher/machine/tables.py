"""What all parts of the machine write to and look things up in: the durable state, what is known of the moment, and effects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.group_commit import GroupCommit
from zmqdist.data.service.dispatcher.machine.state import DurableState
from zmqdist.data.service.dispatcher.machine.worker_list import WorkerList

RETURN_S: Final = 10.0
"""A worker that lost its dispatcher tries to reach it at least once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Figures of the config; seconds, `inf` for never."""

    worker_timeout_s: float = 600.0
    client_timeout_s: float = 300.0
    gc_check_s: float = 600.0
    gc_timeout_s: float = 300.0
    gc_dynamic: bool = False
    fault_tolerant: bool = False
    worker_addresses: tuple[str, ...] = ()
    deployment_mode: str = ""


class Refusal(Exception):
    """Inside: a question that is answered by an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message


class DispatcherTables:
    """See the module's docstring.

    Attributes:
      state: what a restart brings back.
      members: workers that are connected, by their lives: the membership knows them, whatever the state says.
      worker_list: which place in the fixed list each worker has. Durable is where a worker of the state had it (`Worker.index`).
      working: the question for work of each life of a worker.
      watching: the question for news of each client, and since when it waits.
      wanting: (client, life) -> the question for portions that waits.
      freed: iterations in portions in which there may be something to give out, or that may be over.
      leaving: lives of workers that go for good when they have done what they have.
      worker_numbers: life -> number of its worker.
      confirmed_gone: those of the missing that were seen to go: not those of before a restart that are not back yet, before
      `return_deadline`. back_by: when who is not back after a restart is taken for gone.
      missing: workers without a connection, and since when.
      now: the time of the present event.
      last_heard: since when a client has been silent, unless its question waits here.
      unread_since: iterations without clients, and since when.
      versions: of what clients are told of an iteration.
      serving: task -> (life that serves it, where).
      client_by_request: question that opened -> client.
      dataset_by_request: question that registered -> dataset.
      iteration_by_key: (job's name, repetition) -> iteration, of jobs that others can join.
      job_by_name: name -> job, of the same.
      tasks_of: worker -> its tasks that have not ended.
    """

    def __init__(self, rules: Rules, number: int) -> None:
        self.rules = rules
        self.commits = GroupCommit(rules.fault_tolerant)
        self.state = DurableState(number=number)
        self._fresh = number
        self.members: dict[int, ev.WorkerJoined] = {}
        self.first_version = number & 0xFFFFFF
        self.leaving: set[int] = set()
        self.now = 0.0
        self.confirmed_gone: set[int] = set()
        self.return_deadline = inf
        self._live_tables()

    def _live_tables(self) -> None:
        """What is known of the moment only, and what follows from the state."""
        self.work_requests: dict[int, ev.WorkRequest] = {}
        self.watches: dict[int, tuple[ev.WatchRequest, float]] = {}
        self.portion_requests: dict[tuple[int, int], ev.PortionsRequest] = {}
        self.iterations_to_serve: set[int] = set()
        self.worker_numbers: dict[int, int] = {
            worker.incarnation: number for number, worker in self.state.workers.items()
        }
        self.missing: dict[int, float] = {}
        self.last_heard: dict[int, float] = {}
        self.unread_since: dict[int, float] = {}
        self.versions: dict[int, int] = {}
        self.serving: dict[int, tuple[int, str]] = {}
        self.client_by_request = {client.request: number for number, client in self.state.clients.items()}
        self.dataset_by_request = {each.request: each.id for each in self.state.datasets.values()}
        self.iteration_by_key = {
            (self.state.jobs[each.job].name, each.repetition): number
            for number, each in self.state.iterations.items()
            if not (each.collected or self.state.jobs[each.job].anonymous)
        }
        self.job_by_name = {job.name: number for number, job in self.state.jobs.items() if not job.anonymous}
        self.worker_list = WorkerList(self.rules.worker_addresses)
        self.worker_list.restore(self._holders())
        self.tasks_of: dict[int, dict[int, None]] = {}
        for task in self.state.tasks.values():
            if not task.finished:
                self.tasks_of.setdefault(task.worker, {})[task.id] = None

    def _holders(self) -> list[tuple[str, bool]]:
        held = {worker.index: worker for worker in self.state.workers.values()}
        return [
            (held[place].address, held[place].incarnation in self.members) if place in held else ("", False)
            for place in range(len(self.rules.worker_addresses))
        ]

    def change(self, record: r.Change) -> None:
        """Change the state, and have the journal know: not of a change that cannot be made, which would end every restart."""
        encoded = r.encode(record)  # as it is now: its rows become the state's, and change
        self.state.apply(record)
        self.commits.record(encoded)

    def is_forgotten(self, iteration: int) -> bool:
        """Whether the last change has made the state forget an iteration; then the rest is forgotten, too."""
        if iteration in self.state.iterations:
            return False
        self.versions.pop(iteration, None)
        self.unread_since.pop(iteration, None)
        self.iterations_to_serve.discard(iteration)
        return True

    def reply(self, token: ev.Token, value: Any) -> None:
        """Answer a question, when all that was changed before is durable."""
        self.commits.effect(ev.ReplyToRequest(token, value))

    def reply_news(self, token: ev.Token, value: Any) -> None:
        """Answer a question for news."""
        self.commits.effect(ev.ReplyToRequest(token, value, news=True))

    def refuse_pending(self) -> list[ev.Effect]:
        """End all questions that wait for news."""
        tokens = [work.token for work in self.work_requests.values()] + [
            watch.token for watch, _ in self.watches.values()
        ]
        tokens += [call.token for call in self.portion_requests.values()]
        self.work_requests, self.watches, self.portion_requests = {}, {}, {}
        return [
            ev.FailRequest(token, errors.UNAVAILABLE, "the dispatcher went back to what its journal has")
            for token in tokens
        ]

    def restore(self, snapshot: DurableState | None, records: Iterable[r.Change], now: float) -> None:
        """Become what a journal has. Everybody counts as heard just now; workers are missing until they join.

        They have `RETURN_S` at least: it was the dispatcher that was away. A worker that was seen to go before the journal failed has gone
        all the same.
        """
        gone = {self.state.workers[number].incarnation for number in self.confirmed_gone}
        self.state = snapshot or DurableState(number=self._fresh)
        for record in records:
            self.state.apply(record)
        self._live_tables()
        since = now + max(0.0, RETURN_S - self.rules.worker_timeout_s)
        self.missing = {n: since for n, worker in self.state.workers.items() if worker.incarnation not in self.members}
        self.confirmed_gone = {number for number in self.missing if self.state.workers[number].incarnation in gone}
        self.return_deadline = now + RETURN_S
        self.last_heard = dict.fromkeys(self.state.clients, now)
        self.unread_since = {n: now for n, each in self.state.iterations.items() if not each.clients}
