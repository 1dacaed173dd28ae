"""Fixtures of this folder: dispatchers and workers as processes that a test may kill, stop and
start again."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.children import Child, Children
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport import shm_pool

DISPATCHER = """
import json, sys
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.launch.roles import run_dispatcher
sys.exit(run_dispatcher(DispatcherConfig(**json.loads(sys.argv[1])), announce=lambda line: print(line, flush=True)))
"""


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Child]]:
    """Return `start_worker(address, **config)`, which starts a worker process without a launcher.
    It ends with the test."""
    children = Children(lambda child: None)

    def start(address: str, on_line: Callable[[str], object] | None = None, **config: Any) -> Child:
        options = {"processes": True, **config}
        return children.start_role(WorkerConfig(address, **options), os.environ, on_line)

    yield start
    for child in children.running:
        child.signal(signal.SIGCONT)
    children.close(2.0)


@pytest.fixture
def start_dispatcher() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return `start_dispatcher(**config)`, which starts a dispatcher process and waits until it
    listens. It is killed with the test."""
    made: list[subprocess.Popen[str]] = []

    def start(**config: Any) -> subprocess.Popen[str]:
        fields = json.dumps(dataclasses.asdict(DispatcherConfig(**config)))
        process = subprocess.Popen(
            [sys.executable, "-c", DISPATCHER, fields], stdout=subprocess.PIPE, text=True
        )
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("dispatcher at zmq://127.0.0.1:")
        return process

    yield start
    for process in made:
        process.kill()
        process.communicate()


@pytest.fixture
def dispatcher() -> Iterator[zd.DispatchServer]:
    with zd.DispatchServer() as made:
        yield made


@pytest.fixture
def coordinator(dispatcher: zd.DispatchServer) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(dispatcher, cluster_lost_limit_s=30.0, cancel_grace_s=0.2) as made:
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    """Two workers with two slot processes each; a test may lose slots, and no worker."""
    with zd.local_cluster(workers=2, slots=2) as made:
        yield made


@pytest.fixture
def no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes share no memory, so that large values travel over connections."""
    monkeypatch.setenv(shm_pool.POOL_VARIABLE, "off")
    monkeypatch.setattr(shm_pool, "_pool", None)
    monkeypatch.setattr(shm_pool, "_tried", False)
