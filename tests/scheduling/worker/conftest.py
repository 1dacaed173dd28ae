"""Fixtures of this folder: the machine of a registered worker."""

from __future__ import annotations

import pytest

from tests.scheduling.worker.helpers import ready
from zmqdist.scheduling.worker.machine import WorkerMachine


@pytest.fixture
def worker() -> WorkerMachine:
    """A registered worker with one process slot."""
    return ready()
