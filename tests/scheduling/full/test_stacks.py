"""`zmqdist stack`: the stacks of slots and actors that hang, and what it says of those that cannot
answer."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.cli.helpers import run_here
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.connection import DispatcherClient
from zmqdist.scheduling.dispatcher import questions

LONG_S = 600


def hang_in_c(flag: Path) -> None:
    """Hold the GIL until the process is killed."""
    flag.touch()
    while True:
        ctypes.PyDLL(None).sleep(LONG_S)


def spin(flag: Path) -> None:
    flag.touch()
    while True:
        pass


def dead_lock(flag: Path) -> None:
    flag.touch()
    lock = threading.Lock()
    with lock, lock:
        pass


def wait_for_thread(flag: Path) -> None:
    thread = threading.Thread(target=dead_lock, args=(flag,), daemon=True)
    thread.start()
    thread.join()


def execute_another_program(flag: Path) -> None:
    os.execlp("sh", "sh", "-c", f"touch {flag}; exec sleep {LONG_S}")


def close_all_files(flag: Path) -> None:
    os.dup2(os.open(flag, os.O_WRONLY | os.O_CREAT), 2)
    os.closerange(3, 1000)
    time.sleep(LONG_S)


class Sleeper:
    def rest(self, flag: Path) -> None:
        flag.touch()
        time.sleep(LONG_S)


@pytest.fixture
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=1) as made:
        made.status()  # makes its connection
        yield made


@pytest.fixture
def coordinator(cluster: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with cluster.coordinator() as made:
        yield made
        cluster.kill_worker(0)  # its functions never end


def stacks(cluster: zd.local_cluster, worker: str = "worker:0") -> dict[str, str]:
    address = cluster.target.removeprefix("zmq://")
    with DispatcherClient(address, cluster.credentials, "client", 20.0) as dispatcher:
        answer: dict[str, str] = dispatcher.call("stack", worker)
    return answer


def slot_text(cluster: zd.local_cluster) -> str:
    return next(text for name, text in stacks(cluster).items() if name.startswith("slot 0, pid "))


@pytest.mark.parametrize("function", [hang_in_c, spin, dead_lock])
def test_stack_shows_where_a_slot_hangs(
    function: Callable[[Path], None],
    cluster: zd.local_cluster,
    coordinator: ClusterCoordinator,
    tmp_path: Path,
) -> None:
    flag = tmp_path / "begun"
    coordinator.submit(function, flag)
    until(flag.exists)
    until(lambda: slot_text(cluster).endswith(f", in {function.__name__}"))
    assert slot_text(cluster).startswith(f'  File "{__file__}", line ')


def test_stack_shows_the_threads_of_a_function(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    coordinator.submit(wait_for_thread, tmp_path / "begun")
    until((tmp_path / "begun").exists)
    until(lambda: slot_text(cluster).endswith(", in dead_lock"))
    main, _, _ = slot_text(cluster).partition("\n  another thread:\n")
    assert ", in wait_for_thread\n" in main


def test_stack_shows_an_actor_and_an_idle_slot(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    actor = coordinator.actor(Sleeper)
    actor.rest(tmp_path / "begun")
    until((tmp_path / "begun").exists)
    until(lambda: stacks(cluster).popitem()[1].endswith(", in rest"))
    (slot, idle), (name, _) = stacks(cluster).items()
    assert (slot.partition(",")[0], idle) == ("slot 0", "  waits for work")
    assert name.startswith("actor Sleeper, pid ")


def test_killed_slot_is_replaced_in_the_stacks(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    pid = coordinator.submit(os.getpid).result()
    os.kill(pid, signal.SIGKILL)
    until(
        lambda: [
            f"{name}:{text}"
            for name, text in stacks(cluster).items()
            if name != f"slot 0, pid {pid}" and text == "  waits for work"
        ]
    )


@pytest.mark.parametrize("function", [execute_another_program, close_all_files])
def test_process_without_stacks_gets_no_signal(
    function: Callable[[Path], None],
    cluster: zd.local_cluster,
    coordinator: ClusterCoordinator,
    tmp_path: Path,
) -> None:
    value = coordinator.submit(function, tmp_path / "begun")
    until((tmp_path / "begun").exists)
    until(lambda: "does not show its stacks" in slot_text(cluster))
    assert not value.done()
    assert (tmp_path / "begun").read_bytes() == b""


def test_suspended_slot_is_named(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    pid = coordinator.submit(os.getpid).result()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert "state T (stopped)" in slot_text(cluster)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_suspended_worker_fails_the_question(
    cluster: zd.local_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.5)
    os.kill(cluster.pids["worker:0"], signal.SIGSTOP)
    with pytest.raises(errors.UnavailableError, match="worker:0 has not answered"):
        stacks(cluster)
    os.kill(cluster.pids["worker:0"], signal.SIGCONT)


def test_killed_worker_fails_the_question(cluster: zd.local_cluster) -> None:
    os.kill(cluster.pids["worker:0"], signal.SIGSTOP)
    timer = threading.Timer(0.2, cluster.kill_worker, [0])
    timer.start()
    with pytest.raises(errors.UnavailableError, match="worker:0 was lost before it answered"):
        stacks(cluster)
    timer.join()


def test_unknown_worker_is_named(cluster: zd.local_cluster) -> None:
    text = "no worker worker:7 is registered here; the registered workers are: worker:0"
    with pytest.raises(errors.NotFoundError, match=text):
        stacks(cluster, "worker:7")


def test_command_prints_stacks_as_text(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    code = compile("def trap(flag):\n flag.touch()\n while True: pass", "\x1b[2J.py", "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    coordinator.submit(space["trap"], tmp_path / "begun")
    until((tmp_path / "begun").exists)
    shown = run_here(
        "stack", cluster.target, "worker:0", "--token-file", str(cluster.credentials.token_file)
    )
    assert '  File "\\x1b[2J.py", line ' in shown.out
