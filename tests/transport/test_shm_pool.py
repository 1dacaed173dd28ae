"""Shared memory between processes of one host: which peers get it, when blocks return, and what a
receiver must check."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.errors import InvalidArgumentError, UnavailableError, WireError
from zmqdist.limits import SHM_CELLS
from zmqdist.transport import shm_pool
from zmqdist.transport.memory_limits import usable_bytes
from zmqdist.transport.shm_pool import (
    EXCLUSIVE,
    FROZEN,
    FROZEN_PUBLISHED,
    PUBLISHED,
    PeerPool,
    ShmPool,
    open_peer,
    this_pool,
)
from zmqdist.wire.arrays import is_frozen

MIB = 2**20
PATIENCE_S = 20


@pytest.fixture
def owner() -> Iterator[ShmPool]:
    yield ShmPool(256 * MIB)
    gc.collect(0)


@pytest.fixture
def receiver(owner: ShmPool) -> PeerPool:
    return PeerPool(owner.offer)


def ramp(nbytes: int) -> np.ndarray[Any, Any]:
    return np.arange(nbytes // 8, dtype=np.int64).view(np.uint8)


def lend(owner: ShmPool, data: np.ndarray[Any, Any]) -> shm_pool.Handle:
    block = owner.copy_in(data)
    assert block is not None
    handle = block.lend()
    assert handle is not None
    return handle


# -- one owner, one receiver -----------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [8, 65_544, 3 * MIB, 33 * MIB])
def test_lent_copy_is_whole_and_writable(owner: ShmPool, receiver: PeerPool, nbytes: int) -> None:
    data = ramp(nbytes)
    got = receiver.attach(lend(owner, data))
    assert np.array_equal(got, data)
    assert got.flags.writeable


def test_sender_may_change_its_array_at_once(owner: ShmPool, receiver: PeerPool) -> None:
    data = ramp(MIB)
    handle = lend(owner, data)
    data[:] = 0
    assert np.array_equal(receiver.attach(handle), ramp(MIB))


def test_block_returns_with_receivers_array(owner: ShmPool, receiver: PeerPool) -> None:
    data = ramp(40 * MIB)
    for _ in range(3):
        lend(owner, data)  # and the borrower never claims it
        got = receiver.attach(lend(owner, data))
        del got
    assert owner.nbytes <= 4 * 40 * MIB
    owner.sweep()


def test_view_keeps_received_memory(owner: ShmPool, receiver: PeerPool) -> None:
    got = receiver.attach(lend(owner, ramp(MIB)))
    part = got.view(np.int64)[10:20]
    del got
    other = receiver.attach(lend(owner, np.zeros(MIB, np.uint8)))
    assert part.tolist() == list(range(10, 20))
    del other, part
    owner.sweep()
    assert owner.lease_count == 0


def test_handle_works_once(owner: ShmPool, receiver: PeerPool) -> None:
    handle = lend(owner, ramp(MIB))
    first = receiver.attach(handle)
    with pytest.raises(UnavailableError):
        receiver.attach(handle)
    assert np.array_equal(first, ramp(MIB))


def test_late_handle_finds_no_reused_memory(owner: ShmPool, receiver: PeerPool) -> None:
    late = lend(owner, ramp(MIB))
    owner.take_back(late)
    again = lend(owner, np.zeros(MIB, np.uint8))
    assert again[:5] == late[:5], "the block was not used again"
    with pytest.raises(UnavailableError, match="taken the memory back"):
        receiver.attach(late)
    assert not receiver.attach(again).any()


def test_claimed_block_stays_with_borrower(owner: ShmPool, receiver: PeerPool) -> None:
    handle = lend(owner, ramp(MIB))
    got = receiver.attach(handle)
    owner.take_back(handle)
    other = lend(owner, np.zeros(MIB, np.uint8))
    assert other[:4] != handle[:4]
    assert np.array_equal(got, ramp(MIB))
    owner.take_back(other)


def test_hoarding_peer_fills_pool_only(caplog: Any) -> None:
    owner = ShmPool(64 * MIB)
    receiver = PeerPool(owner.offer)
    data, kept = np.ones(4 * MIB, np.uint8), []
    while (block := owner.copy_in(data)) is not None:
        handle = block.lend()
        assert handle is not None
        kept.append(receiver.attach(handle))
        del block
    assert owner.copy_in(data) is None
    assert len(kept) == 16
    assert owner.nbytes <= owner.bytes_max
    assert (
        len([record for record in caplog.records if "no room in shared memory" in record.message])
        == 1
    )
    kept.clear()
    assert owner.copy_in(data) is not None


def test_free_segments_make_room() -> None:
    owner = ShmPool(64 * MIB)
    big = owner.copy_in(np.ones(50 * MIB, np.uint8))
    assert big is not None
    del big
    assert owner.copy_in(np.ones(MIB, np.uint8)) is not None
    assert owner.copy_in(np.ones(25 * MIB, np.uint8)) is not None
    assert owner.nbytes <= owner.bytes_max


def test_leases_are_bounded(owner: ShmPool) -> None:
    block = owner.copy_in(ramp(MIB))
    assert block is not None
    handles = [block.lend() for _ in range(SHM_CELLS - 1)]
    assert None not in handles
    assert block.lend() is None
    for handle in handles:
        assert handle is not None
        owner.take_back(handle)
    assert owner.lease_count == 0


def test_published_block_is_private_to_receivers(owner: ShmPool, receiver: PeerPool) -> None:
    block = owner.copy_in(ramp(MIB))
    assert block is not None
    handle = block.publish()
    assert handle is not None
    first, second = receiver.attach(handle), receiver.attach(handle)
    first[:] = 0
    assert np.array_equal(second, ramp(MIB))
    assert np.array_equal(receiver.attach(handle), ramp(MIB))
    owner.take_back(handle)


def test_published_block_returns_after_last_reader(owner: ShmPool, receiver: PeerPool) -> None:
    block = owner.copy_in(ramp(MIB))
    assert block is not None
    handle = block.publish()
    assert handle is not None
    first, second = receiver.attach(handle), receiver.attach(handle)
    place = handle[:5]
    owner.take_back(handle)
    del block
    with pytest.raises(UnavailableError):
        receiver.attach(handle)
    del first
    other = lend(owner, np.zeros(MIB, np.uint8))
    assert other[:5] != place
    assert np.array_equal(second, ramp(MIB))
    del second
    owner.sweep()
    assert owner.lease_count == 1
    assert lend(owner, np.zeros(MIB, np.uint8))[:5] == place


# -- handles that lie ------------------------------------------------------------------------------


def changed(handle: shm_pool.Handle, **changes: int) -> Any:
    names = ("fd", "inode", "nbytes", "offset", "length", "cell", "serial", "mode")
    altered = dict(zip(names, handle, strict=True)) | changes
    return tuple(altered[name] for name in names)


LIES = [
    {"offset": -1},
    {"offset": 2**40},
    {"length": 2**40},
    {"length": -5},
    {"length": 0},
    {"nbytes": 2**40, "length": 2**39},
    {"cell": 0},
    {"cell": SHM_CELLS},
    {"cell": -3},
    {"serial": 0},
    {"serial": 999},
    {"inode": 1},
    {"fd": 10**6},
    {"fd": -1},
    {"mode": 9},
    {"mode": shm_pool.FROZEN},
]


def test_wrong_handle_is_refused(owner: ShmPool, receiver: PeerPool) -> None:
    for lie in LIES:
        handle = lend(owner, ramp(MIB))
        try:
            receiver.attach(changed(handle, **lie))
        except (WireError, UnavailableError):
            owner.take_back(handle)
        else:
            raise AssertionError(f"{lie} was believed")


def test_file_that_is_no_memfd_is_not_mapped(
    owner: ShmPool, receiver: PeerPool, tmp_path: Any
) -> None:
    handle = lend(owner, ramp(MIB))
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(40 * MIB)
        altered = changed(handle, fd=file.fileno(), inode=os.fstat(file.fileno()).st_ino)
        with pytest.raises(WireError, match="not a memfd"):
            receiver.attach(altered)
    owner.sweep()


@pytest.mark.parametrize("mode", [EXCLUSIVE, PUBLISHED, FROZEN, FROZEN_PUBLISHED])
def test_fifo_is_refused_without_wait(
    owner: ShmPool, receiver: PeerPool, tmp_path: Any, mode: int
) -> None:
    handle = lend(owner, ramp(MIB))
    os.mkfifo(tmp_path / "fifo")
    # it has no writer, so a process that opens it for reading waits for one
    fd = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(WireError, match="not a regular file"):
            receiver.attach(changed(handle, fd=fd, inode=os.fstat(fd).st_ino, mode=mode))
    finally:
        os.close(fd)
    owner.sweep()


def test_memfd_of_open_size_is_not_mapped(owner: ShmPool, receiver: PeerPool) -> None:
    handle = lend(owner, ramp(MIB))
    fd = os.memfd_create("zmqdist-arena")
    os.ftruncate(fd, 40 * MIB)
    altered = changed(handle, fd=fd, inode=os.fstat(fd).st_ino)
    with pytest.raises(WireError, match="its size is not sealed"):
        receiver.attach(altered)
    os.close(fd)
    owner.sweep()


def test_unreadable_offer_is_ignored() -> None:
    assert open_peer((2**22 - 1, 5, 77)) is None
    assert open_peer((os.getpid(), 0, 1)) is None


# -- frozen arrays ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    ["f4", "i8", ">f8", "c16", "M8[ns]", "?", "U7", [("a", "i4"), ("b", "f8", (3,))]],
    ids=str,
)
@pytest.mark.parametrize("count", [3, 40_000])
def test_freezing_keeps_values_shape_and_dtype(dtype: Any, count: int) -> None:
    array = zd.empty((count, 2), np.dtype(dtype))
    array.view(np.uint8)[:] = 0
    frozen = zd.freeze(array)
    assert frozen.dtype == array.dtype
    assert frozen.shape == array.shape
    assert frozen.tobytes() == array.tobytes()
    assert is_frozen(frozen)
    assert not frozen.flags.writeable


@pytest.mark.parametrize("make", [zd.empty, np.empty], ids=["shared", "plain"])
@pytest.mark.parametrize("count", [10, MIB])
def test_older_views_do_not_change_frozen_array(make: Callable[..., Any], count: int) -> None:
    array = make(count, np.float64)
    array[:] = 1
    view = array[:5]
    frozen = zd.freeze(array)
    view[:] = 7
    array[-1] = 8
    assert (frozen == 1).all()
    assert array[0] == 7
    assert array[-1] == 8


def test_frozen_array_stays_read_only() -> None:
    frozen = zd.freeze(np.ones(MIB))
    with pytest.raises(ValueError, match="WRITEABLE"):
        frozen.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        frozen[0] = 2


def inode_at(address: int) -> int:
    """Return the file that this process has mapped at this address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                return int(line.split()[4])
    raise AssertionError("nothing is mapped there")


