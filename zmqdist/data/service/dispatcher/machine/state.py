"""The durable state of a data service's dispatcher, and the method that applies a record to it. The
rows and records are in records.py."""

from __future__ import annotations

import msgspec

from zmqdist.data.service.dispatcher.machine import records as r


class DurableState(msgspec.Struct):
    """The state that the dispatcher has again after a restart with a journal.

    Attributes:
      number: a random number, by which clients and workers notice that a dispatcher has lost its
        state.
      compression_off: maps a dataset to whether compression "AUTO" is off for it.
      next_dataset, next_worker, ...: the next free number of each kind.
      snapshots: folders of distributed snapshots, in the order in which they were begun.
      successors: maps a client to the client that has taken over its portions.
    """

    number: int
    datasets: dict[str, r.DatasetEntry] = {}
    workers: dict[int, r.WorkerEntry] = {}
    jobs: dict[int, r.JobEntry] = {}
    iterations: dict[int, r.Iteration] = {}
    tasks: dict[int, r.TaskEntry] = {}
    clients: dict[int, r.ClientEntry] = {}
    compression_off: dict[str, bool] = {}
    next_dataset: int = r.FIRST_DATASET
    next_worker: int = 1
    next_job: int = r.FIRST_JOB
    next_iteration: int = r.FIRST_ITERATION
    next_task: int = r.FIRST_TASK
    next_client: int = r.FIRST_CLIENT
    snapshots: list[str] = []
    successors: dict[int, int] = {}

    def apply(self, record: r.Change) -> None:
        """Apply one record to the state."""
        match record:
            case r.RegisterDataset(dataset):
                self.datasets[dataset.id] = dataset
                # promise D5: the number is used now, even if a user chose it
                if dataset.id == str(self.next_dataset):
                    self.next_dataset += 1
            case r.PlaceWorker(worker):
                self.workers[worker.number] = worker
                self.next_worker = max(self.next_worker, worker.number + 1)
            case r.RemoveWorker(number):
                del self.workers[number]
            case r.CreateJob(job):
                self.jobs[job.id] = job
                self.next_job = job.id + 1
            case r.CreateIteration(iteration):
                self.iterations[iteration.id] = iteration
                self.next_iteration = iteration.id + 1
            case r.CreateTask(task):
                self.tasks[task.id] = task
                self.iterations[task.iteration].tasks.append(task.id)
                self.next_task = task.id + 1
            case r.FinishTask(task_id, interrupted, end_round):
                task = self.tasks[task_id]
                task.enter(r.DataTaskState.INTERRUPTED if interrupted else r.DataTaskState.FINISHED)
                task.end_round = end_round
            case r.StartTask(task_id, number):
                self.tasks[task_id].enter(r.DataTaskState.RUNNING)
                self.tasks[task_id].starting_round = number
            case r.FinishIteration(number):
                self._end(self.iterations[number], r.IterationState.FINISHED)
            case r.CollectIteration(number):
                self._end(self.iterations[number], r.IterationState.COLLECTED)
                # no reader needs them, because a later reader begins a new iteration
                self.iterations[number].portions = None
                self._forget(self.iterations[number])
            case r.AcquireClient(client):
                self.clients[client.id] = client
                iteration = self.iterations[client.iteration]
                iteration.clients.append(client.id)
                if iteration.portions is not None:
                    iteration.portions.readers[client.id] = client.reader
                self.next_client = client.id + 1
            case r.ReleaseClient(number):
                self._release(number)
            case r.GiveSplits():
                self._give(record)
            case r.ReturnSplits(task_id, source, repetition, runs, request):
                self.tasks[task_id].handed_back.append(request)
                cursor = self.iterations[self.tasks[task_id].iteration].cursors[source]
                # positions of an earlier repetition are not given out again
                if cursor.repetition == repetition:
                    cursor.returned += runs
            case r.DecideCompression(dataset_id, off):
                self.compression_off[dataset_id] = off
            case r.BeginSnapshot(path):
                self.snapshots.append(path)
            case _:
                self._apply_to_portions(record)

    def _release(self, number: int) -> None:
        iteration = self.iterations[self.clients.pop(number).iteration]
        iteration.clients.remove(number)
        if iteration.portions is not None:
            iteration.portions.leave(number)
        self._forget(iteration)

    def _forget(self, iteration: r.Iteration) -> None:
        """Forget an iteration if it has ended, and no client reads it or can join it. The state
        must not keep all iterations, because over months a service ends millions of them.
        """
        over = iteration.state is not r.IterationState.OPEN
        if over and not iteration.clients and self.jobs[iteration.job].anonymous:
            del self.iterations[iteration.id]
            del self.jobs[iteration.job]

    def _apply_to_portions(self, record: r.PortionsChange) -> None:
        of = (
            record.iteration
            if isinstance(record, r.LosePortions | r.FailPortions | r.RevokeDeath)
            else self.clients[record.client].iteration
        )
        iteration = self.iterations[of]
        portions = iteration.portions
        assert portions is not None
        match record:
            case r.GivePortions(client, incarnation, request, numbers):
                portions.give(client, incarnation, request, numbers)
            case r.Acknowledge(client, marks):
                portions.acknowledge(client, marks)
            case r.LosePortions(_, incarnation, client, died, crashed):
                portions.lose(incarnation, client, died, crashed)
            case r.RevokeDeath(_, incarnation):
                for portion in portions.open.values():
                    portion.lost.pop(incarnation, None)
            case r.FailPortions(_, why):
                portions.failed = why
            case r.TakeOver(client, old):
                portions.take_over(client, old)
                self.successors[old] = client
                if old in self.clients:
                    del self.clients[old]
                    iteration.clients.remove(old)
            case r.RestoreSaved(client, done_runs, open_):
                portions.restore_saved(self.clients[client], done_runs, open_)
                # promise E5: a loaded state may reopen an iteration that was complete
                over = portions.is_over()
                after = r.IterationState.FINISHED if over else r.IterationState.OPEN
                if iteration.state is not after:
                    iteration.enter(after)
            case r.SkipSaved(client, done_runs, open_):
                portions.skip_saved(self.clients[client], done_runs, open_)

    def _end(self, iteration: r.Iteration, state: r.IterationState) -> None:
        iteration.enter(state)
        for task in iteration.tasks:
            del self.tasks[task]
        iteration.tasks = []
        iteration.cursors = []

    def _give(self, record: r.GiveSplits) -> None:
        task = self.tasks[record.task]
        task.last_replies[record.source] = (
            record.request,
            record.repetition,
            record.start,
            record.length,
        )
        cursor = self.iterations[task.iteration].cursors[record.source]
        # the first task that gets there resets the source for all tasks
        if record.repetition > cursor.repetition:
            cursor.repetition, cursor.position, cursor.returned = record.repetition, 0, []
        if record.length and cursor.repetition == record.repetition:
            # otherwise these are positions that a leaving worker has returned
            if record.start == cursor.position:
                cursor.position += record.length
            else:
                _, length = cursor.returned.pop(0)
                if length > record.length:
                    cursor.returned.insert(
                        0, (record.start + record.length, length - record.length)
                    )


_states = msgspec.msgpack.Decoder(DurableState)


def decode_state(data: bytes) -> DurableState:
    """Return the state that `records.encode` encoded. Raises msgspec.DecodeError if the bytes are
    no state."""
    return _states.decode(data)
