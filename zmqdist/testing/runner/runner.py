"""MultiProcessRunner: runs a function in every task of a cluster, each in a process of its own, and
returns the results.

Rules
    A task is a new process with TF_CONFIG in its environment. The function and its arguments are
    pickled; the test's module needs no main guard. The processes end with this process, even if it
    crashes.

    If functions raise errors, `join` raises the error that arrived first, unchanged. The error of a
    function takes precedence over a time-out or an exit code. If a task has run several times, its
    last outcome counts.

    A process has failed if it crashed (SIGSEGV, SIGABRT, ...) or if its exit code is above 0. A
    task that was ended by `terminate`, or by SIGKILL or SIGTERM from outside, has not failed.

    `join` leaves no process behind, even if Ctrl-C interrupts it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zmqdist.clock import duration, seconds
from zmqdist.cluster.environment import TF_CONFIG_ENV, variable
from zmqdist.conditions import Condition
from zmqdist.errors import describe_exit
from zmqdist.field_types import checked
from zmqdist.testing.runner.barrier import TASK_CODEC, Barrier, Task, named, set_barrier
from zmqdist.testing.runner.process_pool import (
    MultiProcessRunnerResult,
    PoolOutcome,
    PoolWork,
    ProcessCrew,
    SubprocessTimeoutError,
    TaskProcess,
    UnexpectedSubprocessExitError,
    checked_cluster,
    stream_line,
)
from zmqdist.transport.pipe import BlockingPipe

log = logging.getLogger("zmqdist.testing")

JOIN_TIMEOUT_S = 200
TERM_GRACE_S = 30.0
CHIEF_GRACE_S = 3.0
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
)


@checked
class MultiProcessRunner:
    """Runs a function in every task of a cluster. The function `run` is a short form for most
    tests.

    >>> spec = zd.testing.create_cluster_spec(num_workers=1)
    >>> with zd.testing.MultiProcessRunner(abs, spec, args=(-3,)) as runner:
    ...     runner.start()
    ...     print(runner.join().return_value)
    [3]

    Args:
      fn: the function that every task runs.
      cluster_spec: a dict of jobs to addresses; `create_cluster_spec` makes one with free ports.
      rpc_layer: the value of "rpc_layer" in TF_CONFIG; None means that TF_CONFIG does not have this
        key.
      max_run_time: seconds from the start after which the runner ends tasks that still run, and
        `join` fails. None means no limit.
      stream_output: whether to write the lines of the tasks to this process's standard output as
        they arrive, prefixed with the task.
      return_output: whether to keep these lines for `MultiProcessRunnerResult.stdout`.
      dependence_on_chief: whether the other tasks are killed `chief_grace_s` after the chief has
        ended.
      auto_restart: whether to restart a task that failed or was terminated, until the chief has
        ended successfully.
      share_gpu: if True, each task sees all GPUs of this host. If False, CUDA_VISIBLE_DEVICES gives
        each task its share of the GPUs.
      args, kwargs: the arguments of `fn`.
      grpc_fail_fast, use_dill_for_args, daemon: arguments of TensorFlow, without effect: zmqdist
        has no gRPC, uses cloudpickle for objects that plain pickle refuses, and lets no process
        outlive this one.
      chief_grace_s: seconds that the other tasks may run after the chief has ended.
      term_grace_s: seconds between SIGTERM and SIGKILL. On SIGTERM a task writes its stacks.

    A with-statement ends the tasks that still run.

    Raises:
      ValueError: `fn` is not callable, there is more than one chief, or no task.
      TypeError: `cluster_spec` is not a cluster.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        cluster_spec: Any,
        rpc_layer: str | None = None,
        max_run_time: float | None = None,
        grpc_fail_fast: bool | None = None,
        stream_output: bool = True,
        return_output: bool = False,
        use_dill_for_args: bool = True,
        daemon: bool = False,
        dependence_on_chief: bool = True,
        auto_restart: bool = False,
        share_gpu: bool = True,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        chief_grace_s: float = CHIEF_GRACE_S,
        term_grace_s: float = TERM_GRACE_S,
    ) -> None:
        self._fn, self._args, self._kwargs = fn, tuple(args or ()), dict(kwargs or {})
        self._max_run_time = seconds(max_run_time)
        self._stream_output = stream_output
        self._return_output = return_output
        self._dependence_on_chief = dependence_on_chief
        self._auto_restart = auto_restart
        self._chief_grace_s = duration("chief_grace_s", chief_grace_s)
        self._term_grace_s = duration("term_grace_s", term_grace_s)
        self._crew = ProcessCrew(
            cluster_spec,
            rpc_layer=rpc_layer,
            share_gpu=share_gpu,
            on_line=self._wrote,
            on_outcome=self._reported,
            on_exit=self._exited,
        )
        self._changed = Condition()
        self._processes: dict[Task, TaskProcess] = {}  # the last process of each task
        self._running: set[TaskProcess] = set()
        self._works: dict[Task, tuple[PoolWork, Any]] = {}
        self._outcomes: dict[Task, PoolOutcome] = {}  # the outcomes in their order of arrival
        self._terminated: set[TaskProcess] = set()
        self._overran: list[Task] = []
        self._timers: list[threading.Timer] = []
        self._lines: list[str] = []
        self._start_called = False
        self._joined = False

    # -- starting ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all tasks.

        >>> spec = zd.testing.create_cluster_spec(num_workers=1)
        >>> with zd.testing.MultiProcessRunner(abs, spec, args=(-3,)) as runner:
        ...     runner.start()
        ...     print(runner.join().return_value)
        [3]

        Raises:
          ValueError: the runner was started or joined already.
          InvalidArgumentError: the function or its arguments cannot be pickled; the text names the
            part.
        """
        self._start_all_but(None)

    def start_in_process_as(self, as_task_type: str, as_task_id: int) -> None:
        """Start all other tasks, and run the function of the given task in this process. Return
        when the function has returned.

        >>> spec = zd.testing.create_cluster_spec(has_chief=True, num_workers=1)
        >>> with zd.testing.MultiProcessRunner(abs, spec, args=(-3,)) as runner:
        ...     runner.start_in_process_as("chief", 0)
        ...     print(runner.join().return_value)
        [3]

        While the function runs, this process has the TF_CONFIG of the task. The result of the
        function is dropped. If the function raises an error, the other tasks are ended.

        Raises:
          ValueError: the cluster has no such task, or the runner was started or joined already.
          InvalidArgumentError: the function or its arguments cannot be pickled; the text names the
            part.
          Exception: the function has raised it.
        """
        me = (as_task_type, as_task_id)
        if me not in self._crew.tasks:
            raise ValueError(f"{named(me)} is not in this cluster; it has {self._task_names()}")
        self._start_all_but(me)
        try:
            with self._being(me):
                self._fn(*self._args, **self._kwargs)
        except BaseException as error:
            self._crew.gate.dismiss(me, PoolOutcome(error=error).why)
            self.terminate_all()
            raise
        self._crew.gate.dismiss(me, PoolOutcome().why)

    def start_single_process(
        self,
        task_type: str,
        task_id: int,
        cluster_spec: Any = None,
        fn: Callable[..., Any] | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start one task that is not running, for example a task that was terminated, or a task
        that the cluster does not have.

        >>> spec = zd.testing.create_cluster_spec(num_workers=1)
        >>> with zd.testing.MultiProcessRunner(abs, spec, args=(-3,)) as runner:
        ...     runner.start()
        ...     runner.start_single_process("worker", 1, fn=pow, args=(2, 3))
        ...     print(sorted(runner.join().return_value))
        [3, 8]

        Args:
          cluster_spec: the cluster in the task's TF_CONFIG; None means the runner's cluster.
          fn: the function that the task runs; None means the runner's function.
          args, kwargs: the arguments of the function. None means the runner's arguments if `fn` is
            None, and otherwise no arguments.

        Raises:
          ValueError, TypeError: the task is running, the runner was joined, or `fn` or
            `cluster_spec` is refused, as by the constructor.
          InvalidArgumentError: the function or its arguments cannot be pickled; the text names the
            part.
        """
        task = (task_type, task_id)
        own = fn is None
        work = PoolWork.of(
            self._fn if fn is None else fn,
            self._args if own and args is None else args or (),
            self._kwargs if own and kwargs is None else kwargs or {},
        )
        cluster = None if cluster_spec is None else checked_cluster(cluster_spec)
        with self._changed:
            if self._joined:
                raise ValueError(f"{named(task)} cannot be started: this runner was joined")
            if self.process_exists(*task):
                raise ValueError(f"{named(task)} is running already; terminate it first")
            self._start_called = True
            self._start_task(task, work, cluster)

    def _start_all_but(self, me: Task | None) -> None:
        with self._changed:
            if self._joined:
                raise ValueError("this runner was joined: make a new one")
            if self._start_called:
                raise ValueError(
                    "this runner was started already; start_single_process adds a task"
                )
            work = PoolWork.of(self._fn, self._args, self._kwargs)
            self._start_called = True
            try:
                for task in self._crew.tasks:
                    if task != me:
                        self._start_task(task, work, None)
            except BaseException:
                self.terminate_all()
                raise
            if self._max_run_time is not None:
                self._after(self._max_run_time, self._overrun)

    def _start_task(self, task: Task, work: PoolWork, cluster: Any) -> None:
        self._works[task] = (work, cluster)
        process = self._processes[task] = self._crew.start(task, [work], True, cluster)
        self._running.add(process)

    @contextlib.contextmanager
    def _being(self, me: Task) -> Any:
        ours, theirs = BlockingPipe.pair(TASK_CODEC)
        here = BlockingPipe(theirs, TASK_CODEC)
        thread = threading.Thread(
            target=self._crew.listen,
            args=(me, ours, lambda *_: None),
            name=f"zmqdist-line-{named(me)}",
            daemon=True,
        )
        thread.start()
        set_barrier(Barrier(here, len(self._crew.tasks)))
        try:
            with variable(TF_CONFIG_ENV, self._crew.tf_config(me)):
                yield
        finally:
            set_barrier(None)
            here.close()
            thread.join()
            ours.close()

    # -- ending ------------------------------------------------------------------------------------

    def terminate(self, task_type: str, task_id: int) -> None:
        """Kill one task and the processes that it has started, and wait for its end. With
        `auto_restart` the runner restarts it.

        >>> import time
        >>> spec = zd.testing.create_cluster_spec(num_workers=1)
        >>> with zd.testing.MultiProcessRunner(time.sleep, spec, args=(60,)) as runner:
        ...     runner.start()
        ...     runner.terminate("worker", 0)

        Raises:
          ValueError: the task was never started.
        """
        task = (task_type, task_id)
        with self._changed:
            process = self._processes.get(task)
            if process is None:
                raise ValueError(f"{named(task)} was not started; there are: {self._task_names()}")
            if process in self._running:
                self._terminated.add(process)
                self._crew.signal([process], signal.SIGKILL)
                self._changed.wait_for(lambda: process not in self._running)

    def terminate_all(self, sig: int = signal.SIGKILL) -> None:
        """Send a signal to all running tasks, and restart none of them. `join` still raises errors
        that tasks had raised before.

        >>> import time
        >>> spec = zd.testing.create_cluster_spec(num_workers=1)
        >>> with zd.testing.MultiProcessRunner(time.sleep, spec, args=(60,)) as runner:
        ...     runner.start()
        ...     runner.terminate_all()
        """
        with self._changed:
            self._auto_restart = False
            self._terminated |= self._running
            self._crew.signal(list(self._running), sig)

    def join(self, timeout: float | None = JOIN_TIMEOUT_S) -> MultiProcessRunnerResult:
        """Wait for the end of all tasks, and return their results and output. Call this once.

        >>> spec = zd.testing.create_cluster_spec(num_workers=1)
        >>> with zd.testing.MultiProcessRunner(abs, spec, args=(-3,)) as runner:
        ...     runner.start()
        ...     print(runner.join(timeout=60).return_value)
        [3]

        Args:
          timeout: seconds; None means no limit.

        Raises:
          ValueError: the runner was joined already or never started, or `timeout` is no number.
          SubprocessTimeoutError: some tasks still ran after `timeout`. The runner sends them
              SIGTERM, on which they write their stacks, and then SIGKILL.
          UnexpectedSubprocessExitError: a task ended with an exit code above 0, crashed, or ran
            longer than `max_run_time`.
          Exception: the function of a task has raised it; its cause is the remote traceback.

        All errors except ValueError have an attribute `mpr_result`: a MultiProcessRunnerResult with
        the results and the output until then.
        """
        timeout = seconds(timeout)
        with self._changed:
            if self._joined:
                raise ValueError("this runner was joined already")
            if not self._start_called:
                raise ValueError("nothing to join: call start first")
            self._joined = True
        late: list[str] = []
        try:
            if not self._wait(timeout):
                late = sorted(named(process.task) for process in self._running)
                log.error("still running after %g s, and ended now: %s", timeout, ", ".join(late))
                self._end_with_stacks()
        finally:
            self._close()
        return self._verdict(timeout, late)

    def __enter__(self) -> MultiProcessRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._joined = True
        self._close()

    def _wait(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def _end_with_stacks(self) -> None:
        self.terminate_all(signal.SIGTERM)
        if not self._wait(self._term_grace_s):
            self.terminate_all()

    def _overrun(self) -> None:
        with self._changed:
            self._overran = [process.task for process in self._running]
        self._end_with_stacks()

    def _close(self) -> None:
        """End all tasks that still run. A second call returns at once."""
        with self._changed:
            self._auto_restart = False
        self._crew.close()
        for timer in self._timers:
            # the list is complete, because no task is left that could add a timer
            timer.cancel()
            timer.join()

    def _verdict(self, timeout: float | None, late: list[str]) -> MultiProcessRunnerResult:
        values = [outcome.value for outcome in self._outcomes.values() if outcome.value is not None]
        result = MultiProcessRunnerResult(values, self._lines)
        # an error of a function says more than the time-out or exit code that it causes
        for outcome in self._outcomes.values():
            if outcome.error is not None:
                outcome.error.mpr_result = result  # type: ignore[attr-defined]
                raise outcome.error
        if late:
            raise SubprocessTimeoutError(
                f"still running {timeout:g} s after join: {', '.join(late)}; their stacks are in "
                f"their output. "
                "Give join a longer timeout if they only needed more time",
                result,
            )
        if self._overran:
            overran = ", ".join(map(named, self._overran))
            text = f"the runner ended tasks that still ran after max_run_time, {self._max_run_time} s: {overran}"
            raise UnexpectedSubprocessExitError(text, result)
        for process in self._processes.values():
            code = process.child.exit_code or 0
            if process not in self._terminated and (code > 0 or -code in CRASHES):
                raise UnexpectedSubprocessExitError(process.exit_text(), result)
        return result

    # -- state of the processes --------------------------------------------------------------------

    def process_exists(self, task_type: str, task_id: int) -> bool:
        """Return whether a process of the task runs.

        >>> spec = zd.testing.create_cluster_spec(num_workers=1)
        >>> with zd.testing.MultiProcessRunner(abs, spec, args=(-3,)) as runner:
        ...     runner.start()
        ...     _ = runner.join()
        ...     print(runner.process_exists("worker", 0))
        False
        """
        with self._changed:
            return self._processes.get((task_type, task_id)) in self._running

    def get_process_id(self, task_type: str, task_id: int) -> int | None:
        """Return the process id of the task's last process; None if the task had none.

        >>> spec = zd.testing.create_cluster_spec(num_workers=1)
        >>> with zd.testing.MultiProcessRunner(abs, spec, args=(-3,)) as runner:
        ...     runner.start()
        ...     print(runner.get_process_id("worker", 0) > 0)
        ...     _ = runner.join()
        True
        """
        process = self._processes.get((task_type, task_id))
        return None if process is None else process.child.pid

    def get_process_exit_code(self, task_type: str, task_id: int) -> int | None:
        """Return the exit code of the task's last process in the form of `subprocess`, in which -9
        stands for SIGKILL. None means that the process still runs, or that the task had no process.

        >>> spec = zd.testing.create_cluster_spec(num_workers=1)
        >>> with zd.testing.MultiProcessRunner(abs, spec, args=(-3,)) as runner:
        ...     runner.start()
        ...     _ = runner.join()
        ...     print(runner.get_process_exit_code("worker", 0))
        0
        """
        process = self._processes.get((task_type, task_id))
        return None if process is None else process.child.exit_code

    def _task_names(self) -> str:
        return ", ".join(map(named, {**dict.fromkeys(self._crew.tasks), **self._processes}))

    # -- callbacks of the crew, in its threads -----------------------------------------------------

    def _wrote(self, line: str) -> None:
        if self._return_output:
            self._lines.append(line)
        if self._stream_output:
            stream_line(line)

    def _reported(self, process: TaskProcess, outcome: PoolOutcome) -> None:
        with self._changed:
            # a restarted task moves to the end, because `join` raises the error that arrived first
            self._outcomes.pop(process.task, None)
            self._outcomes[process.task] = outcome
            if outcome.error is None or not self._auto_restart:
                self._crew.gate.dismiss(process.task, outcome.why)

    def _exited(self, process: TaskProcess) -> None:
        task, code = process.task, process.child.exit_code
        with self._changed:
            self._running.discard(process)
            if code != 0 and self._auto_restart:
                self._crew.gate.dismiss(task, None)
                log.info("%s has ended and is restarted: %s", named(task), describe_exit(code or 0))
                try:
                    self._start_task(task, *self._works[task])
                except Exception as error:
                    # Keep the error, for example a lack of processes or descriptors, because `join`
                    # raises it.
                    self._outcomes[task] = PoolOutcome(error=error)
            else:
                may_return = process in self._terminated
                self._crew.gate.dismiss(
                    task, None if may_return else f"has ended ({describe_exit(code or 0)})"
                )
                if task[0] == "chief":
                    self._chief_exited()
            self._changed.notify_all()

    def _chief_exited(self) -> None:
        self._auto_restart = False
        if self._dependence_on_chief and self._running:
            self._after(self._chief_grace_s, self.terminate_all)

    def _after(self, delay_s: float, fn: Callable[[], object]) -> None:
        timer = threading.Timer(delay_s, fn)
        timer.daemon = True
        timer.name = "zmqdist-runner-timer"
        self._timers.append(timer)
        timer.start()


@checked
def run(
    fn: Callable[..., Any],
    cluster_spec: Any,
    rpc_layer: str | None = None,
    max_run_time: float | None = None,
    return_output: bool = False,
    timeout: int | None = JOIN_TIMEOUT_S,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> MultiProcessRunnerResult:
    """Run `fn` in every task of a cluster, wait for all tasks, and return their results and output.
    `timeout` is the argument of `MultiProcessRunner.join`, and the others are those of
    MultiProcessRunner. The errors are those of MultiProcessRunner and its `join`.

    >>> spec = zd.testing.create_cluster_spec(num_workers=2)
    >>> sorted(zd.testing.run(abs, spec, args=(-3,)).return_value)
    [3, 3]
    """
    with MultiProcessRunner(
        fn,
        cluster_spec,
        rpc_layer,
        max_run_time=max_run_time,
        return_output=return_output,
        args=args,
        kwargs=kwargs,
    ) as runner:
        runner.start()
        return runner.join(timeout)