def test_freezing_in_place_needs_one_segment() -> None:
    array = zd.empty(4 * MIB, np.uint8)
    array[:] = 3
    frozen = zd.freeze(array)
    assert inode_at(shm_pool.address_of(frozen)) == inode_at(shm_pool.address_of(array)) > 0


def test_freezing_again_gives_same_array() -> None:
    frozen = zd.freeze(np.ones(MIB))
    assert zd.freeze(frozen) is frozen


def test_part_of_frozen_array_is_not_copied(owner: ShmPool) -> None:
    frozen = zd.freeze(np.arange(MIB, dtype=np.float64))
    found = owner.find_frozen(memoryview(frozen[1000:2000]))
    assert found is not None
    assert found.nbytes == 8000
    assert owner.find_frozen(memoryview(np.ones(MIB))) is None


def test_frozen_array_outlives_its_maker(owner: ShmPool, receiver: PeerPool) -> None:
    frozen = zd.freeze(np.arange(MIB, dtype=np.int64))
    block = owner.find_frozen(memoryview(frozen.view(np.uint8)))
    assert block is not None
    handle = block.lend()
    assert handle is not None
    got = receiver.attach(handle)
    del frozen, block
    owner.sweep()
    assert not got.flags.writeable
    assert np.array_equal(got.view(np.int64), np.arange(MIB))


