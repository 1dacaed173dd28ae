"""Values with a lineage, or without one, whose worker is killed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.lineage_work import calls, made, replace
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(90)


def test_a_lost_value_is_made_again_for_get_and_for_functions_with_what_it_was_made_of(
    fragile: ClusterCoordinator, single: zd.local_cluster, tmp_path: Path
) -> None:
    first = fragile.schedule(made, (tmp_path, "first"), lineage=True)
    second = fragile.schedule(made, (tmp_path, "second", first), lineage=True)
    assert second.exception(20) is None
    replace(single)
    assert fragile.schedule(made, (tmp_path, "third", second)).fetch(30)[0] == 3
    assert (calls(tmp_path, "first"), calls(tmp_path, "second"), calls(tmp_path, "third")) == (
        2,
        2,
        1,
    )
    assert first.get(20)[0] == 1
    replace(single, 1)
    assert second.get(30)[0] == 2
    assert second.get() is second.get()
    assert (calls(tmp_path, "first"), calls(tmp_path, "second")) == (3, 3)
    fragile.join(20)


def test_without_a_lineage_a_lost_value_is_an_error_of_who_needs_it(
    fragile: ClusterCoordinator, single: zd.local_cluster, tmp_path: Path
) -> None:
    first = fragile.schedule(made, (tmp_path, "first"), keep=True)
    second = fragile.schedule(made, (tmp_path, "second", first), lineage=True)
    assert second.exception(20) is None
    replace(single)
    with pytest.raises(
        errors.UnavailableError, match=r"value of .*\.made was kept by the worker at .* and is lost"
    ):
        second.get(30)
    third = fragile.schedule(made, (tmp_path, "third", second))
    with pytest.raises(errors.ClosureInputError) as told:
        third.get(30)
    assert isinstance(told.value.original_exception, errors.UnavailableError)
    with pytest.raises(errors.ClosureInputError):
        fragile.join(20)
    fourth = fragile.schedule(made, (tmp_path, "fourth", first), retries=3)
    with pytest.raises(errors.UnavailableError):
        fourth.get(30)
    with pytest.raises(errors.UnavailableError):
        fragile.join(20)


def test_the_end_of_the_coordinator_ends_who_waits_for_a_lost_value(
    single: zd.local_cluster, tmp_path: Path
) -> None:
    coordinator = ClusterCoordinator(single)
    value = coordinator.schedule(made, (tmp_path, "value"), lineage=True)
    assert value.exception(20) is None
    single.kill_worker(0)
    told: list[BaseException] = []

    def asks() -> None:
        try:
            value.get(60)
        except Exception as error:
            told.append(error)

    asking = threading.Thread(target=asks)
    asking.start()
    until(lambda: coordinator.snapshot().kept == 0)
    coordinator.close()
    asking.join(20)
    assert isinstance(told[0], errors.UnavailableError)
