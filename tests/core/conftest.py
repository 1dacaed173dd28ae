"""A dispatcher with rules that are easy to reckon with."""

from __future__ import annotations

import pytest

from tests.core.dispatched import BACK_S, CUT_S, LEASE_S
from zmqdist.core.dispatch.broker import Broker, BrokerRules


@pytest.fixture
def broker() -> Broker:
    rules = BrokerRules(lease_s=LEASE_S, reconnect_grace_s=BACK_S, cancel_grace_s=CUT_S, attempts_max=3)
    return Broker(rules)
