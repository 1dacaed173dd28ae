"""Fixtures of this folder: a dispatcher with round numbers for its settings, and registered
workers."""

from __future__ import annotations

import pytest

from tests.machines.dispatched import BACK_S, CUT_S, LEASE_S
from tests.machines.worked import ready
from zmqdist.scheduling.dispatcher.broker import Broker
from zmqdist.scheduling.shared.broker_settings import BrokerSettings
from zmqdist.scheduling.worker.machine import WorkerMachine


@pytest.fixture
def broker() -> Broker:
    settings = BrokerSettings(
        lease_s=LEASE_S, reconnect_grace_s=BACK_S, cancel_grace_s=CUT_S, attempts_max=3
    )
    return Broker(settings)


@pytest.fixture
def worker() -> WorkerMachine:
    """A registered worker with one process slot."""
    return ready()


@pytest.fixture
def threads() -> WorkerMachine:
    """A registered worker with one thread slot."""
    return ready(threads=True)
