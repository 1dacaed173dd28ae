"""Large results that cannot be fetched at once: what is waited for, how long, and who goes on
meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduling.coordinator.helpers import refuse_threads
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.scheduling.coordinator import result_fetcher
from zmqdist.scheduling.coordinator.result_fetcher import ResultFetcher
from zmqdist.scheduling.shared.references import Held, Reference, encode_reference
from zmqdist.scheduling.shared.store import Fetcher
from zmqdist.transport.credentials import Credentials

Make = Callable[[Callable[[Reference], list[Any]]], "FetcherWithHolders"]


class FetcherWithHolders:
    """A ResultFetcher whose holders are a function.

    Attributes:
      wanted_works: the work items whose results are still needed; None: all.
      fetched, failed: the work items whose results arrived, or did not, with the reason.
    """

    def __init__(
        self, holders: Callable[[Reference], list[Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Fetcher, "fetch", lambda _, reference, is_wanted: holders(reference))
        self.wanted_works: set[int] | None = None
        self.fetched: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.inner = ResultFetcher(
            Credentials(insecure=True),
            "127.0.0.1:1",
            lambda work, attempt: self.wanted_works is None or work in self.wanted_works,
            lambda work, attempt, parts: self.fetched.append(work),
            lambda work, attempt, problem: self.failed.append((work, problem)),
        )

    def fetch(self, work: int) -> None:
        """For a result whose holder says its number."""
        reference = Reference(work, f"127.0.0.1:{work}", None, (Held(1, 8),))
        assert self.inner.fetch(work, 0, encode_reference(reference)) is None


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """make(holders): closed at the end."""
    fetchers: list[FetcherWithHolders] = []

    def make(holders: Callable[[Reference], list[Any]]) -> FetcherWithHolders:
        fetchers.append(FetcherWithHolders(holders, monkeypatch))
        return fetchers[-1]

    yield make
    for fetcher in fetchers:
        fetcher.inner.close()


def freed(_: Reference) -> list[Any]:
    raise errors.NotFoundError(None, None, "it was freed")


def test_freed_results_delay_no_other_fetch(make: Make) -> None:
    """As after the coordinator was stopped for longer than a lease: what it had begun to fetch was
    freed everywhere."""
    fetcher = make(lambda reference: freed(reference) if reference.store <= 20 else [b""])
    for work in range(1, 31):
        fetcher.fetch(work)
    until(lambda: sorted(fetcher.fetched) == list(range(21, 31)))
    assert not fetcher.failed


def test_unwanted_result_is_not_fetched(make: Make) -> None:
    holders: list[int] = []
    fetcher = make(lambda reference: [holders.append(reference.store)])
    fetcher.wanted_works = {2}
    fetcher.fetch(1)
    fetcher.fetch(2)
    until(lambda: fetcher.fetched)
    assert holders == [2]
    assert not fetcher.failed


def test_fetch_repeats_until_patience_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_fetcher, "AGAIN_S", 0.01)
    monkeypatch.setattr(result_fetcher, "PATIENCE_S", 0.05)
    tries: list[int] = []

    def holders(reference: Reference) -> list[Any]:
        tries.append(reference.store)
        if reference.store == 1 or tries.count(2) < 3:
            raise errors.UnavailableError(None, None, "nobody answers")
        return [b""]

    fetcher = make(holders)
    fetcher.fetch(1)
    fetcher.fetch(2)
    until(lambda: fetcher.failed and fetcher.fetched)
    assert fetcher.failed == [(1, "its result is held at 127.0.0.1:1: nobody answers")]
    assert (fetcher.fetched, tries.count(2)) == ([2], 3)
    assert 2 <= tries.count(1) <= 5


def test_patience_does_not_count_time_of_stopped_process(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on meanwhile: the first try after it is not the last one."""
    now = [0.0]
    monkeypatch.setattr(result_fetcher, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(result_fetcher, "AGAIN_S", 0.0)
    tries: list[int] = []

    def holders(reference: Reference) -> list[Any]:
        tries.append(reference.store)
        if len(tries) == 1:
            now[0] += 3600.0
            raise errors.UnavailableError(None, None, "the connection has gone")
        return [b""]

    fetcher = make(holders)
    fetcher.fetch(1)
    until(lambda: fetcher.fetched)
    assert not fetcher.failed


def test_error_of_fetch_ends_its_work_only(make: Make) -> None:
    def holders(reference: Reference) -> list[Any]:
        if reference.store <= 2:
            raise SystemExit("enough")
        return [b""]

    fetcher = make(holders)
    for work in (1, 2, 3):
        fetcher.fetch(work)
    until(lambda: fetcher.fetched == [3])
    assert sorted(fetcher.failed) == [
        (work, f"its result is held at 127.0.0.1:{work}: SystemExit: enough") for work in (1, 2)
    ]


def test_result_is_unreachable_if_no_thread_starts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch of the next result starts a thread again."""
    fetcher = make(lambda _: [b""])
    with monkeypatch.context() as full:
        refuse_threads(full, "zmqdist-fetch")
        fetcher.fetch(1)
    assert fetcher.failed == [
        (1, "its result is held at 127.0.0.1:1: RuntimeError: can't start new thread")
    ]
    fetcher.fetch(2)
    until(lambda: fetcher.fetched == [2])
