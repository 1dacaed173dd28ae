"""Fixtures of this folder: a broker with round numbers for its settings."""

from __future__ import annotations

import pytest

from tests.scheduling.dispatcher.helpers import BACK_S, CUT_S, LEASE_S
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.shared.broker_settings import BrokerSettings


@pytest.fixture
def broker() -> Broker:
    settings = BrokerSettings(
        lease_s=LEASE_S, reconnect_grace_s=BACK_S, cancel_grace_s=CUT_S, attempts_max=3
    )
    return Broker(settings)
