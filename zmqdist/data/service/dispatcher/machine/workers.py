"""The part of DataDispatcherMachine that decides which workers have a place, which tasks each has,
and when an iteration has ended."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.clients import Clients
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables, Refusal


class WorkerTable:
    """The part of the machine that registers workers, and assigns and ends their tasks."""

    def __init__(self, tables: DispatcherTables, clients: Clients) -> None:
        self._tables = tables
        self._clients = clients

    def joined(self, event: ev.WorkerJoined) -> list[ev.WorkerJoined]:
        """Give a worker a place and tasks. Return the workers that had its address until now. They
        have ended, although no event has reported their loss.
        """
        members = self._tables.members
        earlier = [
            member
            for member in members.values()
            if member.address == event.address
            and event.address
            and member.incarnation != event.incarnation
        ]
        for member in earlier:
            del members[member.incarnation]
        members[event.incarnation] = event
        worker = self._place_for(event)
        if self._tables.worker_list.entries:
            self._tables.worker_list.join(worker.address)
            worker.index = self._tables.worker_list.index_of(worker.address)
        self._tables.worker_numbers = {
            incarnation: number
            for incarnation, number in self._tables.worker_numbers.items()
            if number != worker.number
        }
        self._tables.worker_numbers[event.incarnation] = worker.number
        self._tables.missing.pop(worker.number, None)
        self._tables.lost_workers.discard(worker.number)
        self._tables.change(r.PlaceWorker(worker))
        self._assign_tasks(worker)
        return earlier

    def _assign_tasks(self, worker: r.WorkerEntry) -> None:
        """Give a connected worker a task of each iteration that has not ended and in which the
        worker has no task yet."""
        for iteration in list(self._tables.state.iterations.values()):
            # an ended iteration gives no more elements (promise D2)
            if iteration.state is not r.IterationState.OPEN:
                continue
            tasks = [self._tables.state.tasks[task] for task in iteration.tasks]
            mine = [task for task in tasks if task.worker == worker.number]
            if self._tables.terms_of(iteration).coordinated:
                for task in mine:
                    if task.state is r.DataTaskState.PENDING and not self._tables.is_runnable(task):
                        self._finish_task(task.id, interrupted=True)
                if not any(self._tables.is_runnable(task) for task in mine):
                    self.create_task(iteration, worker.number, r.DataTaskState.PENDING)
            elif not mine:
                self.create_task(iteration, worker.number)
            else:
                self._finish_if_over(iteration.id)

    def _place_for(self, event: ev.WorkerJoined) -> r.WorkerEntry:
        """Return the place for a worker: the place of its incarnation, else of its address, else of
        a missing worker with its name, else a new place.

        After a restart of the dispatcher, workers register in any order. The dispatcher may
        therefore give a new worker the name of a live worker that has not registered again yet, and
        that must keep its place. So a worker whose name a dispatcher assigned takes over a place by
        name only if the worker of that place is confirmed as gone.
        """
        workers = self._tables.state.workers
        candidates = [
            number for number, worker in workers.items() if worker.incarnation == event.incarnation
        ]
        candidates += [
            number
            for number, worker in workers.items()
            if worker.address == event.address and event.address
        ]
        candidates += [
            number
            for number in self._tables.missing
            if workers[number].name == event.name
            and (event.named or number in self._tables.lost_workers)
        ]
        number = candidates[0] if candidates else self._tables.state.next_worker
        return r.WorkerEntry(number, event.name, event.address, event.incarnation, event.tags)

    def reconcile(self) -> None:
        """Repair the state after it was loaded. Give connected workers the places and tasks that
        did not become durable in the journal, and reply to the request for work of each worker
        whose tasks differ from the state.
        """
        for incarnation, event in list(self._tables.members.items()):
            number = self._tables.worker_numbers.get(incarnation)
            if number is None:
                self.joined(event)
            else:
                self._assign_tasks(self._tables.state.workers[number])
        for number in list(self._tables.state.workers):
            self.notify(number)

    def lost(self, event: ev.WorkerGone, now: float) -> None:
        self._tables.members.pop(event.incarnation, None)
        left = event.left or event.incarnation in self._tables.leaving
        self._tables.leaving.discard(event.incarnation)
        number = self._tables.worker_numbers.get(event.incarnation)
        if number is None or self._tables.state.workers[number].incarnation != event.incarnation:
            return
        self._tables.work_requests.pop(event.incarnation, None)
        self._tables.missing[number] = now
        self._tables.lost_workers.add(number)
        self._tables.worker_list.leave(self._tables.state.workers[number].address)
        # a worker that left in good order does not come back, so nothing waits for it
        if left:
            self._remove_worker(number)
            return
        for task in list(self._tables.tasks_of.get(number, ())):
            self._tables.serving.pop(task, None)
            iteration = self._tables.state.tasks[task].iteration
            self._clients.notify(iteration)
            self._finish_if_over(iteration)

    def leave(self, call: ev.LeaveRequest) -> None:
        """Record that a worker finishes its tasks and then leaves for good."""
        if call.incarnation in self._tables.members:
            self._tables.leaving.add(call.incarnation)
        self._tables.reply(call.token, None)

    def workers_for_new_tasks(self) -> list[int]:
        """Return the workers that get new tasks: all workers except those that are leaving or
        confirmed as gone."""
        going = {
            self._tables.worker_numbers[incarnation]
            for incarnation in self._tables.leaving
            if incarnation in self._tables.worker_numbers
        } | self._tables.lost_workers
        return [number for number in self._tables.state.workers if number not in going]

    def _remove_worker(self, number: int) -> None:
        for number_of_task in list(self._tables.tasks_of.get(number, ())):
            task = self._tables.state.tasks[number_of_task]
            if (
                self._tables.terms_of(self._tables.state.iterations[task.iteration]).coordinated
                and task.state is not r.DataTaskState.PENDING
            ):
                # Do not end the task now: it ends at the round on which its consumers agree.
                self._clients.notify(task.iteration)
            else:
                self._finish_task(task.id, interrupted=True)
        self._tables.tasks_of.pop(number, None)
        self._tables.missing.pop(number, None)
        self._tables.lost_workers.discard(number)
        self._tables.worker_numbers.pop(self._tables.state.workers[number].incarnation, None)
        self._tables.change(r.RemoveWorker(number))

    def create_task(
        self, iteration: r.Iteration, worker: int, state: r.DataTaskState = r.DataTaskState.RUNNING
    ) -> None:
        task = r.TaskEntry(self._tables.state.next_task, iteration.id, worker, state)
        if self._tables.terms_of(iteration).coordinated:
            task.incarnation = self._tables.state.workers[worker].incarnation
            if worker in self._tables.missing:
                # the task is bound to an incarnation, so create it when the missing worker
                # registers again
                return
        self._tables.change(r.CreateTask(task))
        self._tables.tasks_of.setdefault(worker, {})[task.id] = None
        self.notify(worker)
        if state is r.DataTaskState.PENDING:
            self._clients.notify(iteration.id)

    def _finish_task(self, number: int, *, interrupted: bool) -> None:
        task = self._tables.state.tasks.get(number)
        if task is None or task.is_over:
            return
        self._tables.change(r.FinishTask(number, interrupted))
        self._tables.end_task(task)
        self.notify(task.worker)
        self._clients.notify(task.iteration)
        self._finish_if_over(task.iteration)

    def _finish_if_over(self, number: int) -> None:
        iteration = self._tables.state.iterations[number]
        # An iteration that is read in portions ends in portions.py, at the last acknowledgment.
        if (
            iteration.state is not r.IterationState.OPEN
            or not iteration.tasks
            or iteration.portions is not None
        ):
            return
        if self._tables.terms_of(iteration).coordinated:
            return
        tasks = [self._tables.state.tasks[number_of_task] for number_of_task in iteration.tasks]
        open_ = [task for task in tasks if not task.is_over]
        terms = self._tables.state.jobs[iteration.job].terms
        if terms.mode == r.DYNAMIC and not terms.coordinated:
            if any(task.worker not in self._tables.lost_workers for task in open_):
                # promise D4: wait for workers that are alive, or that may register again after the
                # dispatcher's restart
                return
            has_finished = any(task.state is r.DataTaskState.FINISHED for task in tasks)
            if not has_finished or any(cursor.returned for cursor in iteration.cursors):
                # promise D4: other workers compute what the lost ones were given, or returned
                busy = {task.worker for task in open_}
                for worker in self.workers_for_new_tasks():
                    if worker not in busy and worker not in self._tables.missing:
                        self.create_task(iteration, worker)
                return
            open_ = []
        if not open_:
            self.end(iteration, r.FinishIteration(number))

    def end(self, iteration: r.Iteration, record: r.FinishIteration | r.CollectIteration) -> None:
        """End an iteration and its tasks, and report this to its workers and clients."""
        tasks = [self._tables.state.tasks[number] for number in iteration.tasks]
        self._tables.change(record)
        for task in tasks:
            self._tables.end_task(task)
            self.notify(task.worker)
        if not self._tables.is_forgotten(iteration.id):
            self._clients.notify(iteration.id)

    def work(self, call: ev.WorkRequest) -> None:
        number = self._tables.worker_numbers.get(call.incarnation)
        if (
            number is None
            or self._tables.state.workers[number].incarnation != call.incarnation
            or number in self._tables.missing
        ):
            raise Refusal(errors.UNAVAILABLE, "this worker is not registered with the dispatcher")
        if call.state == self._tables.state.number:
            for task in call.finished:
                # a pending task was not sent to a worker, so none has computed it
                entry = self._tables.state.tasks.get(task)
                if (
                    entry is not None
                    and entry.worker == number
                    and entry.state is r.DataTaskState.RUNNING
                ):
                    self._finish_task(task, interrupted=call.incarnation in self._tables.leaving)
            self._note_serving(call, number)
        before = self._tables.work_requests.pop(call.incarnation, None)
        if before is not None:
            self._tables.reply(before.token, None, news=True)
        self._tables.work_requests[call.incarnation] = call
        self.notify(number)

    def _note_serving(self, call: ev.WorkRequest, number: int) -> None:
        """Record the addresses at which a worker serves its tasks. Ignore tasks of other places,
        because a worker whose place another worker has taken may still report tasks of that place.
        """
        for task, address in call.has.items():
            entry = self._tables.state.tasks.get(task)
            # another worker has the place of these tasks now
            if entry is None or entry.worker != number:
                continue
            if address and self._tables.serving.get(task) != (call.incarnation, address):
                self._tables.serving[task] = (call.incarnation, address)
                self._clients.notify(entry.iteration)

    def notify(self, number: int) -> None:
        """Reply to this worker's pending request for work if the worker lacks a task or has to drop
        one."""
        worker = self._tables.state.workers.get(number)
        work = None if worker is None else self._tables.work_requests.get(worker.incarnation)
        if work is None or worker is None:
            return
        assigned = work.has if work.state == self._tables.state.number else {}
        tasks = self._tables.state.tasks
        should = [
            task
            for task in self._tables.tasks_of.get(number, ())
            if self._tables.is_runnable(tasks[task])
            and tasks[task].state is r.DataTaskState.RUNNING
        ]
        new = [
            self._definition(self._tables.state.tasks[task])
            for task in should
            if task not in assigned
        ]
        drop = [
            task
            for task in work.has
            if task not in should or work.state != self._tables.state.number
        ]
        # otherwise the request stays pending until there is news
        if new or drop:
            del self._tables.work_requests[worker.incarnation]
            self._tables.reply(work.token, (self._tables.state.number, new, drop), news=True)

    def _definition(self, task: r.TaskEntry) -> tuple[Any, ...]:
        """Return a task in the form that is sent to its worker: (task, iteration, dataset id,
        fingerprint of the dataset, terms as a tuple, number of sources, starting round, number of
        workers in the fixed list, index of this worker in the list, the job's name, repetition of
        the iteration).
        """
        iteration = self._tables.state.iterations[task.iteration]
        job = self._tables.state.jobs[iteration.job]
        terms = job.terms
        dataset = self._tables.state.datasets[terms.dataset]
        return (
            task.id,
            task.iteration,
            dataset.id,
            dataset.fingerprint,
            msgspec.structs.astuple(terms),
            len(iteration.cursors),
            task.starting_round,
            len(self._tables.worker_list.entries),
            self._tables.state.workers[task.worker].index,
            job.name,
            iteration.repetition,
        )

    def tick(self, now: float) -> None:
        """Remove workers that have been missing for `worker_timeout_s`. After a restart of the
        dispatcher, treat each worker that has not registered within RETURN_S as gone, so that
        DYNAMIC iterations do not wait for the worker.
        """
        if now >= self._tables.return_deadline:
            self._tables.return_deadline = inf
            for number in sorted(self._tables.missing.keys() - self._tables.lost_workers):
                self._tables.lost_workers.add(number)
                for task in list(self._tables.tasks_of.get(number, ())):
                    self._finish_if_over(self._tables.state.tasks[task].iteration)
        for number, since in list(self._tables.missing.items()):
            if since + self._tables.rules.worker_timeout_s <= now:
                self._remove_worker(number)
