"""Programs that find servers which are processes: what test_cluster_connection.py shows with
threads, once more."""

from __future__ import annotations

import pytest

from tests.training.test_cluster_connection import (
    test_closed_program_frees_the_servers,
    test_program_at_old_address_takes_over,
    test_second_program_is_refused_until_first_dies,
    test_shutdown_cluster_stops_servers,
)

__all__ = [
    "test_second_program_is_refused_until_first_dies",
    "test_program_at_old_address_takes_over",
    "test_closed_program_frees_the_servers",
    "test_shutdown_cluster_stops_servers",
]


@pytest.fixture
def in_threads() -> bool:
    return False
