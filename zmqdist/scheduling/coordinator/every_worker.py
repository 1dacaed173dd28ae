"""One call of a function on every worker, as `ClusterCoordinator.run` makes it.

The calls belong to no round, so an error of one neither ends the others nor fails a later `join`. A
call is not repeated on another worker: if its worker is lost, the call has failed. If the function
ends its slot process, the worker calls it again, as it does with every function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from zmqdist import errors
from zmqdist.clock import deadline, left
from zmqdist.scheduling.coordinator.failures import with_failures
from zmqdist.scheduling.coordinator.remote_value import RemoteValue
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime

T = TypeVar("T")

NEWS_S: Final = 1.0
"""Seconds to wait for the dispatcher's news, of a worker that may have left by then."""


def hear_of_new_workers(runtime: CoordinatorRuntime) -> None:
    """Wait until the coordinator has heard of the workers that have registered by now, because a
    program that has just added some expects calls on these, too.
    """
    try:
        rows = runtime.call_dispatcher("status", timeout_ms=round(NEWS_S * 1000))["workers"]
    except errors.OpError:  # the calls wait for the dispatcher, or fail, as others do
        return
    registered = {row["name"] for row in rows if row["state"] == "alive"}
    with runtime.lock:
        runtime.progress.waiting += 1
        try:
            runtime.changed.wait_for(lambda: registered <= (runtime.members or {}).keys(), NEWS_S)
        finally:
            runtime.progress.waiting -= 1


def run_on(
    runtime: CoordinatorRuntime,
    workers: list[str],
    submit: Callable[[str], RemoteValue[T]],
    timeout: float | None,
) -> dict[str, T]:
    """Call `submit(worker)` for each of these workers, and return the results by worker.

    Raises the first error, with the attribute `failures`: the errors by worker. Calls that have not
    ended then are cancelled.
    """
    if not workers:
        raise errors.UnavailableError(
            "run() found no worker: start one, or wait until one has joined"
        )
    until, before = deadline(timeout), runtime.members or {}
    values: dict[str, RemoteValue[T]] = {}
    lost: set[str] = set()

    def have_ended() -> bool:
        present = runtime.members or {}
        lost.update(
            name
            for name, value in values.items()
            if not value.done() and (name not in present or present[name] != before.get(name))
        )
        return all(name in lost or value.done() for name, value in values.items())

    results: dict[str, T] = {}
    failures: dict[str, BaseException] = {}
    try:
        for name in workers:
            values[name] = submit(name)
        with runtime.lock:
            runtime.progress.waiting += 1
            try:
                runtime.changed.wait_for(have_ended, left(until))
            finally:
                runtime.progress.waiting -= 1
        for name, value in values.items():
            if name in lost:
                failures[name] = errors.UnavailableError(
                    f"{value.name}: the worker was lost before the function ended"
                )
            elif not value.done():
                failures[name] = errors.DeadlineExceededError(
                    f"{value.name} has not ended after {timeout:g} s"
                )
            elif (error := value.exception()) is not None:
                failures[name] = error
            else:
                results[name] = value.result()
    finally:
        for value in values.values():
            value.cancel()
    for error in failures.values():
        raise with_failures(error, failures)
    return results
