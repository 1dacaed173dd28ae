"""A reader behind a slow link gets the last elements, which are on their way long after the
dispatcher has dropped their task."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import serving
from tests.slow_link import MBIT, SlowLink
from zmqdist.data import Dataset
from zmqdist.data.service.reader import runtime as reader
from zmqdist.data.service.worker import task_process
from zmqdist.data.service.worker.task_process import END_S
from zmqdist.limits import TASK_PROCESSES_PER_CORE
from zmqdist.rpc.client import ZmqClient

BYTES = round(1.6 * END_S * MBIT)
"""What is on its way for longer than a process without tasks may stand still."""
SMALL = 400
"""Bytes of an element of which many travel in one reply."""


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The addresses that readers reach without a slow link between. No bytes bypass the links."""
    addresses: set[str] = set()
    with contextlib.ExitStack() as links:

        def connect(address: str, *args: Any, **options: Any) -> ZmqClient:
            if address not in addresses:
                address = links.enter_context(SlowLink(address)).address
            return ZmqClient(address, *args, **options)

        monkeypatch.setattr(reader, "ZmqClient", connect)
        for user in ("channel", "transfers", "shm_pool"):
            monkeypatch.setattr(f"zmqdist.transport.{user}.this_pool", lambda: None)
        yield addresses


def elements(size: int) -> Dataset:
    return Dataset.range(BYTES // size).map(lambda x: np.full(size, x, np.uint8))


def check(read: list[Any], size: int) -> None:
    assert sorted(int(x[0]) for x in read) == sorted(
        number % 256 for number in range(BYTES // size)
    )


@pytest.mark.parametrize("size", [BYTES, SMALL], ids=["one reply", "many small elements"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another task"])
def test_slow_reader_gets_last_elements_of_task(
    fast: set[str], monkeypatch: pytest.MonkeyPatch, size: int, beside: bool
) -> None:
    # tasks share a process
    monkeypatch.setattr(task_process, "cores", lambda: 1 / TASK_PROCESSES_PER_CORE)
    with serving() as service, contextlib.ExitStack() as others:
        fast.add(service.dispatcher.address)
        if beside:
            other = others.enter_context(iter(service.dealt(Dataset.range(1).repeat())))
            next(other)
        check(list(service.dealt(elements(size), compression=None)), size)


@pytest.mark.parametrize("options", [(), ("--threads",)], ids=["with processes", "with threads"])
def test_leaving_worker_sends_last_elements(fast: set[str], options: tuple[str, ...]) -> None:
    with serving() as service:  # another worker takes over what this one has not begun
        fast.add(service.dispatcher.address)
        command = [
            sys.executable,
            "-m",
            "zmqdist_cli",
            "worker",
            "--dispatcher",
            service.dispatcher.address,
        ]
        worker = subprocess.Popen(
            [*command, "--grace", "60", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert worker.stdout is not None
            assert "worker:1 of" in worker.stdout.readline()
            iterator = iter(service.dealt(elements(SMALL), compression=None))
            read = [next(iterator)]
            worker.send_signal(signal.SIGTERM)
            check([*read, *iterator], SMALL)
            assert worker.wait(30) == 0
        finally:
            worker.kill()
            worker.communicate()
