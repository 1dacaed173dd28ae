"""Section 7 of the contract, MultiProcessPoolRunner, by the names of TensorFlow's tests."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.helpers import eventually
from tests.testing.helpers import ends, for_ever, me
from zmqdist import errors
from zmqdist.testing import (
    MultiProcessPoolRunner,
    SubprocessTimeoutError,
    UnexpectedSubprocessExitError,
    create_cluster_spec,
    get_barrier,
)
from zmqdist.testing.runner.barrier import TaskPipe
from zmqdist.testing.runner.process_pool import PoolWork
from zmqdist.transport import pipe

MIB = 2**20


@pytest.fixture
def pool() -> Iterator[MultiProcessPoolRunner]:
    with MultiProcessPoolRunner({"worker": ["localhost:1", "localhost:2"]}) as pool:
        yield pool


def test_process_stays_across_runs(pool: MultiProcessPoolRunner) -> None:
    pids = pool.run(os.getpid)
    assert len(set(pids)) == 2
    for _ in range(3):
        assert pool.run(os.getpid) == pids


def test_exceptions_in_sub_process(pool: MultiProcessPoolRunner) -> None:
    def fail() -> None:
        raise ValueError("This is an error.")

    pids = pool.run(os.getpid)
    with pytest.raises(ValueError, match="This is an error"):
        pool.run(fail)
    assert pool.run(os.getpid) == pids


def test_tf_config() -> None:
    cluster = create_cluster_spec(has_chief=True, num_workers=2)

    def task() -> tuple[Any, Any]:
        config = json.loads(os.environ["TF_CONFIG"])
        return config["task"], config["cluster"]

    with MultiProcessPoolRunner(cluster) as pool:
        message = pool.run(task)
    assert message == [
        ({"type": job, "index": index}, cluster)
        for job, index in [("chief", 0), ("worker", 0), ("worker", 1)]
    ]


def test_unexpected_exit(pool: MultiProcessPoolRunner) -> None:
    """And the pool can be used again, with new processes."""

    def leave() -> None:
        if me() == "worker-1":
            print("last words")
            sys.exit(3)
        for_ever()

    pids = pool.run(os.getpid)
    with pytest.raises(
        UnexpectedSubprocessExitError, match=r"(?s)worker-1 exited with exit code 3.*last words"
    ):
        pool.run(leave)
    assert not set(pool.run(os.getpid)) & set(pids)


def test_process_dead_between_runs_is_reported(
    pool: MultiProcessPoolRunner,
) -> None:
    (pid, _) = pool.run(os.getpid)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UnexpectedSubprocessExitError, match="worker-0 exited with exit code -9"):
        pool.run(for_ever)


PARENT = """
from zmqdist.testing import MultiProcessPoolRunner
pool = MultiProcessPoolRunner({"worker": ["localhost:1", "localhost:2"]})
assert pool.run(lambda: 1) == [1, 1]
raise ValueError("in the main process")
"""


def test_exception_in_main_process() -> None:
    """A program that ends without shutdown ends, and so do its processes: the module's end finds
    orphans."""
    result = subprocess.run(
        [sys.executable, "-c", PARENT], stderr=subprocess.PIPE, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: in the main process\n")


def test_initializer() -> None:
    def initialize() -> None:
        sys.initialized = getattr(sys, "initialized", 0) + 1  # type: ignore[attr-defined]

    with MultiProcessPoolRunner(create_cluster_spec(num_workers=2), initializer=initialize) as pool:
        for _ in range(2):
            assert pool.run(lambda: sys.initialized) == [1, 1]  # type: ignore[attr-defined]


def test_failing_initializer_fails_run() -> None:
    def initialize() -> None:
        raise ValueError("not today")

    with MultiProcessPoolRunner(create_cluster_spec(), initializer=initialize) as pool:
        for _ in range(2):
            with pytest.raises(ValueError, match="not today"):
                pool.run(os.getpid)


_global_pool = MultiProcessPoolRunner({"worker": ["localhost:1", "localhost:2"]})


def test_global_pool() -> None:
    """One of a module starts nothing until it is used, and can be shut down and used again."""
    try:
        pids = _global_pool.run(os.getpid)
        assert len(pids) == 2
        _global_pool.shutdown()
        _global_pool.shutdown()
        assert not set(_global_pool.run(os.getpid)) & set(pids)
    finally:
        _global_pool.shutdown()


def test_nested_pool(pool: MultiProcessPoolRunner) -> None:
    """Each process has its own pool; those of a pool that was never shut down end with it."""

    def nested() -> int:
        inner = MultiProcessPoolRunner({"worker": ["localhost:1", "localhost:2"]})
        sys.kept = inner  # type: ignore[attr-defined]
        return len(set(inner.run(os.getpid)))

    assert pool.run(nested) == [2, 2]


def test_values_and_the_barrier_come_in_every_run(pool: MultiProcessPoolRunner) -> None:
    def meet(word: str, *, twice: bool) -> str | None:
        for _ in range(1 + twice):
            get_barrier().wait()
        return word if me() == "worker-1" else None

    assert pool.run(meet, ("a",), {"twice": True}) == ["a"]
    assert pool.run(meet, ("b",), {"twice": False}) == ["b"]


def test_barrier_knows_all_tasks_of_run(
    pool: MultiProcessPoolRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """worker-0 has asked at the barrier before worker-1 is sent its function: both come through."""
    assert len(pool.run(me)) == 2
    send = PoolWork.send
    count = itertools.count()

    def first_comes_to_the_barrier() -> str:
        barrier = get_barrier()
        if me() == "worker-0":
            with pytest.raises(errors.DeadlineExceededError, match="missing: worker-1"):
                barrier.wait(timeout=0.1)
            (tmp_path / "came").touch()
        return me()

    def sent(work: PoolWork, *args: Any, **kwargs: Any) -> None:
        if next(count) == 1:
            eventually((tmp_path / "came").exists, "worker-0 has come to the barrier")
        send(work, *args, **kwargs)

    monkeypatch.setattr(PoolWork, "send", sent)
    assert len(pool.run(first_comes_to_the_barrier)) == 2


def test_barrier_error_names_raising_task() -> None:
    def work() -> str | None:
        if me() == "worker-0":
            raise ValueError("first")
        with pytest.raises(errors.AbortedError):
            get_barrier().wait()
        return None

    with (
        MultiProcessPoolRunner(create_cluster_spec(num_workers=2)) as pool,
        pytest.raises(ValueError, match="first"),
    ):
        pool.run(work)


def test_overlong_run_writes_stacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with MultiProcessPoolRunner(create_cluster_spec()) as pool:
        pool.run(me)
        pool.task_timeout_s = 3.0  # now that it has started
        with pytest.raises(SubprocessTimeoutError, match="still running after 3 s: worker-0"):
            pool.run(for_ever)
        assert "in for_ever" in capsys.readouterr().out


def test_unreferenced_pool_ends_processes() -> None:
    pool = MultiProcessPoolRunner({"worker": ["localhost:1"]})
    (pid,) = pool.run(os.getpid)
    del pool
    ends(pid)


@pytest.mark.parametrize(
    ("cluster", "initializer", "error"),
    [
        ({"chief": ["localhost:1", "localhost:2"]}, None, ValueError),
        ({}, None, ValueError),
        (None, None, TypeError),
        ({"worker": ["localhost:1"]}, "initialize", ValueError),
    ],
)
def test_bad_pool_arguments_are_refused(
    cluster: Any, initializer: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        MultiProcessPoolRunner(cluster, initializer)


def test_early_work_is_run(pool: MultiProcessPoolRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = threading.Event(), PoolWork.send

    class Late(threading.Thread):
        def run(self) -> None:
            assert not self.name.startswith("zmqdist-line-") or sent.wait(30)
            super().run()

    def note(work: PoolWork, pipe: TaskPipe, last: bool) -> None:
        send(work, pipe, last)
        pipes.append(pipe)
        if len(pipes) == 2:
            sent.set()

    pipes: list[TaskPipe] = []
    monkeypatch.setattr(PoolWork, "send", note)
    monkeypatch.setattr(threading, "Thread", Late)
    assert pool.run(abs, (-3,)) == [3, 3]


@pytest.mark.timeout(60)
def test_argument_beyond_memory_of_task(
    pool: MultiProcessPoolRunner,
) -> None:
    def leave(spare_bytes: int) -> None:
        status = Path("/proc/self/status").read_text()
        virtual = next(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmSize")
        )
        if me() == "worker-1":
            resource.setrlimit(resource.RLIMIT_AS, (virtual + spare_bytes,) * 2)

    array = np.ones(96 * MIB, np.uint8)
    assert pool.run(np.sum, (array[:MIB],)) == [MIB, MIB]
    pids = pool.run(os.getpid)
    pool.run(leave, (32 * MIB,))
    with pytest.raises(
        errors.ResourceExhaustedError, match=r"a function with its arguments.*: 96 MiB"
    ):
        pool.run(np.sum, (array,))
    assert pool.run(np.sum, (array[:MIB],)) == [MIB, MIB]
    assert pool.run(os.getpid) == pids


@pytest.mark.timeout(60)
def test_value_beyond_memory_of_parent(
    pool: MultiProcessPoolRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small_only(size: Any = b"") -> bytearray:
        if isinstance(size, int) and size > MIB:
            raise MemoryError
        return bytearray(size)

    pids = pool.run(os.getpid)
    monkeypatch.setattr(pipe, "bytearray", small_only, raising=False)
    with pytest.raises(errors.ResourceExhaustedError, match="or its result: 8 MiB"):
        pool.run(np.zeros, (8 * MIB, np.uint8))
    assert [value.size for value in pool.run(np.zeros, (8, np.uint8))] == [8, 8]
    assert pool.run(os.getpid) == pids
