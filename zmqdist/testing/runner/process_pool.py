"""ProcessCrew: starts the processes of a run with their environment, receives their messages and
output, and ends them. Also the result of a run, and the two errors that a runner raises itself: an
error of a task's function is raised unchanged."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zmqdist.cluster.defs import ClusterDef
from zmqdist.cluster.resolvers.devices import CUDA, gpus
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.errors import OpError, describe_exit
from zmqdist.launch.children import Child, Children
from zmqdist.testing.runner.barrier import TASK_CODEC, BarrierGate, Task, TaskPipe, named
from zmqdist.transport.pipe import BlockingPipe, Parts
from zmqdist.wire import trusted

PREFIX_CHARS = 14
OUTCOME_S = 60.0
"""Seconds that reading and unpickling the last message of an ended process may take. The limit is
high, because the message may have gigabytes and the host may be busy."""


class MultiProcessRunnerResult(NamedTuple):
    """The results and the output of the tasks of a run.

    >>> result = zd.testing.MultiProcessRunnerResult(return_value=[1, 2], stdout=[])
    >>> result.return_value
    [1, 2]

    Attributes:
      return_value: the results of the functions, in no particular order and without None.
      stdout: the lines that the tasks wrote, each prefixed with the task and ending with a newline;
        empty without `return_output`.
    """

    return_value: list[Any]
    stdout: list[str]


class _Failed(RuntimeError):
    def __init__(self, message: str, mpr_result: MultiProcessRunnerResult) -> None:
        super().__init__(message, mpr_result)
        self.mpr_result = mpr_result

    def __str__(self) -> str:
        return str(self.args[0])


class SubprocessTimeoutError(_Failed):
    """Some tasks did not end in time, and were killed.

    Attributes:
      mpr_result: the results and the output until then.
    """


class UnexpectedSubprocessExitError(_Failed):
    """A process ended before its function had returned or raised: it exited with a code of its own,
    crashed, or ran too long.

    Attributes:
      mpr_result: the results and the output of the tasks.
    """


@dataclass(frozen=True)
class PoolWork:
    """A function with its arguments, pickled once, to be sent to any number of processes."""

    payloads: list[Any]
    module: tuple[str, str] | None

    @classmethod
    def of(cls, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> PoolWork:
        """Pickle a function and its arguments. Raises InvalidArgumentError if that fails; the text
        names the part."""
        packed = trusted.pack_call(tuple(args), dict(kwargs))
        parts = [bytes(part) for part in packed] if isinstance(packed, list) else [packed]
        inner: Any = fn
        while isinstance(inner, functools.partial):
            inner = inner.func
        module = sys.modules.get(getattr(inner, "__module__", None) or "")
        path = getattr(module, "__file__", None)
        module_file = (
            None
            if module is None or path is None or module.__name__ == "__main__"
            else (module.__name__, path)
        )
        return cls([trusted.pack_function(fn), *parts], module_file)

    def send(self, pipe: TaskPipe, last: bool) -> None:
        """Send the function to a process. With `last`, the process ends after this function."""
        pipe.send(("run", {"module": self.module, "last": last}), self.payloads)


@dataclass(frozen=True)
class PoolOutcome:
    """The outcome of one run of a function: its value or its error."""

    value: Any = None
    error: BaseException | None = None

    @property
    def why(self) -> str:
        """The reason why the function's task cannot arrive at the barrier any more, as the end of a
        sentence that begins with the task."""
        return (
            "has returned"
            if self.error is None
            else f"has raised {type(self.error).__name__}: {self.error}"
        )


class TaskProcess:
    """One process of one task.

    Attributes:
      pipe: the pipe to the process.
      child: the process, with its pid and exit code.
    """

    def __init__(self, task: Task, pipe: TaskPipe, child: Child) -> None:
        self.task = task
        self.pipe = pipe
        self.child = child
        self.thread: threading.Thread | None = None

    def exit_text(self, when: str = "") -> str:
        """Return the sentence that says how the process has ended, with its last lines."""
        code, last = self.child.exit_code or 0, self.child.tail
        how = f" ({describe_exit(code)})" if code < 0 else ""
        text = f"Subprocess {named(self.task)} exited with exit code {code}{how}{when}"
        return f"{text}; its last lines:\n{last}" if last else text


class ProcessCrew:
    """The processes of one run or pool.

    Args:
      cluster: the user's cluster. The crew keeps a reference to it, so that its ports stay
        reserved.
      on_line: called with each line that a process writes, with a prefix and a newline.
      on_outcome: called with a process and the outcome of its function, in the thread that serves
        this process.
      on_exit: called with a process that has ended, after all its messages were handled.

    Raises:
      ValueError: there is more than one chief, or no task.
      TypeError: `cluster` is not a cluster.
    """

    def __init__(
        self,
        cluster: Any,
        *,
        rpc_layer: str | None,
        share_gpu: bool,
        on_line: Callable[[str], object],
        on_outcome: Callable[[TaskProcess, PoolOutcome], object],
        on_exit: Callable[[TaskProcess], object],
    ) -> None:
        self._cluster = cluster
        self._spec = checked_cluster(cluster)
        self._rpc_layer = rpc_layer
        self._share_gpu = share_gpu
        self._on_line = on_line
        self._on_outcome = on_outcome
        self._on_exit = on_exit
        self._processes: dict[Child, TaskProcess] = {}
        self._children: Children | None = None
        self._lock = threading.Lock()
        self.tasks = tasks_of(self._spec)
        self.gate = BarrierGate(self.tasks)

    def start(
        self, task: Task, works: Sequence[PoolWork], last: bool, cluster: ClusterSpec | None = None
    ) -> TaskProcess:
        """Start a process for a task.

        Args:
          works: the functions that the process runs first.
          last: whether the process ends after them.
          cluster: the cluster in the process's TF_CONFIG; None means the crew's cluster.
        """
        environment = {**os.environ, "TF_CONFIG": self.tf_config(task, cluster), **self._gpus(task)}
        ours, theirs = BlockingPipe.pair(TASK_CODEC)
        self.gate.admit(task)
        with self._lock:
            # the process may end before it is in the table, so `_exited` waits for this lock
            if self._children is None:
                self._children = Children(self._exited, whole_groups=True)
            try:
                child = self._children.start(
                    named(task),
                    lambda lifeline: ["zmqdist.testing.runner.child", str(lifeline), str(theirs)],
                    environment,
                    functools.partial(self._wrote, f"[{named(task)}]:".ljust(PREFIX_CHARS)),
                    [theirs],
                )
            except BaseException:
                ours.close()
                raise
            finally:
                os.close(theirs)
            process = self._processes[child] = TaskProcess(task, ours, child)
            with contextlib.suppress(OSError):
                # the process has ended already, which `_exited` reports
                # Send this message before the method returns, because it must come before any
                # function that the caller sends.
                ours.send(("task", self.facts()))
            process.thread = threading.Thread(
                target=self._listen,
                args=(process, works, last),
                name=f"zmqdist-line-{named(task)}",
                daemon=True,
            )
            process.thread.start()
        return process

    def tf_config(self, task: Task, cluster: ClusterSpec | None = None) -> str:
        """Return the text of TF_CONFIG for a task."""
        tf_config: dict[str, Any] = {
            "cluster": (cluster or self._spec).as_dict(),
            "task": {"type": task[0], "index": task[1]},
        }
        if self._rpc_layer is not None:
            tf_config["rpc_layer"] = self._rpc_layer
        return json.dumps(tf_config)

    def facts(self) -> dict[str, Any]:
        """Return the contents of the first message to a process: the key for `manager`, and the
        size of the barrier."""
        return {
            "authkey": bytes(multiprocessing.current_process().authkey).hex(),
            "parties": len(self.tasks),
        }

    def signal(self, processes: Sequence[TaskProcess], number: int) -> None:
        """Send a signal to processes. SIGKILL is also sent to all processes that they have
        started.
        """
        for process in processes:
            process.child.signal(number, group=number == signal.SIGKILL)

    def close(self) -> None:
        """Kill the processes that still run, and return when all have ended. A second call does
        nothing."""
        children = self._children
        if children is not None:
            with self._lock:
                self.signal(list(self._processes.values()), signal.SIGKILL)
            children.close(0.0)

    def listen(
        self, task: Task, pipe: TaskPipe, on_message: Callable[[str, Parts], object]
    ) -> None:
        """Receive the messages of one task until the task closes its pipe. This method handles
        messages to the barrier, and passes results and errors to `on_message`.
        """

        def answer(word: str, facts: Any) -> None:
            with contextlib.suppress(OSError):  # a process that has just ended needs no answer
                pipe.send((word, facts))

        with contextlib.suppress(EOFError):
            while True:
                (word, _), payloads = pipe.receive()
                if word in ("returned", "raised"):
                    on_message(word, payloads)
                else:
                    self.gate.heard(task, word, answer)

    def _listen(self, process: TaskProcess, works: Sequence[PoolWork], last: bool) -> None:
        with contextlib.suppress(OSError):
            for work in works:
                work.send(process.pipe, last)
        self.listen(
            process.task,
            process.pipe,
            lambda *message: self._on_outcome(process, _outcome(*message)),
        )

    def _wrote(self, prefix: str, line: str) -> None:
        self._on_line(f"{prefix} {line}\n")

    def _exited(self, child: Child) -> None:
        with self._lock:
            process = self._processes.pop(child)
        thread = process.thread
        if thread is not None:
            thread.join(OUTCOME_S)
            if not thread.is_alive():
                process.pipe.close()
        self._on_exit(process)

    def _gpus(self, task: Task) -> dict[str, str]:
        """Return the environment variable that names the GPUs of a process; an empty dict if the
        processes share all GPUs. With n tasks, each process gets every n-th GPU, or one GPU if
        there are fewer GPUs than tasks.
        """
        devices = [] if self._share_gpu else gpus()
        if not devices:
            return {}
        rank = self.tasks.index(task) if task in self.tasks else len(self.tasks)
        mine = devices[rank :: len(self.tasks)] or [devices[rank % len(devices)]]
        return {CUDA: ",".join(mine)}


def checked_cluster(cluster: Any) -> ClusterSpec:
    """Return the cluster as a ClusterSpec. Raises ValueError if it has no task or several chiefs,
    and TypeError if it is not a cluster."""
    if not isinstance(cluster, Mapping | ClusterSpec | ClusterDef):
        raise TypeError(
            f"cluster_spec is a dict of jobs, as create_cluster_spec returns it, not {cluster!r}"
        )
    spec = ClusterSpec(cluster)
    if not tasks_of(spec):
        raise ValueError("cluster_spec has no tasks: there is nothing to run")
    if "chief" in spec.jobs and spec.num_tasks("chief") > 1:
        raise ValueError(
            f"cluster_spec has {spec.num_tasks('chief')} chiefs; a cluster has at most one"
        )
    return spec


def tasks_of(spec: ClusterSpec) -> list[Task]:
    """Return all tasks of a cluster, the chief first."""
    jobs = sorted(spec.jobs, key=lambda job: job != "chief")
    return [(job, index) for job in jobs for index in spec.task_indices(job)]


def _outcome(word: str, payloads: Parts) -> PoolOutcome:
    if isinstance(payloads, OpError):
        return PoolOutcome(error=payloads)
    try:
        if word == "raised":
            return PoolOutcome(error=trusted.unpack_error(payloads[0]))
        return PoolOutcome(trusted.unpack_parts(payloads))
    except BaseException as error:
        # unpickling runs code of users' classes, which may raise any error
        return PoolOutcome(error=error)


def stream_line(line: str) -> None:
    """Write a line to standard output."""
    with contextlib.suppress(ValueError, OSError):
        # leave out the line if standard output is closed
        sys.stdout.write(line)
        sys.stdout.flush()
