"""Which results may leave without a copy: those that nobody but the framework refers to."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zmqdist.limits import CHUNK_BYTES
from zmqdist.rpc import payload
from zmqdist.rpc.payload import is_temporary, pack_result
from zmqdist.transport.shm_pool import memory_for

SIZE = CHUNK_BYTES + 8
KEPT: list[Any] = []

pytestmark = pytest.mark.skipif(
    payload._ONE < 0,  # reach: the module's own test of the interpreter
    reason="this interpreter counts references in another way",
)


def new() -> np.ndarray[Any, Any]:
    return np.ones(SIZE, np.uint8)


def received() -> np.ndarray[Any, Any]:
    """An array as the codec makes it of what a socket brought."""
    return np.ndarray((2**20 // 8,), np.float64, memory_for(2**20))


class Holder:
    def __init__(self) -> None:
        self.array = new()

    def give(self) -> Any:
        return self.array


@pytest.mark.parametrize(
    "fn",
    [
        new,
        received,
        lambda: new() + 1,
        lambda: [new(), new()],
        lambda: (new(), 1, "text", None, np.float32(2)),
        lambda: {"a": new(), "b": 2.5},
        lambda: [received()],
        lambda: np.ones((SIZE, 2), np.uint8).T,
        lambda: new()[1:],
    ],
    ids=[
        "made",
        "received",
        "computed",
        "list",
        "tuple",
        "dict",
        "received in a list",
        "transposed",
        "a slice of it",
    ],
)
def test_value_of_box_alone_is_temporary(fn: Callable[[], Any]) -> None:
    box = [fn()]
    assert is_temporary(box)
    box = [called_deeper(fn)]
    assert is_temporary(box)


def called_deeper(fn: Callable[[], Any]) -> Any:
    array = fn()
    return [array][0]


def keep(value: Any) -> Any:
    KEPT.append(value)
    return value


def keep_view(value: Any) -> Any:
    KEPT.append(value[1:])
    return value


def keep_weakly(value: Any) -> Any:
    KEPT.append(weakref.ref(value))
    return value


def keep_memory(value: Any) -> Any:
    KEPT.append(memoryview(value))
    return value


def keep_base(value: Any) -> Any:
    KEPT.append(value.base)
    return value


def keep_in_cycle(value: Any) -> Any:
    cycle: list[Any] = [value]
    cycle.append(cycle)
    return value


def keep_in_closure(value: Any) -> Any:
    KEPT.append(lambda: value)
    return value


def keep_in_generator(value: Any) -> Any:
    running = (item for item in [value])
    KEPT.append(running)
    KEPT.append(next(running))
    return value


def keep_in_thread(value: Any) -> Any:
    KEPT.append(threading.Thread(target=print, args=(value,)))
    return value


def keep_item(value: Any) -> Any:
    KEPT.append(value[0])
    return value


@pytest.mark.parametrize("make", [new, received], ids=["made", "received"])
@pytest.mark.parametrize(
    "holding",
    [
        keep,
        keep_view,
        keep_weakly,
        keep_memory,
        keep_in_cycle,
        keep_in_closure,
        keep_in_generator,
        keep_in_thread,
    ],
)
def test_referenced_value_is_not_temporary(
    make: Callable[[], Any], holding: Callable[[Any], Any]
) -> None:
    gc.disable()  # the cycle is garbage already
    try:
        box = [holding(make())]
        assert not is_temporary(box)
    finally:
        gc.enable()
        KEPT.clear()


@pytest.mark.parametrize(
    "fn",
    [
        lambda: keep_base(received()),
        lambda: keep([new()]),
        lambda: keep_item([new()]),
        lambda: keep({"a": new()}),
        lambda: [KEPT_ARRAY, new()],
        lambda: [new()] * 2,
        lambda: Holder().give(),
        Holder().give,
        lambda: [[new()]],
        lambda: [new(), object()],
        lambda: np.ndarray((SIZE,), np.uint8, bytearray(SIZE)),
        lambda: np.ones(SIZE, np.uint8).view(np.recarray),
        lambda: np.ones(10),
        lambda: list(range(100_000)),
    ],
    ids=[
        "its memory is kept",
        "the list is kept",
        "an item is kept",
        "the dict is kept",
        "one of two is kept",
        "twice the same",
        "of an object that has gone: fine, but cannot hurt",
        "of an object",
        "deeper",
        "beside something unknown",
        "over other memory",
        "a subclass",
        "small",
        "a long list",
    ],
)
def test_uncertain_value_is_copied(fn: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    box = [fn()]
    assert is_temporary(box) == ("has gone" in request.node.callspec.id)
    KEPT.clear()


KEPT_ARRAY = new()


def test_tracer_does_not_change_temporaries() -> None:
    before = sys.gettrace(), sys.getprofile()
    try:
        for switch in (sys.settrace, sys.setprofile):
            switch(lambda *_: None)
            box, other = [new()], [keep(new())]
            found = is_temporary(box), is_temporary(other)
            switch(None)
            assert found == (True, False)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        KEPT.clear()


def test_referenced_result_is_copied() -> None:
    def sources(box: list[Any]) -> int:
        address = box[0].ctypes.data
        _, (source,) = pack_result(box, lends=False)
        view = np.frombuffer(
            memoryview(source.array() if hasattr(source, "lend") else source), np.uint8
        )
        assert view[0] == 1
        return abs(int(view.ctypes.data) - address)

    assert sources([new()]) == 0
    assert sources([keep(new())]) != 0
    KEPT.clear()


def test_received_memory_is_used_again_after_its_last_view() -> None:
    first = memory_for(3 * 2**20)
    where = first.ctypes.data
    view = first[5:]
    del first
    assert memory_for(3 * 2**20).ctypes.data != where
    view[0] = 1
    del view
    again = memory_for(3 * 2**20 - 100)
    assert again.ctypes.data == where
    assert again.flags.writeable
    assert again.nbytes == 3 * 2**20 - 100


def test_pooled_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from zmqdist.transport import shm_pool as module

    pool = module._ReceivePool()  # reach: the one of this process has what earlier tests received
    monkeypatch.setattr(module, "_received", pool)
    monkeypatch.setattr(module, "RECEIVED_IDLE_BYTES_MAX", 10 * 2**20)
    for _ in range(3):
        many = [memory_for(4 * 2**20) for _ in range(5)]
        del many
    free, returned = pool._free, pool._returned  # reach: a bound shows nowhere else
    assert sum(memory.nbytes for memory in (*free, *returned)) <= 20 * 2**20
    memory_for(2**20)
    assert (
        sum(memory.nbytes for memory in pool._free) <= 10 * 2**20
    )  # reach: a bound shows nowhere else
