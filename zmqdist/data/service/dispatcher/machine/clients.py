"""Clients are the readers of iterations. This part of DataDispatcherMachine replies to their watch
requests, releases silent clients, and ends iterations that no client reads.

The dispatcher replies to a watch request when the client's news has changed, and at the latest
after `watch_s` seconds. It releases a client that has had no watch request pending and has
acknowledged nothing for `client_timeout_s`. It ends an iteration that has had no client for
`gc_timeout_s`, but keeps DYNAMIC iterations unless `gc_dynamic` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables, Refusal

WATCH_S_MAX: Final = 10.0
"""Seconds after which a watch request gets its reply even without news. The client's next request
then shows that the client is alive."""

WATCHES_PER_TIMEOUT: Final = 3
"""A live client sends at least this number of watch requests within `client_timeout_s`."""


class Clients:
    """The part of the machine that serves clients. The docstring of the module gives the rules."""

    def __init__(self, tables: DispatcherTables) -> None:
        self._tables = tables

    @property
    def watch_s(self) -> float:
        return min(WATCH_S_MAX, self._tables.rules.client_timeout_s / WATCHES_PER_TIMEOUT)

    def registered_client(self, state: int, number: int) -> r.ClientEntry:
        """Return the client that sent a request. Raises Refusal if the dispatcher does not know the
        client, or has released it."""
        client = self._tables.state.clients.get(number)
        if state == self._tables.state.number and client is not None:
            return client
        if state == self._tables.state.number and number in self._tables.state.successors:
            raise Refusal(
                errors.ABORTED,
                f"Another reader has taken over from iteration client {number}: it continued from "
                f"a saved state of this client, or reads "
                "as the same consumer under the same job name. One of the two readers is enough: "
                "stop one.",
            )
        text = f"Unknown iteration client id {number}."
        if not self._tables.rules.fault_tolerant:
            text += " The dispatcher is not configured to be fault tolerant, so this could be caused by a dispatcher restart."
        if state != self._tables.state.number:
            text += " The dispatcher has lost its state since this client opened its iteration."
        raise Refusal(errors.NOT_FOUND, text)

    def watch(self, call: ev.WatchRequest, now: float) -> None:
        client = self.registered_client(call.state, call.client)
        iteration = self._tables.state.iterations[client.iteration]
        if iteration.state is r.IterationState.COLLECTED:
            raise Refusal(
                errors.FAILED_PRECONDITION,
                f"The iteration of client {client.id} has been garbage collected due to "
                f"inactivity. Consider "
                "configuring the dispatcher with a higher `job_gc_timeout_ms`.",
            )
        self._tables.last_heard[client.id] = now
        self._forget_watch(client.id)
        # the client has missed a change, so it must not wait for the next one
        if call.version != self.version(iteration.id):
            self._tables.reply(call.token, self._news_for(iteration, call), news=True)
        else:
            self._tables.watches[client.id] = (call, now)

    def _forget_watch(self, client: int) -> None:
        before = self._tables.watches.pop(client, None)
        if before is not None:
            self._tables.reply(before[0].token, None, news=True)

    def version(self, iteration: int) -> int:
        return self._tables.versions.setdefault(iteration, self._tables.first_version)

    def _news_for(
        self, iteration: r.Iteration, call: ev.WatchRequest
    ) -> tuple[int, list[Any], bool, bool, dict[int, int], str]:
        finished = iteration.state is r.IterationState.FINISHED
        if self._tables.terms_of(iteration).coordinated:
            tasks, hold, end_rounds = self._news_for_consumer(iteration, call)
            return self.version(iteration.id), tasks, finished, hold, end_rounds, ""
        tasks = []
        for number in iteration.tasks:
            task = self._tables.state.tasks[number]
            incarnation, address = self._tables.serving.get(number, (0, ""))
            worker = self._tables.state.workers.get(task.worker)
            # the other tasks of the iteration have its elements
            if task.is_over or worker is None:
                continue
            if not address or worker.incarnation != incarnation:
                if task.worker in self._tables.missing:
                    continue
                # The worker has not yet reported the address that serves the task. List the task
                # without an address, so that a reader whose other tasks have ended waits for it.
                address = ""
            tasks.append(
                (
                    number,
                    worker.address,
                    address,
                    worker.incarnation,
                    worker.tags,
                    task.starting_round,
                )
            )
        portions = iteration.portions
        if portions is None:
            return self.version(iteration.id), tasks, finished, False, {}, ""
        lane = portions.lane_of(self._tables.state.clients[call.client])
        over = finished or portions.is_lane_over(lane)
        return self.version(iteration.id), tasks, over, False, {}, portions.failed

    def _news_for_consumer(
        self, iteration: r.Iteration, call: ev.WatchRequest
    ) -> tuple[list[Any], bool, dict[int, int]]:
        """Return the news for a consumer of a coordinated read as (tasks, hold, ended). `hold` tells the consumer to stop at
        its next round. `ended` maps each ended task in `call.lost` to the first round in which the task
        takes no part.

        In `tasks`, a task has incarnation -1 while its worker is lost, and has no address until its
        worker serves it.
        """
        tables = self._tables
        tasks: list[Any] = []
        for number in iteration.tasks:
            task = tables.state.tasks[number]
            if task.state is not r.DataTaskState.RUNNING:
                continue
            worker = tables.state.workers.get(task.worker)
            incarnation, address = tables.serving.get(number, (0, ""))
            if (
                worker is None
                or worker.incarnation != task.incarnation
                or task.worker in tables.missing
            ):
                tasks.append((number, "", "", -1, (), task.starting_round))
            else:
                where = address if incarnation == task.incarnation else ""
                tasks.append(
                    (
                        number,
                        worker.address,
                        where,
                        task.incarnation,
                        worker.tags,
                        task.starting_round,
                    )
                )
        end_rounds = {
            number: tables.state.tasks[number].end_round
            for number in call.lost
            if number in iteration.tasks and tables.state.tasks[number].is_over
        }
        return tasks, tables.must_stop(iteration), end_rounds

    def notify(self, iteration_id: int) -> None:
        """Reply to the pending watch requests of all clients of this iteration, because it has
        changed."""
        self._tables.versions[iteration_id] = self.version(iteration_id) + 1
        iteration = self._tables.state.iterations[iteration_id]
        for number in iteration.clients:
            watch = self._tables.watches.pop(number, None)
            if watch is not None:
                self._tables.last_heard[number] = self._tables.now
                self._tables.reply(watch[0].token, self._news_for(iteration, watch[0]), news=True)

    def release(
        self, call: ev.ReleaseRequest, now: float, end: Callable[[r.Iteration], None]
    ) -> None:
        """Release a client that has closed its reader. End the iteration of an anonymous job too,
        because no other client can join it."""
        client = self._tables.state.clients.get(call.client)
        if call.state == self._tables.state.number and client is not None:
            self._release(client, now, end)
        self._tables.reply(call.token, None)

    def _release(
        self, client: r.ClientEntry, now: float, end: Callable[[r.Iteration], None]
    ) -> None:
        iteration = self._tables.state.iterations[client.iteration]
        anonymous = self._tables.state.jobs[iteration.job].anonymous
        self._tables.change(r.ReleaseClient(client.id))
        self.forget(client)
        if self._tables.is_forgotten(iteration.id):
            return
        self._tables.iterations_to_serve.add(iteration.id)
        if iteration.clients:
            return
        # a reader that joins within `gc_timeout_s` keeps the iteration
        self._tables.unread_since[iteration.id] = now
        # No other client can join an anonymous job. If the iteration did not end, its tasks would
        # compute elements that no reader takes.
        if anonymous and iteration.state is r.IterationState.OPEN:
            end(iteration)

    def forget(self, client: r.ClientEntry) -> None:
        """Forget a released client, and reply with no portions to the tasks that wait for portions
        of this client."""
        self._tables.client_by_request.pop(client.request, None)
        self._tables.last_heard.pop(client.id, None)
        self._forget_watch(client.id)
        for key in [key for key in self._tables.portion_requests if key[0] == client.id]:
            self._tables.reply(self._tables.portion_requests.pop(key).token, [])

    def tick(self, now: float) -> None:
        """Reply to the watch requests that have waited for `watch_s` seconds without news."""
        for number, (watch, since) in list(self._tables.watches.items()):
            # the requests wait in order of arrival, so all others are younger
            if since + self.watch_s > now:
                break
            del self._tables.watches[number]
            self._tables.last_heard[number] = now
            iteration = self._tables.state.iterations[self._tables.state.clients[number].iteration]
            self._tables.reply(watch.token, self._news_for(iteration, watch), news=True)

    def collect(self, now: float, end: Callable[[r.Iteration], None]) -> None:
        """Release clients that have been silent for `client_timeout_s`, and end iterations that
        have had no client for `gc_timeout_s`."""
        tables = self._tables
        for number, heard in list(tables.last_heard.items()):
            if number not in tables.watches and heard + tables.rules.client_timeout_s <= now:
                self._release(tables.state.clients[number], now, end)
        for number, since in list(tables.unread_since.items()):
            iteration = tables.state.iterations[number]
            if iteration.state is not r.IterationState.OPEN:
                del tables.unread_since[number]
                continue
            # Unless `gc_dynamic` is set, keep a DYNAMIC iteration for a later client, which then
            # gets the positions that are left. A new iteration would deliver all positions again.
            keeps = (
                tables.state.jobs[iteration.job].terms.mode == r.DYNAMIC
                and not tables.rules.gc_dynamic
            )
            if since + tables.rules.gc_timeout_s <= now and not keeps:
                del tables.unread_since[number]
                end(iteration)
