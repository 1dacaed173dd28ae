"""Programs that find servers which are processes: what test_cluster_connection.py shows with
threads, once more."""

from __future__ import annotations

import pytest

from tests.training.test_cluster_connection import (
    test_a_program_at_the_address_of_one_that_has_died_takes_over_what_came_by_itself,
    test_a_program_that_closes_leaves_the_servers_to_the_next,
    test_another_program_is_told_who_is_here_and_comes_when_that_one_has_died,
    test_shutdown_cluster_ends_all_servers,
)

__all__ = [
    "test_another_program_is_told_who_is_here_and_comes_when_that_one_has_died",
    "test_a_program_at_the_address_of_one_that_has_died_takes_over_what_came_by_itself",
    "test_a_program_that_closes_leaves_the_servers_to_the_next",
    "test_shutdown_cluster_ends_all_servers",
]


@pytest.fixture
def in_threads() -> bool:
    return False
