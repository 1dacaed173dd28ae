"""Saving with workers whose pipelines run in processes: what a crash costs, and what ends with
what."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import until
from tests.zygote import slots_zygote
from zmqdist.data.dataset import Dataset
from zmqdist.data.service.snapshots.distributed_save import distributed_save
from zmqdist.errors import CancelledError, UnknownError
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.servers.worker_server import WorkerServer
from zmqdist.specs import TensorSpec
from zmqdist.transport.memory_limits import is_alive

WAIT_S = 30.0


@contextlib.contextmanager
def saving(tmp_path: Path, workers: int) -> Iterator[tuple[str, list[WorkerServer]]]:
    config = DispatcherConfig(work_dir=str(tmp_path / "dispatcher"), fault_tolerant_mode=True)
    with DispatchServer(config) as dispatcher, contextlib.ExitStack() as stack:
        told = WorkerConfig(dispatcher.address, processes=True)
        yield (
            dispatcher.address,
            [
                stack.enter_context(WorkerServer(told, zygote=slots_zygote()))
                for _ in range(workers)
            ],
        )


def loaded(path: Path) -> list[int]:
    return sorted(int(x) for x in Dataset.load(str(path)))


INTS: Any = {"output_signature": TensorSpec((), np.int64)}
"""The spec is not found by calling the function, here."""


def progresses(workers: list[WorkerServer]) -> list[Any]:
    return [each for worker in workers for each in worker.data_snapshot().streams]


def note_pid(folder: Path) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        (folder / str(os.getpid())).touch()
        return x

    return step


def test_stream_has_process_of_its_own(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with saving(tmp_path, 2) as (address, workers):
        path = tmp_path / "saved"
        distributed_save(Dataset.range(1000).map(note_pid(pids), **INTS), str(path), address).wait(
            WAIT_S
        )
        assert loaded(path) == list(range(1000))
        assert str(os.getpid()) not in os.listdir(pids)
        until(
            lambda: not any(is_alive(int(pid)) for pid in os.listdir(pids)),
            "the end of the processes",
        )
        until(
            lambda: sum(each.elements for each in progresses(workers)) == 1000,
            "what the workers have done",
        )
        assert all(each.completed for each in progresses(workers))


def test_single_crash_costs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "crashed"

    def step(x: Any) -> Any:
        if int(x) == 500 and not mark.exists():
            mark.touch()
            ctypes.string_at(0)
        return x

    with saving(tmp_path, 1) as (address, _):
        path = tmp_path / "saved"
        distributed_save(Dataset.range(1000).map(step, **INTS), str(path), address).wait(WAIT_S)
        assert mark.exists()
        assert loaded(path) == list(range(1000))


def test_repeated_crash_fails_snapshot(
    tmp_path: Path,
) -> None:
    def step(x: Any) -> Any:
        if int(x) == 500:
            ctypes.string_at(0)
        return x

    with saving(tmp_path, 1) as (address, _):
        saved = distributed_save(
            Dataset.range(1000).map(step, **INTS), str(tmp_path / "bad"), address
        )
        with pytest.raises(
            UnknownError, match=r"crash number 3[^$]*stream 0[^$]*SIGSEGV[^$]*Segmentation fault"
        ):
            saved.wait(WAIT_S)
        distributed_save(Dataset.range(10), str(tmp_path / "good"), address).wait(WAIT_S)
        assert loaded(tmp_path / "good") == list(range(10))


def test_exiting_pipeline_fails_snapshot(tmp_path: Path) -> None:
    with saving(tmp_path, 1) as (address, _):
        saved = distributed_save(
            Dataset.range(10).map(lambda x: sys.exit(3), **INTS), str(tmp_path / "bad"), address
        )
        with pytest.raises(UnknownError, match="SystemExit"):
            saved.wait(WAIT_S)


def test_cancelled_save_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqdist.data.service.snapshots.stream.END_S", 0.1)
    pids = tmp_path / "pids"
    pids.mkdir()

    def stuck(x: Any) -> Any:
        time.sleep(1000)
        return x

    with saving(tmp_path, 1) as (address, _):
        saved = distributed_save(
            Dataset.range(10).map(note_pid(pids), **INTS).map(stuck, **INTS),
            str(tmp_path / "saved"),
            address,
        )
        (pid,) = until(lambda: os.listdir(pids), "the process")
        saved.cancel()
        with pytest.raises(CancelledError):
            saved.wait(WAIT_S)
        until(lambda: not is_alive(int(pid)), "its end")


def test_leaving_worker_hands_stream_on(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def step(x: Any) -> Any:
        while int(x) >= 100 and not go.exists():
            time.sleep(0.01)
        return x

    with saving(tmp_path, 1) as (address, workers):
        path = tmp_path / "saved"
        saved = distributed_save(Dataset.range(200).map(step, **INTS), str(path), address)
        until(lambda: saved.progress()["handed_out"] >= 100, "a hundred elements")
        with WorkerServer(WorkerConfig(address, processes=True), zygote=slots_zygote()):
            go.touch()
            workers[0].stop(grace_s=WAIT_S)
            saved.wait(WAIT_S)
        assert loaded(path) == list(range(200))
