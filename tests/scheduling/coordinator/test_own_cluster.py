"""A scheduled function finds the cluster that runs it, without an address or a secret."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from fractions import Fraction

import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator


def doubled(number: int) -> int:
    with ClusterCoordinator() as inner:
        return inner.submit(int.__mul__, number, 2).result()


def same_in_slot() -> tuple[bool, bool]:
    first = ClusterCoordinator()
    cells = [first]
    thread = threading.Thread(target=lambda: cells.append(ClusterCoordinator()))
    thread.start()
    thread.join()
    return ClusterCoordinator() is first, cells[1] is first


def used_after_inner_block() -> int:
    with ClusterCoordinator() as outer:
        with ClusterCoordinator() as inner:
            inner.submit(abs, -1).result()
        return outer.submit(abs, -2).result()


def names_of_workers() -> list[str]:
    with zd.connect() as cluster:
        return sorted(row["name"] for row in cluster.status()["workers"])


def class_of_inner_fraction() -> str:
    with ClusterCoordinator() as inner:
        value = inner.submit(Fraction, 1, 2)
        return type(value.exception() or value.result()).__name__


@pytest.fixture
def threads() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2, processes=False) as cluster:
        yield cluster


def test_function_in_thread_slot_finds_its_cluster(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads) as coordinator:
        assert coordinator.submit(doubled, 4).result() == 8


def test_connect_in_function_finds_its_cluster(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads) as coordinator:
        assert coordinator.submit(names_of_workers).result() == ["worker:0", "worker:1"]


@pytest.mark.parametrize(("form", "name"), [("any", "Fraction"), ("safe", "InvalidArgumentError")])
def test_inner_results_have_form_of_outer_ones(
    threads: zd.local_cluster, form: str, name: str
) -> None:
    with ClusterCoordinator(threads, results=form) as coordinator:
        assert coordinator.submit(class_of_inner_fraction).result() == name


def test_inner_with_statement_does_not_close_outer(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads) as coordinator:
        assert coordinator.submit(used_after_inner_block).result() == 2


@pytest.mark.processes("scheduling")
def test_slot_process_has_one_coordinator() -> None:
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        assert coordinator.submit(same_in_slot).result() == (True, True)
        assert coordinator.submit(doubled, 4).result() == 8
