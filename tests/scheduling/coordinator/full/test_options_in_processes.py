"""Inputs, options and kept values where slots are processes."""

from __future__ import annotations

import pytest

from tests.scheduling.coordinator import test_inputs, test_kept_values, test_options
from tests.scheduling.coordinator.helpers import tests_with_fixture
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(90)

for _module in (test_inputs, test_kept_values, test_options):
    globals().update(tests_with_fixture(_module, "coordinator"))


@pytest.fixture
def coordinator(in_processes: ClusterCoordinator) -> ClusterCoordinator:
    return in_processes
