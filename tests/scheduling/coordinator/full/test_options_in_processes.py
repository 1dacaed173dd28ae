"""Inputs, options and kept values where slots are processes."""

from __future__ import annotations

import pytest

from tests.scheduling.coordinator import test_inputs, test_kept_values, test_options
from tests.scheduling.coordinator.helpers import select_tests
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(90)

for _module in (test_inputs, test_kept_values, test_options):
    globals().update(select_tests(_module, "coordinator"))


@pytest.fixture
def coordinator(in_processes: ClusterCoordinator) -> ClusterCoordinator:
    return in_processes
