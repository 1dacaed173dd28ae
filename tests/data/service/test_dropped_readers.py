"""An iterator that its last user drops ends its reader, as one that is closed does, whatever came
of it before."""

from __future__ import annotations

import contextlib
import gc
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.data.service.helpers import Service, serving
from zmqdist.data import Dataset
from zmqdist.errors import InvalidArgumentError, NotFoundError

pytestmark = pytest.mark.shares_cluster

PATIENCE_S = 20.0

READINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "portions": {"delivery": "exactly_once"},
    "rounds": {"num_consumers": 1, "consumer_index": 0},
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(processes=False) as service:
        yield service


def fails(x: Any) -> Any:
    raise ValueError("a bad row")


def unchanged(x: Any) -> Any:
    return x


CAUSES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], type[Exception] | None]] = {
    "after an element": (unchanged, {}, None),
    "after the error of an element": (fails, {}, InvalidArgumentError),
    "after an error that ends the reading": (
        unchanged,
        {"data_transfer_protocol": "pigeon"},
        NotFoundError,
    ),
}


def readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "zmqdist-reader"}


def thread_of_a_dropped_reader(service: Service, reading: str, cause: str) -> threading.Thread:
    function, options, error = CAUSES[cause]
    rounds = reading == "rounds"
    read = service.whole if rounds else service.dealt
    dataset = (Dataset.counter() if rounds else Dataset.range(1000)).map(function)
    before = readers()
    iterator = iter(read(dataset, job_name=str(uuid.uuid4()), **READINGS[reading], **options))
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        next(iterator)
    (thread,) = readers() - before
    assert thread.is_alive()
    return thread


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("reading", READINGS)
def test_dropped_iterator_ends_reader(service: Service, reading: str, cause: str) -> None:
    thread = thread_of_a_dropped_reader(service, reading, cause)
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
