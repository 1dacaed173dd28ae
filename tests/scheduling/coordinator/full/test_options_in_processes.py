"""Inputs, options and kept values where slots are processes."""

from __future__ import annotations

import pytest

from tests.scheduling.coordinator import test_inputs, test_kept, test_options
from tests.scheduling.coordinator.again import again
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(90)

for _module in (test_inputs, test_kept, test_options):
    globals().update(again(_module, "coordinator"))


@pytest.fixture
def coordinator(in_processes: ClusterCoordinator) -> ClusterCoordinator:
    return in_processes
