"""`zd.progress`: lines in a file, a bar on a terminal; errors are counted and stay unseen."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator

import pytest

import zmqdist as zd

pytestmark = pytest.mark.shares_cluster


def inverse(number: int) -> float:
    return 1 / number


@pytest.fixture(scope="module")
def coordinator() -> Iterator[zd.ClusterCoordinator]:
    with zd.local_cluster(workers=1, processes=False) as cluster, cluster.coordinator() as made:
        yield made


def test_plain_output_ends_with_counts(coordinator: zd.ClusterCoordinator) -> None:
    values = coordinator.map(inverse, [4, 3, 2, 1, 0])
    log = io.StringIO()
    shown = list(zd.progress(values, label="inv\x1b[1m", file=log))
    assert set(shown) == set(values)
    assert log.getvalue().startswith("inv?[1m: 5 of 5, 1 failed, ")
    assert log.getvalue().count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        coordinator.join()


def test_counted_error_is_raised_by_join(coordinator: zd.ClusterCoordinator) -> None:
    for _ in zd.progress([coordinator.submit(inverse, 0)], file=io.StringIO()):
        pass
    with pytest.raises(ZeroDivisionError):
        coordinator.join()


def test_values_that_loop_adds_are_counted(coordinator: zd.ClusterCoordinator) -> None:
    search, log = coordinator.as_completed([coordinator.submit(abs, -3)]), io.StringIO()
    for value in zd.progress(search, file=log):
        if value.result() > 1:
            search.add(coordinator.submit(abs, value.result() - 1))
    assert log.getvalue().startswith("3 of 3, ")


def test_left_loop_writes_its_counts(coordinator: zd.ClusterCoordinator) -> None:
    log = io.StringIO()
    watched = zd.progress(coordinator.map(abs, range(3)), file=log)
    next(watched)
    watched.close()  # type: ignore[attr-defined]
    assert log.getvalue().startswith("1 of 3, ")


def test_terminal_has_a_bar_without_markup(coordinator: zd.ClusterCoordinator) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        for value in zd.progress(coordinator.map(abs, [-1]), label="[red]a", file=terminal):
            value.result()
        terminal.flush()
        screen = ""
        while "1 of 1" not in screen:  # the kernel hands it over in pieces
            screen += os.read(ours, 65536).decode(errors="replace")
    os.close(ours)
    assert "[red]a" in screen


def test_wrong_values_fail_at_once(coordinator: zd.ClusterCoordinator) -> None:
    with pytest.raises(TypeError, match="as_completed wants RemoteValues"):
        zd.progress([1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="give it to as_completed"):
        zd.progress(coordinator.as_completed([]), timeout=1)
