"""What the records of work items hold on to, and for how long."""

from __future__ import annotations

import gc
import weakref
from operator import concat
from pathlib import Path

from tests.scheduling.work import begun, go, until, waits
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator.remote_value import work_of
from zmqdist.scheduling.coordinator.work import Extra


def test_abandoned_as_completed_keeps_no_pending_value(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    pending = in_threads.submit(waits, tmp_path)
    until(lambda: begun(tmp_path))
    search = in_threads.as_completed([in_threads.submit(abs, -1), pending])
    assert next(search).result() == 1
    alive = weakref.ref(pending)
    del pending, search
    gc.collect()
    assert alive() is None
    go(tmp_path)


def test_kept_value_holds_no_arguments(in_threads: ClusterCoordinator) -> None:
    value = in_threads.options(keep=True).submit(concat, bytes(60_000), bytes(60_000))
    assert value.exception(20) is None
    until(lambda: work_of(value).payload == b"")


def test_ended_value_has_no_rare_fields(in_threads: ClusterCoordinator) -> None:
    value = in_threads.options(priority=1, timeout=60.0).submit(abs, -1)
    assert value.result(20) == 1
    until(lambda: work_of(value).extra is None)


def test_dropped_value_leaves_no_outcome_in_record(in_threads: ClusterCoordinator) -> None:
    value = in_threads.options(timeout=60.0).submit(bytes, 1000)
    assert value.exception(20) is None
    work = work_of(value)
    del value
    gc.collect()
    assert work.outcome is None


def test_empty_containers_of_rare_fields_are_shared() -> None:
    first, second = Extra(), Extra()
    for field in ("missing", "dependents", "used", "input_values", "packed_inputs", "bulks"):
        assert getattr(first, field) is getattr(second, field)
        assert not getattr(first, field)
