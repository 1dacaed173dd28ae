"""How functions fail and what becomes of the others: three workers, and the same with a queue of
two."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import stalled
from tests.scheduling.work import go, until, waits
from zmqdist import errors, limits
from zmqdist.coordinator import ClusterCoordinator, RemoteValueStatus

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=3, processes=False) as cluster:
        yield cluster


@pytest.fixture(params=[None, 2], ids=["", "queue of 2"])
def coordinator(
    request: pytest.FixtureRequest, cluster: zd.local_cluster
) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(cluster, queue_max=request.param, cancel_grace_s=0.2) as coordinator:
        yield coordinator


def good() -> int:
    return 1


def bad(number: int = 0) -> None:
    raise errors.InvalidArgumentError(None, None, f"assertion {number} failed")


class Loses(Exception):
    """Cannot be pickled: it holds a lock."""

    def __init__(self) -> None:
        super().__init__("no more locks")
        self.lock = threading.Lock()


class Slotted(Exception):
    """Takes no attribute that it does not know."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):
            raise AttributeError(name)
        super().__setattr__(name, value)


def raises(error: type[BaseException], *args: Any) -> None:
    raise error(*args)


# -- the round -------------------------------------------------------------------------------------


def test_error_raised_by_get_is_not_raised_by_schedule(
    coordinator: ClusterCoordinator,
) -> None:
    failing = coordinator.schedule(bad)
    with pytest.raises(errors.InvalidArgumentError):
        failing.get(20)
    assert [coordinator.schedule(good).get(20) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(errors.InvalidArgumentError):  # as TensorFlow's
        coordinator.join(20)
    coordinator.join(0)


def test_schedule_raises_unseen_error(
    coordinator: ClusterCoordinator,
) -> None:
    first = coordinator.schedule(bad, (1,))
    assert str(first.exception(20)) == "assertion 1 failed"
    second = coordinator.schedule(bad, (2,))
    until(second.done)
    with pytest.raises(errors.InvalidArgumentError, match="assertion 2 failed") as caught:
        coordinator.schedule(good)
    assert [str(error) for error in caught.value.failures] == [
        "assertion 1 failed",
        "assertion 2 failed",
    ]
    assert coordinator.schedule(good).get(20) == 1


def test_unseen_errors_are_logged_at_close(
    cluster: zd.local_cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with ClusterCoordinator(cluster) as coordinator:
        assert coordinator.schedule(bad, (1,)).exception(20) is not None
        until(coordinator.schedule(bad, (2,)).done)
    messages = [
        record.message for record in caplog.records if "has not looked at" in record.message
    ]
    text = "the program has not looked at 1 error of scheduled functions: call join() before the end, or result() of each "
    assert messages == [
        f"{text}value. The first: {__name__}.bad: InvalidArgumentError: assertion 2 failed"
    ]


def test_unseen_error_beyond_limit_is_logged_without_text(
    cluster: zd.local_cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FAILURES_KEPT", 1)
    with ClusterCoordinator(cluster) as coordinator:
        assert coordinator.schedule(bad, (1,)).exception(20) is not None
        until(coordinator.schedule(bad, (2,)).done)
    (message,) = [
        record.message for record in caplog.records if "has not looked at" in record.message
    ]
    assert message.endswith(
        "1 error of scheduled functions: call join() before the end, or result() of each value."
    )


def test_errors_raised_by_join_are_not_logged_at_close(
    cluster: zd.local_cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with ClusterCoordinator(cluster) as coordinator:
        coordinator.schedule(bad)
        with pytest.raises(errors.InvalidArgumentError):
            coordinator.join(20)
    assert "has not looked at" not in caplog.text


def test_input_error(coordinator: ClusterCoordinator) -> None:
    resource = coordinator.schedule(bad)
    with pytest.raises(errors.InvalidArgumentError):
        coordinator.join(20)
    value = coordinator.schedule(len, (resource,))
    with pytest.raises(errors.ClosureInputError):
        coordinator.join(20)
    with pytest.raises(errors.ClosureInputError, match=r"Input has an error.*assertion 0 failed"):
        value.fetch()


def test_raised_error_has_failures_of_its_round_only(
    coordinator: ClusterCoordinator,
) -> None:
    until(coordinator.schedule(bad, (1,)).done)
    with pytest.raises(errors.InvalidArgumentError, match="assertion 1 failed") as caught:
        coordinator.schedule(bad, (2,))
    assert [str(error) for error in caught.value.failures] == ["assertion 1 failed"]
    assert not coordinator.snapshot().failed
    coordinator.join(0)
    assert coordinator.schedule(bad, (3,)).exception(20) is not None
    with pytest.raises(errors.InvalidArgumentError, match="assertion 3 failed") as caught:
        coordinator.join(20)
    assert [str(error) for error in caught.value.failures] == ["assertion 3 failed"]


def test_raised_error_has_earlier_failures(
    cluster: zd.local_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ClusterCoordinator(cluster) as coordinator:
        with stalled(coordinator, monkeypatch):
            # what has failed already would be raised by the next `schedule`
            values = [coordinator.schedule(bad, (number,)) for number in range(3)]
            values.append(coordinator.schedule(len, (values[0],)))
        for value in values:
            assert value.exception(20) is not None
        with pytest.raises(errors.InvalidArgumentError) as caught:
            coordinator.join(20)
        failures = caught.value.failures  # type: ignore[attr-defined]
        own = sorted(
            str(error) for error in failures if not isinstance(error, errors.ClosureInputError)
        )
        assert own == [f"assertion {n} failed" for n in range(3)]
        assert len(failures) == 4
        assert str(failures[0]) == str(caught.value)
        assert sum(isinstance(error, errors.ClosureInputError) for error in failures) == 1
        assert list(map(str, coordinator.failures)) == list(map(str, failures))
        assert len(pickle.loads(pickle.dumps(caught.value)).failures) == 4


def test_failures_of_slotted_error_are_on_coordinator(
    coordinator: ClusterCoordinator,
) -> None:
    """The error itself takes no attribute `failures`."""
    assert coordinator.failures == []
    coordinator.schedule(raises, (Slotted, "x"))
    with pytest.raises(Slotted) as caught:
        coordinator.join(20)
    assert not hasattr(caught.value, "failures")
    assert [type(error) for error in coordinator.failures] == [Slotted]


@pytest.mark.parametrize(
    ("error", "args", "kind", "message"),
    [
        (StopIteration, (3,), errors.OutOfRangeError, "StopIteration: 3"),
        (Loses, (), Loses, "no more locks"),
        (SystemExit, (3,), errors.UnknownError, r"SystemExit\(3\)"),
    ],
    ids=["StopIteration", "unpicklable", "SystemExit"],
)
def test_unraisable_error_is_replaced_in_fetch_and_join(
    coordinator: ClusterCoordinator,
    error: type[BaseException],
    args: Any,
    kind: type[Exception],
    message: str,
) -> None:
    value = coordinator.schedule(raises, (error, *args))
    with pytest.raises(kind, match=message) as raised:
        value.fetch(20)
    assert "in raises" in str(raised.value.__cause__)
    with pytest.raises(kind, match=message):
        coordinator.join(20)


def test_done_waits_up_to_its_time_out(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    assert coordinator.done(0)
    coordinator.schedule(waits, (tmp_path,))
    assert not coordinator.done(0.01)
    go(tmp_path)
    assert coordinator.done(20)
    coordinator.schedule(bad)
    with pytest.raises(errors.InvalidArgumentError):
        coordinator.done(20)


# -- values ----------------------------------------------------------------------------------------


class Tensor:
    """As those of other libraries."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.array(self.numbers)


def test_fetch_converts_tensors_unlike_get_and_gather(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(lambda: {"a": [Tensor(1, 2), None], "b": (3.5, "x")})
    plain, fetched = value.get(20), value.fetch()
    assert isinstance(plain["a"][0], Tensor)
    assert isinstance(coordinator.gather([value])[0]["a"][0], Tensor)
    assert isinstance(fetched["a"][0], np.ndarray)
    assert fetched["a"][0].tolist() == [1, 2]
    assert fetched["a"][1] is None
    assert fetched["b"] == (3.5, "x")
    assert coordinator.fetch([value])[0]["a"][0].tolist() == [1, 2]
    assert coordinator.schedule(Tensor, (5,)).fetch(20).tolist() == [5]


def test_status_is_ready_with_value_or_error(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    value = coordinator.schedule(waits, (tmp_path,))
    assert value.status is RemoteValueStatus.NOT_READY
    go(tmp_path)
    assert value.exception(20) is None
    assert value.status is RemoteValueStatus.READY
    failed = coordinator.schedule(bad)
    assert failed.exception(20) is not None
    assert failed.status is RemoteValueStatus.READY
    assert [(status.name, status.value) for status in RemoteValueStatus] == [
        (name, name) for name in ("NOT_READY", "ABORTED", "READY")
    ]


# -- the end of a coordinator ----------------------------------------------------------------------

COLLECTED = """
import gc, os, sys, threading, time
import numpy as np
from zmqdist.coordinator import ClusterCoordinator

def ours():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("zmqdist")}

def gone():
    deadline = time.monotonic() + 20
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not ours()

coordinator = ClusterCoordinator(sys.argv[1])
kept = coordinator.schedule(np.zeros, (10,), keep=True)
made = coordinator.schedule(np.add, (kept, 1), lineage=True)
again = coordinator.schedule(np.add, (made, 1), retries=2)
value = ClusterCoordinator(sys.argv[1]).schedule(abs, (-1,))
again.add_done_callback(lambda value: None)
coordinator.join(20)
gc.collect()
assert ours(), "the coordinator is in use"
del coordinator
gc.collect()
assert kept.get(20).sum() == 0, "while a kept value is in use, so is its coordinator"
assert value.get(20) == 1, "and while somebody waits for a result"
assert ours()
del kept, made
gc.collect()
assert gone(), ours()
assert again.get().sum() == 20, "what is here stays"
print("well")
"""


def test_unreferenced_coordinator_ends_its_threads(cluster: zd.local_cluster) -> None:
    process = subprocess.run(
        [sys.executable, "-c", COLLECTED, cluster.target],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **_token(cluster)},
    )
    assert (process.stdout, process.returncode) == ("well\n", 0), process.stderr


def _token(cluster: zd.local_cluster) -> dict[str, str]:
    return (
        {"ZMQDIST_TOKEN_FILE": str(cluster.credentials.token_file)}
        if cluster.credentials.token_file
        else {}
    )


def test_coordinator_has_no_reference_cycle(cluster: zd.local_cluster) -> None:
    before = set(threading.enumerate())
    coordinator = ClusterCoordinator(cluster)
    assert coordinator.schedule(good).fetch(20) == 1
    its_own = set(threading.enumerate()) - before
    assert "zmqdist-coordinator" in {thread.name for thread in its_own}
    gc.disable()
    try:
        del coordinator
        until(lambda: not any(thread.is_alive() for thread in its_own))
    finally:
        gc.enable()
