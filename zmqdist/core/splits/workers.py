"""Workers: which there are, which tasks they have, and when an iteration is at its end."""

from __future__ import annotations

from typing import Any

from zmqdist import errors
from zmqdist.core.splits import questions as q
from zmqdist.core.splits import records as r
from zmqdist.core.splits.book import Book, Refusal
from zmqdist.core.splits.clients import Clients


class Workers:
    """See the module's docstring."""

    def __init__(self, book: Book, clients: Clients) -> None:
        self._book = book
        self._clients = clients

    def joined(self, event: q.WorkerJoined) -> None:
        self._book.joined[event.life] = event
        worker = self._place_for(event)
        self._book.places = {life: number for life, number in self._book.places.items() if number != worker.number}
        self._book.places[event.life] = worker.number
        self._book.missing.pop(worker.number, None)
        self._book.change(r.PlaceWorker(worker))
        for iteration in list(self._book.state.iterations.values()):
            if iteration.finished or iteration.collected:
                continue
            if any(self._book.state.tasks[task].worker == worker.number for task in iteration.tasks):
                continue
            self.create_task(iteration, worker.number)

    def _place_for(self, event: q.WorkerJoined) -> r.Worker:
        """The place of the worker at this address, else of a missing one with this name, else a new one."""
        workers = self._book.state.workers
        same = [number for number, worker in workers.items() if worker.address == event.address and event.address]
        same += [number for number in self._book.missing if workers[number].name == event.name]
        if same:
            return r.Worker(same[0], event.name, event.address, event.life, event.tags)
        return r.Worker(self._book.state.next_worker, event.name, event.address, event.life, event.tags)

    def lost(self, event: q.WorkerLost, now: float) -> None:
        self._book.joined.pop(event.life, None)
        number = self._book.places.get(event.life)
        if number is None or self._book.state.workers[number].life != event.life:
            return
        self._book.working.pop(event.life, None)
        self._book.missing[number] = now
        if event.left:
            self._remove_worker(number)
            return
        for task in list(self._book.tasks_of.get(number, ())):
            self._book.serving.pop(task, None)
            iteration = self._book.state.tasks[task].iteration
            self._clients.news(iteration)
            self._finish_if_over(iteration)

    def _remove_worker(self, number: int) -> None:
        for task in list(self._book.tasks_of.get(number, ())):
            self._finish_task(task)
        self._book.tasks_of.pop(number, None)
        self._book.missing.pop(number, None)
        self._book.places.pop(self._book.state.workers[number].life, None)
        self._book.change(r.RemoveWorker(number))

    def create_task(self, iteration: r.Iteration, worker: int) -> None:
        task = r.Task(self._book.state.next_task, iteration.id, worker)
        self._book.change(r.CreateTask(task))
        self._book.tasks_of.setdefault(worker, {})[task.id] = None
        self.news(worker)

    def _finish_task(self, number: int) -> None:
        task = self._book.state.tasks.get(number)
        if task is None or task.finished:
            return
        self._book.change(r.FinishTask(number))
        self._book.tasks_of.get(task.worker, {}).pop(number, None)
        self._book.serving.pop(number, None)
        self.news(task.worker)
        self._clients.news(task.iteration)
        self._finish_if_over(task.iteration)

    def _finish_if_over(self, number: int) -> None:
        iteration = self._book.state.iterations[number]  # one in portions ends with the last acknowledgement
        if iteration.finished or iteration.collected or not iteration.tasks or iteration.portions is not None:
            return
        tasks = [self._book.state.tasks[each] for each in iteration.tasks]
        open_ = [task for task in tasks if not task.finished]
        if self._book.state.jobs[iteration.job].terms.mode == r.DYNAMIC and len(open_) < len(tasks):
            open_ = [task for task in open_ if task.worker not in self._book.missing]
        if not open_:
            self.end(iteration, r.FinishIteration(number))

    def end(self, iteration: r.Iteration, record: r.FinishIteration | r.CollectIteration) -> None:
        tasks = [self._book.state.tasks[each] for each in iteration.tasks]
        self._book.change(record)
        for task in tasks:
            self._book.tasks_of.get(task.worker, {}).pop(task.id, None)
            self._book.serving.pop(task.id, None)
            self.news(task.worker)
        self._clients.news(iteration.id)

    def work(self, asked: q.Work) -> None:
        number = self._book.places.get(asked.life)
        if number is None and asked.life in self._book.joined:  # its place was lost with what the journal did not take
            self.joined(self._book.joined[asked.life])
            number = self._book.places[asked.life]
        if number is None or self._book.state.workers[number].life != asked.life or number in self._book.missing:
            raise Refusal(errors.UNAVAILABLE, "this worker is not registered with the dispatcher, or not any more")
        if asked.state == self._book.state.number:
            for task in asked.done:
                if task in self._book.tasks_of.get(number, ()):
                    self._finish_task(task)
            self._note_serving(asked)
        before = self._book.working.pop(asked.life, None)
        if before is not None:
            self._book.answer(before.token, None)
        self._book.working[asked.life] = asked
        self.news(number)

    def _note_serving(self, asked: q.Work) -> None:
        for task, address in asked.has.items():
            if address and task in self._book.state.tasks and self._book.serving.get(task) != (asked.life, address):
                self._book.serving[task] = (asked.life, address)
                self._clients.news(self._book.state.tasks[task].iteration)

    def news(self, number: int) -> None:
        worker = self._book.state.workers.get(number)
        work = None if worker is None else self._book.working.get(worker.life)
        if work is None or worker is None:
            return
        known = work.has if work.state == self._book.state.number else {}
        should = self._book.tasks_of.get(number, {})
        new = [self._definition(self._book.state.tasks[task]) for task in should if task not in known]
        drop = [task for task in work.has if task not in should or work.state != self._book.state.number]
        if new or drop:
            del self._book.working[worker.life]
            self._book.answer(work.token, (self._book.state.number, new, drop))

    def _definition(self, task: r.Task) -> tuple[Any, ...]:
        """(task, iteration, dataset id, its fingerprint, terms as a tuple, number of sources, starting round)."""
        iteration = self._book.state.iterations[task.iteration]
        terms = self._book.state.jobs[iteration.job].terms
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
        )

    def gone(self, token: q.Token) -> None:
        """Nobody waits for this answer any more."""
        for life, work in self._book.working.items():
            if work.token == token:
                del self._book.working[life]
                return

    def tick(self, now: float) -> None:
        """Give up workers that have been away for too long."""
        for number, since in list(self._book.missing.items()):
            if since + self._book.rules.worker_timeout_s <= now:
                self._remove_worker(number)
