"""Replies that a reader cannot decode: whatever decoding raises, the reader gets it, and waits for
nothing that cannot come."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import TestCluster
from zmqdist import errors
from zmqdist.data import Dataset
from zmqdist.data.service.reader import runtime
from zmqdist.data.service.reader.delivery import FAILED, SOME, Demand
from zmqdist.data.service.reader.task_clients import RemoteTask
from zmqdist.rpc import client, internal_client


class Finished:
    """A call that has ended, as `internal_client.start` returns it."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.get_value = read

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        fn(self)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


ANSWERS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "elements": (lambda: (SOME, "value", None), SOME, errors.OK),
    "an error of the worker": (raising(errors.NotFoundError("gone")), FAILED, errors.NOT_FOUND),
    "no value": (raising(errors.WireError("worker", "no array")), FAILED, errors.INVALID_ARGUMENT),
    "no memory": (raising(MemoryError()), FAILED, errors.RESOURCE_EXHAUSTED),
    "too deep": (raising(RecursionError()), FAILED, errors.UNKNOWN),
    "a number": (lambda: 5, FAILED, errors.INVALID_ARGUMENT),
    "too few parts": (lambda: (SOME, 1), FAILED, errors.INVALID_ARGUMENT),
    "a kind that is no number": (lambda: ("x", 1, 2), FAILED, errors.INVALID_ARGUMENT),
}


@pytest.mark.parametrize(("read", "kind", "code"), ANSWERS.values(), ids=ANSWERS)
def test_decoding_error_is_reply(
    read: Callable[[], Any], kind: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal_client, "start", lambda *_, **__: Finished(read))
    replies: list[Any] = []
    client: Any = SimpleNamespace(address="worker")
    loop: Any = SimpleNamespace(now=lambda: 0.0, set_timer=lambda *_: None)
    task = RemoteTask(client, 1, 2, None, loop)
    task.ask(Demand(1, 1), lambda *reply: replies.append(reply))
    [(kind_seen, _, error)] = replies
    assert (kind_seen, errors.OK if error is None else error.error_code) == (kind, code)


@pytest.mark.parametrize("delivery", ["at_most_once", "exactly_once"])
def test_undecodable_element_is_error_of_reader(
    delivery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestCluster(1, worker_options={"data_transfer_protocol": "zmq"}) as cluster:
        dataset = cluster.distribute(
            Dataset.range(1).map(lambda _: np.ones([1] * 20)),
            "distributed_epoch",
            data_transfer_protocol="zmq",
            delivery=delivery,
        )
        read = client.payload.unpack

        def unpack(body: bytes, parts: Any, peer: str) -> Any:
            value = read(body, parts, peer)
            if "ndarray" in repr(map_of_types(value)):
                raise MemoryError("no room for an array of 20 dimensions")
            return value

        monkeypatch.setattr(client, "payload", SimpleNamespace(unpack=unpack))
        with pytest.raises(
            errors.ResourceExhaustedError, match="no room for an array of 20 dimensions"
        ):
            list(dataset)


def map_of_types(value: Any) -> Any:
    return (
        [map_of_types(item) for item in value]
        if isinstance(value, (list, tuple))
        else type(value).__name__
    )


def test_exception_in_reader_loop_ends_reading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TestCluster(1) as cluster:
        monkeypatch.setattr(
            runtime, "reads_from", raising(ZeroDivisionError("a fault of the reader"))
        )
        with pytest.raises(errors.UnknownError, match="ZeroDivisionError: a fault of the reader"):
            list(cluster.distribute(Dataset.range(10)))