def test_frozen_array_replaces_collected_one(owner: ShmPool) -> None:
    for count in (1, 7, 34):
        smaller = [zd.freeze(np.ones(count * MIB, np.uint8)) for _ in range(3)]
        del smaller
        frozen = zd.freeze(np.ones(34 * MIB, np.uint8))
        assert all(
            owner.find_frozen(memoryview(frozen[start * MIB :])) is not None for start in range(34)
        )
        del frozen


@pytest.mark.parametrize("bad", [[1, 2], 3.0, None, "text"], ids=repr)
def test_arrays_alone_can_be_frozen(bad: Any) -> None:
    with pytest.raises(TypeError, match="takes a plain array"):
        zd.freeze(bad)


def test_object_arrays_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="objects"):
        zd.empty(3, object)
    with pytest.raises(InvalidArgumentError, match="objects"):
        zd.freeze(np.array([object()]))


def test_empty_like_keeps_memory_order() -> None:
    model = np.empty((300, 500), np.float32, order="F")
    assert zd.empty_like(model).flags.f_contiguous
    assert zd.freeze(model).flags.f_contiguous


# -- other processes -------------------------------------------------------------------------------


def keep(connection: Any) -> None:
    """A receiver: it gets offers and handles, and sends the values that it sees."""
    peer = open_peer(connection.recv())
    assert peer is not None
    kept = []
    while (handle := connection.recv()) is not None:
        kept.append(peer.attach(handle))
        connection.send(int(kept[-1].view(np.int64).sum()))


