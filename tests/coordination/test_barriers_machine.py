"""Barriers: the bound of their table, and sizes. The scenarios are in transcripts/."""

from __future__ import annotations

import pytest

from tests.coordination.helpers import Call, Cluster, worker
from zmqdist.coordination.barriers_machine import Barriers
from zmqdist.errors import OK, RESOURCE_EXHAUSTED
from zmqdist.limits import BARRIERS_MAX

A, B = worker(0), worker(1)


def test_longest_unused_name_is_forgotten() -> None:
    barriers = Barriers(names_max=2)
    both = frozenset((A, B))
    assert barriers.arrived(Call(), "waited at", 0, A, both) == []
    for number in range(5):
        barriers.arrived(Call(), f"passed {number}", 3, A, frozenset((A,)))
    barriers.arrived(Call(), "second", 0, A, both)
    [refusal] = barriers.arrived(Call(), "third", 0, A, both)
    assert refusal.code == RESOURCE_EXHAUSTED  # type: ignore[union-attr]
    assert len(barriers.arrived(Call(), "waited at", 0, B, both)) == 2


def test_full_table_refuses_wait_for_all() -> None:
    cluster = Cluster.of_workers(2)
    for number in range(BARRIERS_MAX):
        cluster.barrier(A, name=f"b{number}")
    refusal = cluster.wait_for_all(A)
    assert refusal.code == RESOURCE_EXHAUSTED


@pytest.mark.parametrize("count", [1, 2, 64])
def test_barrier_of_any_size_passes(count: int) -> None:
    cluster = Cluster.of_workers(count)
    calls = [cluster.barrier(worker(index)) for index in range(count)]
    assert {call.code for call in calls} == {OK}
