"""Fixtures of this folder: machines of registered workers."""

from __future__ import annotations

import pytest

from tests.scheduling.worker.worked import ready
from zmqdist.scheduling.worker.machine import WorkerMachine


@pytest.fixture
def worker() -> WorkerMachine:
    """A registered worker with one process slot."""
    return ready()


@pytest.fixture
def threads() -> WorkerMachine:
    """A registered worker with one thread slot."""
    return ready(threads=True)
