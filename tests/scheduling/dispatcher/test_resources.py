"""What the workers have and what of it is in use: grants, devices, and workers that are kept free."""

from __future__ import annotations

import random

import pytest

from zmqdist.limits import OVERTAKE_S
from zmqdist.scheduling.dispatcher.resources import Ledger, Stocks
from zmqdist.scheduling.shared.quantities import Grant, Quantities

GPU1: Quantities = (("gpu", 1000),)
GPU2: Quantities = (("gpu", 2000),)
HALF: Quantities = (("gpu", 500),)


@pytest.fixture
def stocks() -> Stocks:
    stocks = Stocks()
    stocks.add_worker("w0", (("gpu", 2000), ("memory_gb", 8000)))
    stocks.add_worker("w1", ())
    return stocks


def test_part_of_device_is_taken_where_least_is_left(stocks: Stocks) -> None:
    devices = [stocks.reserve("w0", request) for request in (HALF, GPU1, HALF, HALF)]
    assert [grant and grant.devices for grant in devices] == [(0,), (1,), (0,), None]


def test_whole_devices_are_not_made_of_parts(stocks: Stocks) -> None:
    for _ in range(2):
        assert stocks.reserve("w0", (("gpu", 400),)) == Grant((("gpu", 400),), (0,))
    assert not stocks.fits("w0", GPU2)
    assert stocks.fits("w0", GPU1)


def test_unknown_resource_and_unknown_worker_fit_nothing(stocks: Stocks) -> None:
    assert stocks.reserve("w0", (("licence", 1),)) is None
    assert stocks.reserve("w9", GPU1) is None
    assert not stocks.can_ever((("licence", 1),))
    assert stocks.can_ever(GPU2)
    assert not stocks.can_ever(GPU2, "w1")


def test_absent_worker_is_not_said_to_have_too_little(stocks: Stocks) -> None:
    assert stocks.can_ever((("gpu", 9000),), "w9")
    assert Stocks().can_ever(GPU2)


def test_release_at_random_leaves_everything_free(stocks: Stocks) -> None:
    rng = random.Random(1)
    grants: list[Grant] = []
    for _ in range(2000):
        amount = rng.choice((250, 500, 1000, 2000))
        grant = stocks.reserve("w0", (("gpu", amount), ("memory_gb", rng.randint(1, 4000))))
        if grant is not None:
            grants.append(grant)
            sums = [0, 0]
            for other in grants:
                for device in other.devices:
                    sums[device] += min(1000, dict(other.quantities)["gpu"])
            assert max(sums) <= 1000
            assert sum(dict(other.quantities)["memory_gb"] for other in grants) <= 8000
        elif grants:
            stocks.release("w0", grants.pop(rng.randrange(len(grants))))
    while grants:
        stocks.release("w0", grants.pop())
    assert stocks.figures("w0") == {"gpu": (0, 2), "memory_gb": (0, 8)}
    assert stocks.reserve("w0", GPU2) == Grant(GPU2, (0, 1))


def test_worker_is_kept_free_for_claimant_that_waits_long(stocks: Stocks) -> None:
    small = stocks.reserve("w0", GPU1, "small")
    assert small is not None
    stocks.claim("large", GPU2, 0.0)
    stocks.keep_free(OVERTAKE_S - 0.1)
    assert stocks.kept == {}
    stocks.keep_free(OVERTAKE_S)
    assert stocks.kept == {"w0": "large"}
    assert stocks.reserve("w0", GPU1, "small") is None
    stocks.release("w0", small)
    assert stocks.reserve("w0", GPU1) is None
    assert stocks.reserve("w0", GPU2, "large") is not None
    stocks.changed.clear()
    stocks.drop_claim("large")
    assert (stocks.kept, stocks.changed) == ({}, {"w0": None})


def test_full_worker_is_not_kept_for_large_request(stocks: Stocks) -> None:
    lasting = stocks.reserve("w0", GPU1, lasting=True)
    assert lasting is not None
    stocks.claim("large", GPU2, 0.0)
    stocks.keep_free(100.0)
    assert stocks.kept == {}
    stocks.release("w0", lasting, lasting=True)
    stocks.keep_free(100.0)
    assert stocks.kept == {"w0": "large"}


def test_worker_that_lacks_least_is_kept_one_for_each(stocks: Stocks) -> None:
    stocks.add_worker("w2", GPU2)
    assert stocks.reserve("w0", GPU2)
    assert stocks.reserve("w2", GPU1)
    for claimant in ("first", "second", "third"):
        stocks.claim(claimant, GPU2, 0.0)
    stocks.keep_free(OVERTAKE_S)
    assert stocks.kept == {"w2": "first", "w0": "second"}
    stocks.remove_worker("w2")
    assert stocks.kept == {"w0": "second"}


def test_text_groups_workers_that_have_the_same(stocks: Stocks) -> None:
    for index in range(2, 5):
        stocks.add_worker(f"w{index}", ())
    assert stocks.text() == ("w0 has gpu 2, memory_gb 8; 4 workers such as w1 have nothing")


def test_ledger_of_false_report_grants_nothing() -> None:
    ledger = Ledger(GPU1)
    ledger.change(Grant((("gpu", 5000), ("x", 1))), -1)
    assert not ledger.fits(GPU1)
    assert not ledger.fits((("x", 1),))
