"""Immutable records of the state of a data service's dispatcher at one moment, for the people who
run it and for tests. No decision depends on them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.state import DurableState


@dataclass(frozen=True, slots=True)
class IterationRow:
    """One iteration that the dispatcher remembers.

    Attributes:
      job: the job's name.
      tasks: the number of its tasks; 0 when the iteration has ended.
      clients: the number of readers that have the iteration open.
      finished: whether readers have read the whole iteration.
      collected: whether the dispatcher has dropped the iteration, because no reader had it open for
        `job_gc_timeout_ms`.
      portions_done: the number of portions that readers have acknowledged (delivery="exactly_once"
        and ordered reads).
      elements_acknowledged: the number of elements of unfinished portions that readers have
        acknowledged.
    """

    id: int
    job: str
    repetition: int
    tasks: int
    clients: int
    finished: bool
    collected: bool
    portions_done: int
    elements_acknowledged: int


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """One worker of the data service.

    Attributes:
      address: the address at which readers connect to it.
      incarnation: the incarnation of the process that has the place, or had it last.
      index: the worker's index in the fixed list of workers; -1 if the worker has no entry.
      connected: whether the worker is connected. While it is not, the dispatcher waits for it to
        register again.
    """

    name: str
    address: str
    incarnation: int
    index: int
    connected: bool


@dataclass(frozen=True, slots=True)
class NextNumbers:
    """The numbers that the next dataset, job, iteration, task and client get. No number is used
    twice. With a journal, this holds across restarts too.
    """

    dataset: int
    job: int
    iteration: int
    task: int
    client: int


@dataclass(frozen=True, slots=True)
class DataSnapshot:
    """The state of a data service's dispatcher at one moment.

    Attributes:
      state: the random number of the dispatcher's durable state. A dispatcher that has lost its
        state has another number.
      datasets: number of registered datasets.
      jobs: names of the jobs, in the order in which they were created.
      tasks, clients: how many tasks and clients there are.
      saves: folders of distributed snapshots, in the order in which they were begun.
      checks_count: how often the dispatcher has searched for silent clients and unread iterations
        (job_gc_check_interval_ms).
      journal: "none" without fault_tolerant_mode; "unreadable" while the dispatcher refuses
        requests because the journal can be neither written nor read; otherwise "kept".
      journal_records: number of records in the journal after its last copy of the whole state.
    """

    state: int
    datasets: int
    jobs: tuple[str, ...]
    iterations: tuple[IterationRow, ...]
    tasks: int
    clients: int
    workers: tuple[PlaceRow, ...]
    saves: tuple[str, ...]
    next_numbers: NextNumbers
    checks_count: int
    journal: Literal["none", "kept", "unreadable"]
    journal_records: int


def iteration_rows(state: DurableState) -> tuple[IterationRow, ...]:
    """Return a row for each iteration."""
    return tuple(_iteration_row(state, iteration) for iteration in state.iterations.values())


def _iteration_row(state: DurableState, iteration: r.Iteration) -> IterationRow:
    finished_portions = acknowledged = 0
    if iteration.portions is not None:
        finished_portions = sum(
            stop - start
            for runs in iteration.portions.finished_runs.values()
            for start, stop in runs
        )
        acknowledged = sum(portion.acked for portion in iteration.portions.open.values())
    return IterationRow(
        id=iteration.id,
        job=state.jobs[iteration.job].name,
        repetition=iteration.repetition,
        tasks=len(iteration.tasks),
        clients=len(iteration.clients),
        finished=iteration.state is r.IterationState.FINISHED,
        collected=iteration.state is r.IterationState.COLLECTED,
        portions_done=finished_portions,
        elements_acknowledged=acknowledged,
    )


@dataclass(frozen=True, slots=True)
class DataTaskRow:
    """An unfinished task of one worker.

    Attributes:
      job: the job's name.
      mode: the name of the processing mode.
      moves: whether other workers take over the task's remaining elements when the worker is
        drained.
    """

    job: str
    mode: str
    moves: bool


@dataclass(frozen=True, slots=True)
class SnapshotStreamRow:
    """A stream of a distributed snapshot that one worker writes.

    Attributes:
      path: the folder of the snapshot.
      stream: the number of the stream in the snapshot.
      moves: whether another worker is present to continue the stream when this worker is drained.
        If not, the stream waits for the next worker. Committed elements are kept in either case.
    """

    path: str
    stream: int
    moves: bool


def data_tasks(
    state: DurableState, worker: str, present: Collection[str]
) -> tuple[DataTaskRow, ...]:
    """Return a row for each unfinished task of the worker with this name. `present` has the names
    of the registered workers."""
    names = {number: entry.name for number, entry in state.workers.items()}
    other_workers = {number for number, name in names.items() if name != worker and name in present}
    return tuple(
        _task_row(state, task, other_workers)
        for task in state.tasks.values()
        if names.get(task.worker) == worker and not task.is_over
    )


def _task_row(
    state: DurableState, task: r.TaskEntry, other_workers: Collection[int]
) -> DataTaskRow:
    iteration = state.iterations[task.iteration]
    job = state.jobs[iteration.job]
    moves = job.terms.portioned or job.terms.coordinated or job.terms.mode == r.DYNAMIC
    # With OFF each worker reads the whole dataset, so no element is lost while another worker has
    # an unfinished task.
    if job.terms.mode == r.OFF:
        tasks = [state.tasks[sibling] for sibling in iteration.tasks]
        moves = moves or any(
            sibling.worker in other_workers and not sibling.is_over for sibling in tasks
        )
    mode = r.MODES[job.terms.mode] if job.terms.mode < len(r.MODES) else str(job.terms.mode)
    return DataTaskRow(job.name, mode, moves)


def next_numbers(state: DurableState) -> NextNumbers:
    """Return the numbers that the next dataset, job, iteration, task and client get."""
    return NextNumbers(
        state.next_dataset, state.next_job, state.next_iteration, state.next_task, state.next_client
    )
