"""MultiProcessPoolRunner: one process for each task of a cluster. The processes stay alive between
functions.

Use one pool for a module of tests, and call `run` in each test: starting Python and importing NumPy
takes longer than most tests.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from signal import SIGTERM
from typing import Any, NoReturn

from zmqdist import clock as time
from zmqdist.background import in_background
from zmqdist.clock import duration
from zmqdist.field_types import checked
from zmqdist.testing.runner.barrier import Task, named
from zmqdist.testing.runner.process_pool import (
    MultiProcessRunnerResult,
    PoolOutcome,
    PoolWork,
    ProcessCrew,
    SubprocessTimeoutError,
    TaskProcess,
    UnexpectedSubprocessExitError,
    stream_line,
)

TASK_TIMEOUT_S = 120.0
TERM_GRACE_S = 3.0


@checked
class MultiProcessPoolRunner:
    """Processes for the tasks of a cluster. The first `run` starts the processes, and each later
    `run` uses them again.

    >>> pool = zd.testing.MultiProcessPoolRunner(zd.testing.create_cluster_spec(num_workers=2))
    >>> pool.run(abs, args=(-3,))
    [3, 3]
    >>> pool.shutdown()

    Args:
      cluster_spec: a dict of jobs to addresses, as `create_cluster_spec` returns it.
      initializer: a function that each process calls once, without arguments, before it runs other
        functions.
      share_gpu: if True, each process sees all GPUs of this host. If False, CUDA_VISIBLE_DEVICES
        gives each process its share of the GPUs.
      task_timeout_s: longest time of one `run`, in seconds.

    Attributes:
      task_timeout_s: longest time of one `run`, in seconds; a change takes effect with the next
        `run`.

    The pool writes the output of the processes to standard output, each line prefixed with its
    task. The processes end at `shutdown`, at the end of a with-statement, when the pool is
    garbage-collected, or when this process ends.

    Raises:
      ValueError: more than one chief, no task, or an initializer that cannot be called.
      TypeError: `cluster_spec` is not a cluster.
    """

    def __init__(
        self,
        cluster_spec: Any,
        initializer: Callable[[], Any] | None = None,
        share_gpu: bool = True,
        *,
        task_timeout_s: float = TASK_TIMEOUT_S,
    ) -> None:
        self._cluster_spec = cluster_spec
        self._initializer = initializer
        self._share_gpu = share_gpu
        self.task_timeout_s = duration("task_timeout_s", task_timeout_s)
        self._lock = threading.RLock()
        self._outcomes: SimpleQueue[tuple[TaskProcess, PoolOutcome | None]] = SimpleQueue()
        self._processes: dict[Task, TaskProcess] = {}
        self._crew = self._new_crew()
        self._dropped: weakref.finalize[..., Any] | None = None

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run `fn` in all tasks, and wait until all have finished.

        >>> pool = zd.testing.MultiProcessPoolRunner(zd.testing.create_cluster_spec(num_workers=1))
        >>> pool.run(abs, args=(-3,))
        [3]
        >>> pool.shutdown()

        Returns:
          The results in the order of the tasks, the chief first, without results that are None.

        Raises:
          Exception: the function has raised it in a task. `run` raises it after all tasks have
              finished. If several tasks raised errors, `run` raises the error of the first task in
              their order. The pool can be used again. `run` also raises an error of the
              initializer. The pool then ends all processes; the next `run` starts new ones.
          UnexpectedSubprocessExitError: a process has ended. The pool ends the other processes; the
            next `run` starts new ones.
          SubprocessTimeoutError: the run took longer than `task_timeout_s`. The pool ends all
            processes; the next `run` starts new ones.
          InvalidArgumentError: the function or its arguments cannot be pickled; the text names the
            part.
        """
        work = PoolWork.of(fn, args or (), kwargs or {})
        with self._lock:
            if not self._processes:
                self._start()
            for task in self._processes:
                # record all starts before any task can arrive at the barrier
                self._crew.gate.admit(task)
            for process in self._processes.values():
                with contextlib.suppress(OSError):  # the process has ended, which `on_exit` reports
                    work.send(process.pipe, last=False)
            outcomes = self._collect()
        for task in self._crew.tasks:
            error = outcomes[task].error
            if error is not None:
                raise error
        return [
            outcomes[task].value for task in self._crew.tasks if outcomes[task].value is not None
        ]

    def shutdown(self) -> None:
        """End the processes. A second call does nothing; a later `run` starts new processes.

        >>> pool = zd.testing.MultiProcessPoolRunner(zd.testing.create_cluster_spec(num_workers=1))
        >>> pool.shutdown()
        """
        with self._lock:
            if self._dropped is not None:
                self._dropped.detach()
                self._dropped = None
                self._crew.close()
                self._processes = {}
                self._crew = self._new_crew()

    def __enter__(self) -> MultiProcessPoolRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _new_crew(self) -> ProcessCrew:
        """Return a new ProcessCrew. It refers to a queue and not to this pool, so that an unused
        pool is garbage-collected."""
        outcomes = self._outcomes = SimpleQueue()
        return ProcessCrew(
            self._cluster_spec,
            rpc_layer=None,
            share_gpu=self._share_gpu,
            on_line=stream_line,
            on_outcome=lambda process, outcome: outcomes.put((process, outcome)),
            on_exit=lambda process: outcomes.put((process, None)),
        )

    def _start(self) -> None:
        works = [] if self._initializer is None else [PoolWork.of(self._initializer, (), {})]
        self._dropped = weakref.finalize(
            self, in_background, "zmqdist-pool-close", self._crew.close
        )
        # At exit no finalizer is needed: the lifelines close when this process ends, and the pool's
        # processes then end themselves.
        self._dropped.atexit = False
        try:
            for task in self._crew.tasks:
                self._processes[task] = self._crew.start(task, works, last=False)
            if works:
                for outcome in self._collect().values():
                    if outcome.error is not None:
                        raise outcome.error
        except BaseException:
            self.shutdown()
            raise

    def _collect(self) -> dict[Task, PoolOutcome]:
        outcomes: dict[Task, PoolOutcome] = {}
        due = time.monotonic() + self.task_timeout_s
        try:
            while len(outcomes) < len(self._processes):
                process, outcome = self._outcomes.get(timeout=max(0.0, due - time.monotonic()))
                if outcome is None:
                    self._lost(process, outcomes)
                outcomes[process.task] = outcome
                self._crew.gate.dismiss(process.task, outcome.why)
        except Empty:
            self._late(outcomes)
        except BaseException:  # for example Ctrl-C, after which no caller waits for the functions
            self.shutdown()
            raise
        return outcomes

    def _lost(self, process: TaskProcess, outcomes: dict[Task, PoolOutcome]) -> NoReturn:
        raise UnexpectedSubprocessExitError(process.exit_text(" during run"), _result(outcomes))

    def _late(self, outcomes: dict[Task, PoolOutcome]) -> NoReturn:
        late = [process for task, process in self._processes.items() if task not in outcomes]
        self._crew.signal(late, SIGTERM)  # on SIGTERM a process writes its stacks
        until = time.monotonic() + TERM_GRACE_S
        for process in late:
            process.child.ended.wait(max(0.0, until - time.monotonic()))
        self.shutdown()
        names = ", ".join(named(process.task) for process in late)
        raise SubprocessTimeoutError(
            f"still running after {self.task_timeout_s:g} s: {names}; their stacks are in their "
            f"output",
            _result(outcomes),
        )


def _result(outcomes: dict[Task, PoolOutcome]) -> MultiProcessRunnerResult:
    return MultiProcessRunnerResult(
        [outcome.value for outcome in outcomes.values() if outcome.value is not None], []
    )