@pytest.fixture
def keeper(owner: ShmPool) -> Iterator[tuple[Any, Any]]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=keep, args=(theirs,), daemon=True)
    process.start()
    ours.send(owner.offer)
    yield process, ours
    process.kill()
    process.join()
    process.close()
    ours.close()
    theirs.close()


@pytest.mark.processes("shared memory")
@pytest.mark.killed("shared memory")
def test_killed_receiver_returns_blocks(owner: ShmPool, keeper: tuple[Any, Any]) -> None:
    process, connection = keeper
    published = owner.copy_in(ramp(MIB))
    assert published is not None
    handles = [lend(owner, ramp(MIB)) for _ in range(3)]
    handles.append(published.publish())  # type: ignore[arg-type]
    for handle in handles:
        connection.send(handle)
        assert connection.poll(PATIENCE_S)
        assert connection.recv() == int(np.arange(MIB // 8).sum())
    owner.take_back(handles[-1])
    owner.sweep()
    assert owner.lease_count == 4
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    owner.sweep()
    assert owner.lease_count == 0


@pytest.mark.timeout(60)
def test_killed_owner_leaves_array_whole(tmp_path: Any) -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=offer_one, args=(theirs,), daemon=True)
    process.start()
    offer, first, second = ours.recv()
    peer = open_peer(offer)
    assert peer is not None
    got = peer.attach(first)
    process.kill()
    process.join()
    assert np.array_equal(got, ramp(MIB))
    with pytest.raises(UnavailableError, match=r"cannot be mapped|taken"):
        peer.attach(second)
    process.close()
    ours.close()
    theirs.close()


def offer_one(connection: Any) -> None:
    pool = this_pool()
    assert pool is not None
    connection.send((pool.offer, lend(pool, ramp(MIB)), lend(pool, ramp(40 * MIB))))
    connection.recv()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", ["lent", "returned", "published", "empty"])
def test_fork_separates_writes(owner: ShmPool, receiver: PeerPool, way: str) -> None:
    if way == "empty":
        array = zd.empty(MIB, np.uint8)
        array[:] = 1
    else:
        block = owner.copy_in(np.ones(MIB, np.uint8))
        assert block is not None
        if way == "returned":
            array = receiver.returned(block)
        else:
            array = receiver.attach(block.lend() if way == "lent" else block.publish())  # type: ignore[arg-type]
        del block
    to_child, from_child = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            array[:10] = 5
            os.write(from_child[1], b"w")
            os.read(to_child[0], 1)
            os.write(from_child[1], bytes(array[[0, 20, 30]]))
        finally:
            os._exit(0)
    assert os.read(from_child[0], 1) == b"w"
    assert array[0] == 1
    array[20] = 9
    os.write(to_child[1], b"x")
    assert os.read(from_child[0], 3) == bytes([5, 1, 1])
    os.waitpid(pid, 0)
    for fd in (*to_child, *from_child):
        os.close(fd)


def test_memory_shared_by_fork_is_not_reused(owner: ShmPool, receiver: PeerPool) -> None:
    handle = lend(owner, ramp(MIB))
    got = receiver.attach(handle)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    del got
    owner.sweep()
    other = lend(owner, ramp(MIB))
    assert other[:4] != handle[:4]
    owner.take_back(other)


def test_forked_child_has_own_pool() -> None:
    pool = this_pool()
    assert pool is not None
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            other = this_pool()
            os.write(
                write,
                b"y"
                if other is not None and other is not pool and other.nonce != pool.nonce
                else b"n",
            )
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b"y"
    os.close(read)
    os.close(write)


@pytest.mark.timeout(60)
def test_threads_never_lose_blocks(owner: ShmPool, receiver: PeerPool) -> None:
    """A receiver writes its cell before it unlocks it; between the two the next lease of that cell
    must not begin."""
    changed: list[int] = []
    interval = sys.getswitchinterval()

    def work(first: int) -> None:
        held: list[tuple[int, Any]] = []
        for number in range(200):
            value = (7 * number + first) % 251
            block = owner.copy_in(np.full(70_000, value, np.uint8))
            handle = None if block is None else block.lend()
            del block
            if handle is None:
                continue
            held.append((value, receiver.attach(handle)))
            if len(held) > 6:
                value, array = held.pop(0)
                changed.extend([value] * bool((array != value).any()))
                del array
            if number % 17 == 0:
                owner.sweep()

    threads = [threading.Thread(target=work, args=(31 * first,)) for first in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not changed


def test_old_handle_does_not_disturb_next_lease(owner: ShmPool, receiver: PeerPool) -> None:
    late = lend(owner, ramp(MIB))
    owner.take_back(late)
    handle = lend(owner, ramp(MIB))
    other = PeerPool(owner.offer)
    table = other._table_fd  # reach: the lock of a receiver that has not looked at the number first
    assert shm_pool.try_lock(table, handle[5])
    unlocker = threading.Timer(0.0, lambda: shm_pool.unlock(table, handle[5]))
    unlocker.start()
    assert np.array_equal(receiver.attach(handle), ramp(MIB))
    unlocker.join()


def test_mapped_blocks_share_descriptor(owner: ShmPool, receiver: PeerPool) -> None:
    adopted = [receiver.adopt(lend(owner, ramp(MIB))) for _ in range(10)]
    assert len({id(segment) for segment, _ in adopted}) == 1
    adopted.clear()


def test_small_arrays_have_no_segment() -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [zd.empty(10_000) for _ in range(100)] + [zd.freeze(np.ones(10_000)) for _ in range(100)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert all(is_frozen(array) for array in kept[100:])


def test_child_freezes_beside_freezing_parent() -> None:
    lock = (
        shm_pool._frozen_segments.lock
    )  # reach: a fork while a thread freezes cannot be timed from outside
    lock.acquire()
    try:
        pid = os.fork()
        if pid == 0:
            freezing = threading.Thread(target=lambda: zd.freeze(np.ones(MIB)), daemon=True)
            freezing.start()
            freezing.join(30)
            os._exit(freezing.is_alive())
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        lock.release()


@pytest.mark.parametrize(
    "array", [np.ma.ones(4), np.rec.array([(1,)])], ids=lambda a: type(a).__name__
)
def test_subclasses_of_array_are_refused(array: Any) -> None:
    for make in (zd.freeze, zd.empty_like):
        with pytest.raises(TypeError, match="takes a plain array"):
            make(array)


# -- without shared memory -------------------------------------------------------------------------


@pytest.fixture
def without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_pool, "_pool", None)
    monkeypatch.setattr(shm_pool, "_tried", False)


def test_shared_memory_can_be_switched_off(
    without_shared_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(shm_pool.POOL_VARIABLE, "off")
    assert this_pool() is None
    frozen = zd.freeze(zd.empty(MIB))
    assert is_frozen(frozen)


def test_refused_memfds_cause_one_log_line(
    without_shared_memory: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def refused(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert this_pool() is None
    assert this_pool() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "large arrays travel by sockets" in caplog.text


def test_missing_memory_causes_one_log_line(
    owner: ShmPool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def refused(nbytes: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shm_pool, "make_memfd", refused)
    assert owner.copy_in(ramp(MIB)) is None
    assert owner.copy_in(ramp(MIB)) is None
    assert caplog.text.count("Cannot allocate memory") == 1


def test_pool_bound_is_set_by_variable(
    without_shared_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(shm_pool.POOL_VARIABLE, "64")
    pool = this_pool()
    assert pool is not None
    assert pool.bytes_max == 64 * MIB


@pytest.mark.parametrize("junk", ["junk", "64 MiB", "-1", "\N{SUPERSCRIPT TWO}", "Off"])
def test_invalid_pool_bound_is_logged_once(
    junk: str, without_shared_memory: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv(shm_pool.POOL_VARIABLE, junk)
    for _ in range(2):
        pool = this_pool()
        assert pool is not None
        assert pool.bytes_max == usable_bytes() // 4
    (record,) = caplog.records
    assert (
        record.getMessage()
        == f'ZMQDIST_ARENA is {junk!r}, wants "off" or a number of MiB: the default is used'
    )


def test_lock_ends_with_its_file_description() -> None:
    fd = shm_pool.make_memfd(4096)
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    assert shm_pool.try_lock(other, 5)
    assert not shm_pool.try_lock(fd, 5)
    assert shm_pool.try_lock(fd, 6)
    os.close(other)
    assert shm_pool.try_lock(fd, 5)
    os.close(fd)


def test_memory_is_unmapped_after_its_weak_references_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another thread gets the mapping from one, and reads memory that is gone."""
    fd, mapping = shm_pool.make_mapped(4096)
    reference = weakref.ref(mapping)
    seen: list[object] = []
    unmap = shm_pool.MappedMemory.munmap

    def look(address: int, nbytes: int) -> int:
        seen.append(reference())
        return int(unmap(address, nbytes))

    monkeypatch.setattr(shm_pool.MappedMemory, "munmap", staticmethod(look))
    del mapping
    os.close(fd)
    assert seen == [None]
