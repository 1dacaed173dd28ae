"""Large payloads: what holders and fetchers keep, how often bytes move, and the errors."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.helpers import internal_client_with
from tests.scheduling.work import go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.limits import ARRAY_BYTES_MAX, CHUNK_BYTES, INLINE_BYTES_MAX
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.shared import references
from zmqdist.scheduling.shared import store as fetch
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.scheduling.shared.references import Held, Reference, decode_reference, encode_reference
from zmqdist.scheduling.shared.store import CLIENTS_KEPT, UNCHANGED_MAX, BulkStore, Fetcher
from zmqdist.scheduling.worker.worker_cache import WorkerCache
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
from zmqdist.transport.shm_pool import this_pool
from zmqdist.wire.hello import our_hello

MIB = 2**20
DISPATCHER = "127.0.0.1:9"  # no process listens there
LARGE = 3 * MIB


@pytest.fixture
def hold() -> Iterator[Callable[..., BulkStore]]:
    """Return `hold()`, which makes a holder on a port of its own. With `near=False` it looks like a
    holder of another host."""
    loops: list[Loop] = []
    stores: list[BulkStore] = []

    def make(*, near: bool = True) -> BulkStore:
        loop = Loop("zmqdist-holder")
        loops.append(loop)
        number = len(loops) + int.from_bytes(os.urandom(6), "big")
        router = Router(loop, Credentials().server("127.0.0.1"), our_hello("server", 1, "holder"))
        service = RpcService("holder")
        store = BulkStore(service, frozenset({"worker"}), number)
        service.attach(router, loop, 1)
        store.address = router.bind("127.0.0.1:0")
        if not near:
            store.memory = None
        loop.start()
        stores.append(store)
        return store

    yield make
    for loop in loops:
        loop.stop()
    for store in stores:
        store.close()


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    made = Fetcher(Credentials(), "worker", DISPATCHER)
    yield made
    made.close()


def ramp(size: int) -> bytes:
    return bytes(range(256)) * (size // 256) + bytes(size % 256)


def as_bytes(parts: list[Any]) -> list[bytes]:
    return [bytes(part) for part in parts]


# -- holders and fetchers --------------------------------------------------------------------------


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "chunks"])
@pytest.mark.parametrize(
    "size", [0, 1, INLINE_BYTES_MAX + 1, CHUNK_BYTES, CHUNK_BYTES + 1, 20 * CHUNK_BYTES + 7]
)
def test_parts_of_all_sizes_arrive_whole(
    hold: Callable[..., BulkStore], fetcher: Fetcher, size: int, near: bool
) -> None:
    parts = [ramp(size), b"second", ramp(size + 100_000)]
    store = hold(near=near)
    reference = decode_reference(encode_reference(store.hold(parts, shared=True)))
    for _ in range(2):
        assert as_bytes(fetcher.fetch(reference)) == parts
    store.free(reference.bulks)
    assert len(store) == 0
    with pytest.raises(errors.NotFoundError, match=r"payload \d+ is no longer held here"):
        fetcher.fetch(reference)


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "chunks"])
def test_fetched_arrays_belong_to_fetcher_alone(
    hold: Callable[..., BulkStore], fetcher: Fetcher, near: bool
) -> None:
    data = bytearray(ramp(LARGE))
    store = hold(near=near)
    reference = store.hold([data], shared=True)
    data[:] = bytes(LARGE)
    first, second = fetcher.fetch(reference)[0], fetcher.fetch(reference)[0]
    first[:] = 1
    assert bytes(second) == ramp(LARGE)
    assert bytes(store.view(reference.bulks[0])) == ramp(LARGE)
    store.free(reference.bulks)
    other = store.hold([bytes(LARGE)], shared=True)
    assert bytes(second) == ramp(LARGE), "memory was used again while a process had it"
    store.free(other.bulks)


def test_equal_bytes_at_one_address_are_held_once(hold: Callable[..., BulkStore]) -> None:
    store = hold()
    array = np.frombuffer(ramp(LARGE), np.uint8).copy()
    held = [store.hold([b"x", array], shared=True) for _ in range(10)]
    assert store.copies == 1
    assert len(store) == 1
    array[-1] = 77
    other = store.hold([array], shared=True)
    assert store.copies == 2
    assert other.bulks != held[0].bulks
    for reference in held:
        store.free(reference.bulks)
    assert len(store) == 1
    store.free(other.bulks)
    assert len(store) == 0


def test_unchanged_part_is_held_again_without_a_look(hold: Callable[..., BulkStore]) -> None:
    store = hold()
    array = np.frombuffer(ramp(LARGE), np.uint8).copy()
    with store.unchanged():
        held = [store.hold([array], shared=True)]
        array[:] = 7  # which the caller promises not to do
        store.free(held.pop().bulks)
        held += [store.hold([array], shared=True) for _ in range(3)]
        assert store.copies == 1
    assert bytes(store.view(held[0].bulks[0])) == ramp(LARGE)
    held.append(store.hold([array], shared=True))
    assert store.copies == 2
    for reference in held:
        store.free(reference.bulks)
    assert len(store) == 0


def test_parts_that_take_turns_at_one_address_are_each_held(
    hold: Callable[..., BulkStore],
) -> None:
    """As the copies that pickle makes of arrays with gaps: each ends with its pickle."""
    store, held = hold(), []
    with store.unchanged():
        for number in range(3 * UNCHANGED_MAX):
            held.append(store.hold([np.full(LARGE, number, np.uint8)], shared=True))
    for number, reference in enumerate(held):
        assert store.view(reference.bulks[0])[LARGE // 2] == number
        store.free(reference.bulks)
    assert len(store) == 0


def test_equal_bytes_at_other_address_are_held_once(hold: Callable[..., BulkStore]) -> None:
    """A pickle is at another place each time."""
    store = hold()
    parts = [bytearray(ramp(LARGE)) for _ in range(4)]
    parts[2][LARGE // 2] ^= 1
    held = [store.hold([part], shared=True) for part in parts]
    assert (store.copies, len(store)) == (3, 3), (
        "of arrays that begin and end alike only the last is remembered"
    )
    for reference, part in zip(held, parts, strict=True):
        assert bytes(store.view(reference.bulks[0])) == part
    for reference in held:
        store.free(reference.bulks)
    assert len(store) == 0


def test_payload_is_counted_by_its_holds(
    hold: Callable[..., BulkStore],
) -> None:
    store = hold()
    (bulk,) = store.hold([ramp(LARGE)], shared=True).bulks
    store.hold_again([bulk, bulk])
    for _ in range(2):
        store.free([bulk])
        assert store.holds(bulk)
    store.free([bulk])
    assert not store.holds(bulk)
    store.hold_again([bulk])
    assert len(store) == 0


def test_equal_frozen_bytes_are_held_once(
    hold: Callable[..., BulkStore],
) -> None:
    store = hold()
    frozen, other = (zd.freeze(np.frombuffer(ramp(LARGE), np.uint8)) for _ in range(2))
    held = [
        store.hold([array], shared=True).bulks[0]
        for array in (frozen, frozen, other, other, frozen[MIB:])
    ]
    assert (store.copies, len(store)) == (0, 3)
    assert held[0] == held[1] != held[2] == held[3]
    store.free(held)
    assert len(store) == 0


def test_lent_memory_is_never_shared(
    hold: Callable[..., BulkStore],
) -> None:
    store = hold()
    array = np.frombuffer(ramp(LARGE), np.uint8).copy()
    alone = store.hold([array], shared=False)
    shared = store.hold([array], shared=True)
    assert alone.bulks != shared.bulks
    store.free([*alone.bulks, *shared.bulks])


def test_frozen_array_is_never_copied(hold: Callable[..., BulkStore], fetcher: Fetcher) -> None:
    store = hold()
    frozen = zd.freeze(np.frombuffer(ramp(LARGE), np.uint8))
    reference = store.hold([frozen, frozen[MIB:]], shared=True)
    assert store.copies == 0
    whole, part = fetcher.fetch(reference)
    assert bytes(whole) == ramp(LARGE)
    assert bytes(part) == ramp(LARGE)[MIB:]
    assert not whole.flags.writeable
    store.free(reference.bulks)


def test_memory_of_other_host_is_not_mapped(
    hold: Callable[..., BulkStore], fetcher: Fetcher
) -> None:
    store = hold()
    reference = store.hold([ramp(LARGE)], shared=True)
    assert reference.memory is not None
    *offer, nonce = reference.memory
    alike = Reference(77, store.address, (offer[0], offer[1], offer[2], nonce + 2), reference.parts)
    assert isinstance(fetcher.memories.attach(alike)[0], Held)
    assert bytes(fetcher.fetch(alike)[0]) == ramp(LARGE)
    store.free(reference.bulks)


def test_connections_to_holders_are_bounded(
    hold: Callable[..., BulkStore], fetcher: Fetcher
) -> None:
    for number in range(CLIENTS_KEPT + 3):
        data = ramp(LARGE) + b"%d" % number
        assert as_bytes(fetcher.fetch(hold(near=False).hold([data], shared=True))) == [data]
    assert len(fetcher.clients) == CLIENTS_KEPT


def test_error_of_thread_keeps_connection_of_others(
    hold: Callable[..., BulkStore], fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = hold(near=False)
    wanted = store.hold([ramp(LARGE)], shared=True)
    missing = Reference(store.number, store.address, None, (Held(wanted.bulks[0] + 1, 3),))
    read_parts = fetch.read_parts

    def meanwhile(client: Any, held: Any, into: Any, still: Any) -> object:
        """While one payload is fetched, another fetch from the same holder fails."""
        if held[0].bulk == wanted.bulks[0]:
            with pytest.raises(errors.NotFoundError):
                fetcher.fetch(missing)
        return read_parts(client, held, into, still)

    monkeypatch.setattr(fetch, "read_parts", meanwhile)
    assert as_bytes(fetcher.fetch(wanted)) == [ramp(LARGE)]


def test_unreachable_holder_error_names_both_ways(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "REACH_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            errors.UnavailableError,
            match=rf"no process replies at {address}.*through the dispatcher",
        ):
            fetcher.fetch(Reference(5, address, None, (Held(1, LARGE),)))
        assert fetcher.clients.unreachable == [address], "a fetcher does not wait for it each time"


def test_blocked_data_port_costs_one_request(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[float] = []

    def blocked(_: Any, due: float) -> None:
        calls.append(due)
        raise errors.DeadlineExceededError("deadline passed")

    monkeypatch.setattr(fetch, "internal_client", internal_client_with(reach=blocked))
    for _ in range(2):
        with (
            pytest.raises(errors.UnavailableError, match=r"no process replies at 127\.0\.0\.1:11"),
            fetcher.clients.use("127.0.0.1:11"),
        ):
            pass
    assert len(calls) == 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert "the data port 127.0.0.1:11 cannot be reached from" in said[0]
    assert "open that port between the two hosts" in said[0]


def test_holder_that_refuses_has_ended(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        fetch,
        "internal_client",
        internal_client_with(start=lambda *args, **kwargs: calls.append(args)),
    )
    with pytest.raises(
        errors.UnavailableError,
        match=r"no process listens at 127.0.0.1:11: the connection was refused",
    ):
        fetcher.fetch(Reference(5, "127.0.0.1:11", None, (Held(1, LARGE),)))
    assert not calls


def test_silent_holder_counts_as_lost(
    hold: Callable[..., BulkStore], fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BulkStore, "_send_part", lambda self, call, bulk: None)
    monkeypatch.setattr(fetch, "POLL_S", 0.01)
    monkeypatch.setattr(fetch, "STALLED_S", 0.05)
    store = hold(near=False)
    with pytest.raises(
        errors.DeadlineExceededError, match=f"no bytes have arrived from {store.address} for 0.05 s"
    ):
        fetcher.fetch(store.hold([ramp(LARGE)], shared=True))


def test_unneeded_fetch_is_cancelled(
    hold: Callable[..., BulkStore], fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BulkStore, "_send_part", lambda self, call, bulk: None)
    monkeypatch.setattr(fetch, "POLL_S", 0.01)
    looks = iter([True, True, False])
    with pytest.raises(errors.CancelledError, match="this payload is no longer needed"):
        fetcher.fetch(hold(near=False).hold([ramp(LARGE)], shared=True), lambda: next(looks))


def test_closed_fetcher_fetches_nothing(hold: Callable[..., BulkStore], fetcher: Fetcher) -> None:
    reference = hold(near=False).hold([ramp(LARGE)], shared=True)
    fetcher.close()
    with pytest.raises(errors.UnavailableError, match="has closed its connections"):
        fetcher.fetch(reference)
    assert len(fetcher.clients) == 0


BAD = [
    references.MARK,
    references.MARK + b"\x00",
    encode_reference(Reference(1, "a:1", None, (Held(1, -1),))),
    encode_reference(Reference(1, "a:1", None, (Held(1, ARRAY_BYTES_MAX), Held(2, 1)))),
    encode_reference(Reference(1, "a:1", None, ())),
]


@pytest.mark.parametrize("payload", BAD, ids=repr)
def test_damaged_reference_allocates_nothing(payload: bytes) -> None:
    with pytest.raises(errors.WireError):
        decode_reference(payload)


def test_worker_cache_keeps_payloads_once(hold: Callable[..., BulkStore], fetcher: Fetcher) -> None:
    far, own = hold(near=False), hold()
    pulled = WorkerCache(own, fetcher)
    payload = encode_reference(far.hold([b"pickle", ramp(LARGE)], shared=True))
    answers = {pulled.fetch_for_slot(payload) for _ in range(5)}
    assert len(answers) == 1
    assert pulled.fetches == 1
    assert as_bytes(fetcher.fetch(decode_reference(answers.pop()))) == [b"pickle", ramp(LARGE)]
    assert as_bytes(pulled.fetch(decode_reference(payload))) == [b"pickle", ramp(LARGE)]
    pulled.drop()
    assert len(own) == 0


def test_worker_does_not_fetch_its_own_payloads(
    hold: Callable[..., BulkStore], fetcher: Fetcher
) -> None:
    own = hold()
    pulled = WorkerCache(own, fetcher)
    reference = own.hold([b"pickle", ramp(LARGE)], shared=True)
    assert decode_reference(pulled.fetch_for_slot(encode_reference(reference))) == reference
    assert (pulled.fetches, len(own)) == (0, 1)
    own.free(reference.bulks)
    with pytest.raises(errors.NotFoundError):
        pulled.fetch(reference)


def test_fetch_without_memory_is_repeated(
    hold: Callable[..., BulkStore], fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, pulled = hold(near=False), WorkerCache(hold(), fetcher)
    payload = encode_reference(far.hold([ramp(LARGE)], shared=True))

    def no_pool() -> None:
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr("zmqdist.scheduling.worker.worker_cache.this_pool", no_pool)
        with pytest.raises(MemoryError):
            pulled.fetch_for_slot(payload)
    assert (len(pulled), pulled.nbytes) == (0, 0)
    assert as_bytes(pulled.fetch(decode_reference(payload))) == [ramp(LARGE)]


def test_failed_fetch_is_repeated_by_next_task(
    hold: Callable[..., BulkStore], fetcher: Fetcher
) -> None:
    far, own = hold(near=False), hold()
    pulled = WorkerCache(own, fetcher)
    reference = far.hold([ramp(LARGE)], shared=True)
    missing = encode_reference(Reference(far.number, far.address, None, (Held(99, LARGE),)))
    for _ in range(2):
        with pytest.raises(errors.NotFoundError):
            pulled.fetch_for_slot(missing)
    assert (len(pulled), pulled.nbytes) == (0, 0)
    assert pulled.fetch_for_slot(encode_reference(reference))
    pulled.drop()


def test_worker_cache_is_bounded(
    hold: Callable[..., BulkStore], fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqdist.scheduling.worker.worker_cache.WORKER_CACHE_BYTES_MAX", 2 * LARGE)
    far, own = hold(near=False), hold()
    pulled = WorkerCache(own, fetcher)
    for number in range(5):
        pulled.fetch_for_slot(
            encode_reference(far.hold([ramp(LARGE)[number:] + bytes(number)], shared=True))
        )
    assert len(own) == 2
    pulled.drop()


# -- in a cluster ----------------------------------------------------------------------------------


def echo(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array


def add_one(array: np.ndarray[Any, Any]) -> int:
    array += 1
    return int(array.sum(dtype=np.int64))


def look() -> tuple[int, int]:
    """Return the number of leases that the slot has lent, and the bytes of its pool."""
    gc.collect()
    pool = this_pool()
    assert pool is not None
    pool.sweep()
    return pool.lease_count, pool.nbytes


@pytest.fixture(scope="module")
def two() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=1, slots=2) as made:
        yield made


@pytest.fixture
def three() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=1, slots=3) as made:
        yield made


@pytest.fixture
def coordinator(two: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(two) as made:
        yield made


@pytest.mark.timeout(60)
def test_array_of_many_tasks_is_copied_once(
    coordinator: ClusterCoordinator,
) -> None:
    array = np.zeros(8 * MIB, np.uint8)
    values = [coordinator.schedule(add_one, (array,)) for _ in range(25)]
    assert coordinator.fetch(values) == [array.size] * 25
    assert coordinator.snapshot().held.copies == 1


@pytest.mark.timeout(60)
def test_map_sees_what_a_generator_writes_between_two_items(
    coordinator: ClusterCoordinator,
) -> None:
    def items() -> Iterator[np.ndarray]:
        array = np.zeros(8 * MIB, np.uint8)
        for number in range(5):
            array[:] = number
            yield array

    assert coordinator.fetch(coordinator.map(np.max, items())) == [0, 1, 2, 3, 4]


class Filled:
    """Its pickle has an array that the next one writes to."""

    scratch = np.zeros(8 * MIB, np.uint8)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        self.scratch[:] = self.number
        return np.max, (self.scratch,)


@pytest.mark.timeout(60)
def test_map_sees_what_pickling_writes_between_two_items(
    coordinator: ClusterCoordinator,
) -> None:
    items = [Filled(number) for number in range(4)]
    assert coordinator.fetch(coordinator.map(int, items)) == [0, 1, 2, 3]


@pytest.mark.timeout(60)
def test_frozen_array_of_many_tasks_is_never_copied(
    coordinator: ClusterCoordinator,
) -> None:
    frozen = zd.freeze(np.ones(8 * MIB, np.uint8))
    values = [coordinator.schedule(np.sum, (frozen,)) for _ in range(20)]
    assert coordinator.fetch(values) == [frozen.size] * 20
    assert coordinator.snapshot().held.copies == 0
    with pytest.raises(ValueError, match="read-only"):
        coordinator.schedule(add_one, (frozen,)).fetch()


@pytest.mark.timeout(60)
def test_large_results_leave_no_memory_with_slots(coordinator: ClusterCoordinator) -> None:
    array = np.ones(4 * MIB, np.uint8)
    for _ in range(10):
        back = coordinator.schedule(echo, (array,)).fetch()
        assert back.flags.writeable
        assert np.array_equal(back, array)
        del back
    coordinator.schedule(echo, (array,)).fetch()
    gc.collect()

    def settled() -> bool:
        # a new result makes the worker look for returned leases
        coordinator.schedule(echo, (array,)).fetch()
        lent, nbytes = coordinator.schedule(look).fetch()
        return lent <= 2 and nbytes <= 128 * MIB

    until(settled)


@pytest.mark.timeout(60)
def test_array_moves_once_to_worker_of_other_host(
    three: zd.local_cluster,
    no_shared_memory: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The cluster has shared memory; its coordinator has none, like one on another host. One slot
    is busy for the whole time, because a worker without work drops the arrays that it has fetched.
    """
    reads: list[int] = []
    view = BulkStore.view

    def noting(self: BulkStore, bulk: int) -> Any:
        reads.append(bulk)
        return view(self, bulk)

    monkeypatch.setattr(BulkStore, "view", noting)
    with ClusterCoordinator(three) as coordinator:
        whole_time = coordinator.schedule(waits, (tmp_path,))
        array = np.zeros(8 * MIB, np.uint8)
        values = [coordinator.schedule(add_one, (array,)) for _ in range(25)]
        assert coordinator.fetch(values) == [array.size] * 25
        assert coordinator.snapshot().held.copies == 1
        go(tmp_path)
        whole_time.fetch()
    assert len(reads) == 1


@pytest.fixture
def unreachable(no_shared_memory: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call servers of this process announce an address at which no
    process listens, as behind a router."""
    bind = Router.bind

    def elsewhere(self: Router, address: str) -> str:
        bind(self, address)
        return "127.0.0.1:13"

    return lambda: monkeypatch.setattr(Router, "bind", elsewhere)


@pytest.mark.shares_cluster
@pytest.mark.timeout(60)
def test_unreachable_coordinator_is_read_by_dispatcher(
    two: zd.local_cluster, unreachable: Callable[[], None]
) -> None:
    unreachable()
    with ClusterCoordinator(two) as coordinator:
        array = np.arange(MIB)
        assert coordinator.schedule(add_one, (array,)).fetch() == int((array + 1).sum())


@pytest.mark.timeout(60)
def test_unreachable_worker_is_read_by_dispatcher(
    unreachable: Callable[[], None],
) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        unreachable()
        with zd.WorkerServer(WorkerConfig(dispatcher.address)) as worker:
            assert worker.address == "127.0.0.1:13"
            assert np.array_equal(coordinator.schedule(np.arange, (MIB,)).fetch(), np.arange(MIB))
