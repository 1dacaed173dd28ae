"""Workers: which there are, which tasks they have, and when an iteration is at its end."""

from __future__ import annotations

from math import inf
from typing import Any

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import questions as q
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.clients import Clients
from zmqdist.data.service.dispatcher.machine.coordinated import is_coordinated, is_pending, runs
from zmqdist.data.service.dispatcher.machine.tables import Book, Refusal


class WorkerTable:
    """See the module's docstring."""

    def __init__(self, book: Book, clients: Clients) -> None:
        self._book = book
        self._clients = clients

    def joined(self, event: q.WorkerJoined) -> None:
        members = self._book.members
        for life in [life for life, each in members.items() if each.address == event.address and event.address]:
            del members[life]  # it has ended, though its loss is not known yet: its successor has its port
        members[event.life] = event
        worker = self._place_for(event)
        if self._book.hosts.entries:
            self._book.hosts.join(worker.address)
            worker.index = self._book.hosts.index_of(worker.address)
        self._book.places = {life: number for life, number in self._book.places.items() if number != worker.number}
        self._book.places[event.life] = worker.number
        self._book.missing.pop(worker.number, None)
        self._book.gone.discard(worker.number)
        self._book.change(r.PlaceWorker(worker))
        self._take_part(worker)

    def _take_part(self, worker: r.WorkerEntry) -> None:
        """Give a worker that is there a task of each iteration."""
        for iteration in list(self._book.state.iterations.values()):
            if iteration.finished or iteration.collected:
                continue
            tasks = [self._book.state.tasks[task] for task in iteration.tasks]
            mine = [task for task in tasks if task.worker == worker.number]
            if is_coordinated(self._book, iteration):
                for task in mine:
                    if is_pending(task) and not runs(self._book, task):
                        self._finish_task(task.id, cut=True)
                if not any(runs(self._book, task) for task in mine):
                    self.create_task(iteration, worker.number, r.PENDING)
            elif not mine:
                self.create_task(iteration, worker.number)
            else:
                self._finish_if_over(iteration.id)

    def _place_for(self, event: q.WorkerJoined) -> r.WorkerEntry:
        """The place of this life, else of the worker at this address, else of a missing one with this name, else a new one.

        After a restart workers come back in any order, and a name that this dispatcher gave may be the one that another worker had from the
        dispatcher before, which is alive and on its way: its place is left to it.
        """
        workers = self._book.state.workers
        same = [number for number, worker in workers.items() if worker.life == event.life]
        same += [number for number, worker in workers.items() if worker.address == event.address and event.address]
        same += [
            number
            for number in self._book.missing
            if workers[number].name == event.name and (event.named or number in self._book.gone)
        ]
        number = same[0] if same else self._book.state.next_worker
        return r.WorkerEntry(number, event.name, event.address, event.life, event.tags)

    def reconcile(self) -> None:
        """After the state was read back: give members what did not become durable, places and tasks, and tell all what they should do."""
        for life, event in list(self._book.members.items()):
            number = self._book.places.get(life)
            if number is None:
                self.joined(event)
            else:
                self._take_part(self._book.state.workers[number])
        for number in list(self._book.state.workers):
            self.news(number)

    def lost(self, event: q.WorkerGone, now: float) -> None:
        self._book.members.pop(event.life, None)
        left = event.left or event.life in self._book.leaving
        self._book.leaving.discard(event.life)
        number = self._book.places.get(event.life)
        if number is None or self._book.state.workers[number].life != event.life:
            return
        self._book.working.pop(event.life, None)
        self._book.missing[number] = now
        self._book.gone.add(number)
        self._book.hosts.leave(self._book.state.workers[number].address)
        if left:
            self._remove_worker(number)
            return
        for task in list(self._book.tasks_of.get(number, ())):
            self._book.serving.pop(task, None)
            iteration = self._book.state.tasks[task].iteration
            self._clients.news(iteration)
            self._finish_if_over(iteration)

    def leave(self, asked: q.LeaveRequest) -> None:
        """A worker will go."""
        if asked.life in self._book.members:
            self._book.leaving.add(asked.life)
        self._book.answer(asked.token, None)

    def staying(self) -> list[int]:
        """The workers that get new tasks."""
        going = {self._book.places[life] for life in self._book.leaving if life in self._book.places} | self._book.gone
        return [number for number in self._book.state.workers if number not in going]

    def _remove_worker(self, number: int) -> None:
        for number_of_task in list(self._book.tasks_of.get(number, ())):
            task = self._book.state.tasks[number_of_task]
            if is_coordinated(self._book, self._book.state.iterations[task.iteration]) and not is_pending(task):
                self._clients.news(task.iteration)  # it ends when its consumers agree where
            else:
                self._finish_task(task.id, cut=True)
        self._book.tasks_of.pop(number, None)
        self._book.missing.pop(number, None)
        self._book.gone.discard(number)
        self._book.places.pop(self._book.state.workers[number].life, None)
        self._book.change(r.RemoveWorker(number))

    def create_task(self, iteration: r.Iteration, worker: int, starting_round: int = 0) -> None:
        task = r.TaskEntry(self._book.state.next_task, iteration.id, worker, starting_round=starting_round)
        if is_coordinated(self._book, iteration):
            task.life = self._book.state.workers[worker].life
            if worker in self._book.missing:
                return  # when it comes, there will be a task for it
        self._book.change(r.CreateTask(task))
        self._book.tasks_of.setdefault(worker, {})[task.id] = None
        self.news(worker)
        if is_pending(task):
            self._clients.news(iteration.id)

    def _finish_task(self, number: int, *, cut: bool) -> None:
        task = self._book.state.tasks.get(number)
        if task is None or task.finished:
            return
        self._book.change(r.FinishTask(number, cut))
        self._book.tasks_of.get(task.worker, {}).pop(number, None)
        self._book.serving.pop(number, None)
        self.news(task.worker)
        self._clients.news(task.iteration)
        self._finish_if_over(task.iteration)

    def _finish_if_over(self, number: int) -> None:
        iteration = self._book.state.iterations[number]  # one in portions ends with the last acknowledgement
        if iteration.finished or iteration.collected or not iteration.tasks or iteration.portions is not None:
            return
        if is_coordinated(self._book, iteration):
            return
        tasks = [self._book.state.tasks[each] for each in iteration.tasks]
        open_ = [task for task in tasks if not task.finished]
        terms = self._book.state.jobs[iteration.job].terms
        if terms.mode == r.DYNAMIC and not terms.coordinated:
            if any(task.worker not in self._book.gone for task in open_):
                return  # one that is not back after a restart may have had positions, and be on its way
            ended = any(task.finished and not task.cut for task in tasks)
            if not ended or any(cursor.returned for cursor in iteration.cursors):
                busy = {task.worker for task in open_}
                for worker in self.staying():
                    if worker not in busy and worker not in self._book.missing:
                        self.create_task(iteration, worker)
                return
            open_ = []
        if not open_:
            self.end(iteration, r.FinishIteration(number))

    def end(self, iteration: r.Iteration, record: r.FinishIteration | r.CollectIteration) -> None:
        tasks = [self._book.state.tasks[each] for each in iteration.tasks]
        self._book.change(record)
        for task in tasks:
            self._book.tasks_of.get(task.worker, {}).pop(task.id, None)
            self._book.serving.pop(task.id, None)
            self.news(task.worker)
        if not self._book.is_forgotten(iteration.id):
            self._clients.news(iteration.id)

    def work(self, asked: q.WorkRequest) -> None:
        number = self._book.places.get(asked.life)
        if number is None or self._book.state.workers[number].life != asked.life or number in self._book.missing:
            raise Refusal(errors.UNAVAILABLE, "this worker is not registered with the dispatcher, or not any more")
        if asked.state == self._book.state.number:
            for task in asked.done:
                if task in self._book.tasks_of.get(number, ()):
                    self._finish_task(task, cut=asked.life in self._book.leaving)
            self._note_serving(asked, number)
        before = self._book.working.pop(asked.life, None)
        if before is not None:
            self._book.tell(before.token, None)
        self._book.working[asked.life] = asked
        self.news(number)

    def _note_serving(self, asked: q.WorkRequest, number: int) -> None:
        """Only of its own tasks: a worker that came back after another had got its place still has those of this place."""
        for task, address in asked.has.items():
            known = self._book.state.tasks.get(task)
            if known is None or known.worker != number:
                continue
            if address and self._book.serving.get(task) != (asked.life, address):
                self._book.serving[task] = (asked.life, address)
                self._clients.news(known.iteration)

    def news(self, number: int) -> None:
        worker = self._book.state.workers.get(number)
        work = None if worker is None else self._book.working.get(worker.life)
        if work is None or worker is None:
            return
        known = work.has if work.state == self._book.state.number else {}
        tasks = self._book.state.tasks
        should = [
            task
            for task in self._book.tasks_of.get(number, ())
            if runs(self._book, tasks[task]) and not is_pending(tasks[task])
        ]
        new = [self._definition(self._book.state.tasks[task]) for task in should if task not in known]
        drop = [task for task in work.has if task not in should or work.state != self._book.state.number]
        if new or drop:
            del self._book.working[worker.life]
            self._book.tell(work.token, (self._book.state.number, new, drop))

    def _definition(self, task: r.TaskEntry) -> tuple[Any, ...]:
        """(task, iteration, dataset id, its fingerprint, terms as a tuple, number of sources, starting round,
        workers in the fixed list, this one's place there, the job's name)."""
        iteration = self._book.state.iterations[task.iteration]
        job = self._book.state.jobs[iteration.job]
        terms = job.terms
        dataset = self._book.state.datasets[terms.dataset]
        fields = tuple(getattr(terms, name) for name in terms.__struct_fields__)
        return (
            task.id,
            task.iteration,
            dataset.id,
            dataset.fingerprint,
            fields,
            len(iteration.cursors),
            task.starting_round,
            len(self._book.hosts.entries),
            self._book.state.workers[task.worker].index,
            job.name,
        )

    def gone(self, token: q.Token) -> None:
        """Nobody waits for this answer any more."""
        for life, work in self._book.working.items():
            if work.token == token:
                del self._book.working[life]
                return

    def tick(self, now: float) -> None:
        """Give up workers that have been away for too long. DYNAMIC waits for nobody who is not back soon after a restart."""
        if now >= self._book.back_by:
            self._book.back_by = inf
            for number in sorted(self._book.missing.keys() - self._book.gone):
                self._book.gone.add(number)
                for task in list(self._book.tasks_of.get(number, ())):
                    self._finish_if_over(self._book.state.tasks[task].iteration)
        for number, since in list(self._book.missing.items()):
            if since + self._book.rules.worker_timeout_s <= now:
                self._remove_worker(number)
