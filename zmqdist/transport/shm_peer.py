"""Shared memory that other processes of this host lend to this one. shm_pool.py has the protocol.

Rules
    This process checks each handle before it uses it. The file that it opens must be a memfd of
    sealed size that contains the bytes of the handle, because mapping any other file could end this
    process. In the owner's table, this process writes only the cells of leases to this process.
    When an array and all arrays made from it were collected, this process gives the memory back to
    its owner. If the memory was lent to this process alone, this process writes the cell of the
    lease. If the memory was published, it closes the descriptor that holds the lock. Right before a
    fork, arrays that are lent to this process alone become private mappings. They are never given
    back, because the child may go on reading them.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import OrderedDict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import UnavailableError, WireError
from zmqdist.limits import SHM_CELLS, SHM_DESCRIPTOR_BYTES_MIN, SHM_MAPPED_BYTES_MAX, SHM_MAPPED_MAX
from zmqdist.transport import shm_pool
from zmqdist.transport.shm_pool import (
    EXCLUSIVE,
    FROZEN,
    FROZEN_PUBLISHED,
    NONCE_CELL,
    PUBLISHED,
    Block,
    Exporter,
    FrozenSegment,
    Handle,
    Mapping,
    Offer,
    Segment,
    _BlockMemory,
    open_memfd,
    this_pool,
)

LOCK_TRIES: Final = 1000
"""Number of attempts to lock a cell. Another process holds the cell's lock only while it looks at
the cell, and this process yields the core after each attempt.
"""

log = logging.getLogger("zmqdist.transport")


class PeerPool:
    """The shared-memory pool of one other process, or of this process if it is its own peer. Any
    thread may use it.

    Attributes:
      offer: the owner's offer.
      nonce: the random number in the owner's table. This process sends it to the owner to prove
        that it can read the table.
    """

    def __init__(self, offer: Offer) -> None:
        """Open the owner's table. Raises OSError if it cannot be opened, ValueError if it is not
        the table of a pool."""
        self.offer = offer
        pid, fd, inode = offer
        self._pid = pid
        self._table_fd = open_memfd(pid, fd, inode, nbytes=8 * SHM_CELLS)
        try:
            array = Mapping(self._table_fd, 8 * SHM_CELLS).array()
        except BaseException:
            os.close(self._table_fd)
            raise
        self._cells = memoryview(array).cast("q")  # type: ignore[arg-type]
        self.nonce = self._cells[NONCE_CELL]
        self._mapped: OrderedDict[int, Segment] = OrderedDict()
        self._opened: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()

    def close(self) -> None:
        """Close the owner's table. Only a forked child calls this, and the child does not use the
        pool afterwards."""
        if self._table_fd >= 0:
            os.close(self._table_fd)
            self._table_fd = -1

    def __del__(self) -> None:
        if "_table_fd" in self.__dict__:
            self.close()

    @property
    def alive(self) -> bool:
        """Whether the owner still has its pool. Memory that this process has mapped stays mapped
        even if the owner has ended."""
        return os.path.exists(f"/proc/{self._pid}/fd/{self.offer[1]}")

    def attach(self, handle: Handle) -> NDArray[np.uint8]:
        """Return the bytes of a handle as an array, without a copy unless the block is published
        and small.

        The array is writable and private to the caller, or read-only if the bytes are frozen. The
        owner gets the bytes back when the array and all arrays made from it were collected.

        Raises:
          UnavailableError: the owner has taken the bytes back or has ended, or the handle was
            claimed before.
          WireError: `handle` names no memory of this owner.
        """
        _, _, nbytes, offset, length, cell, serial, mode = handle
        if mode == EXCLUSIVE and offset % shm_pool.PAGE_BYTES:
            raise WireError(
                f"process {self._pid}",
                f"memory that does not begin at the beginning of a page: {handle}",
            )
        if not (
            0 <= offset <= offset + length <= nbytes
            and NONCE_CELL < cell < SHM_CELLS
            and serial > 0 < length
        ):
            raise WireError(f"process {self._pid}", f"no such memory: {handle}")
        try:
            if mode == EXCLUSIVE:
                return self._attach_exclusive(handle)
            if mode == PUBLISHED:
                return self._attach_published(handle)
            if mode in (FROZEN, FROZEN_PUBLISHED):
                return self._attach_frozen(handle)
        except ValueError as error:
            raise WireError(f"process {self._pid}", f"no such memory: {error}") from None
        except OSError as error:
            raise UnavailableError(
                f"memory of process {self._pid} cannot be mapped ({error.strerror}): it has "
                f"probably ended"
            ) from None
        raise WireError(f"process {self._pid}", f"no such way to share memory: {mode}")

    def adopt(self, handle: Handle) -> tuple[Segment, BlockLease]:
        """Claim a handle without mapping its bytes, so that the caller can lend the bytes on.
        Return the segment and the lease.

        Raises the errors of `attach`.
        """
        fd, inode, nbytes, _, _, cell, serial, mode = handle
        if mode != EXCLUSIVE:
            raise WireError(
                f"process {self._pid}", "only memory that was lent to one process can be adopted"
            )
        try:
            lease = self._claim(cell, serial)
            # all adopted blocks of the segment share one descriptor
            segment = self._opened.get(inode)
            if segment is None or segment.nbytes < nbytes:
                segment = Segment(open_memfd(self._pid, fd, inode, nbytes=nbytes), nbytes, 0, None)
                self._opened[inode] = segment
            return segment, lease
        except (OSError, ValueError) as error:
            raise UnavailableError(
                f"memory of process {self._pid} cannot be opened: {error}"
            ) from None

    # -- lent to this process alone ----------------------------------------------------------------

    def _attach_exclusive(self, handle: Handle) -> NDArray[np.uint8]:
        _, _, _, offset, length, cell, serial, _ = handle
        lease = self._claim(cell, serial)
        segment = self._mapped_segment(handle)
        hold = _ExclusiveMemory(lease, segment, offset, length)
        _exclusive_memories.add(hold)
        return hold.array()

    def _claim(self, cell: int, serial: int) -> BlockLease:
        lease = BlockLease(self)
        self._lock_cell(self._table_fd, cell, serial)
        if self._cells[cell] != serial:
            # The value -serial means that this process has claimed the block before. That claim's
            # lease still needs the cell's lock.
            if self._cells[cell] >= 0:
                shm_pool.unlock(self._table_fd, cell)
            raise self._taken_back()
        lease.cell = cell
        self._cells[cell] = -serial
        return lease

    def _lock_cell(self, fd: int, cell: int, serial: int, *, shared: bool = False) -> None:
        """Lock the cell of a valid handle. For an invalid handle raise at once, because locking the
        cell would delay the cell's next lease.
        """
        for _ in range(LOCK_TRIES):
            if self._cells[cell] != serial:
                break
            if shm_pool.try_lock(fd, cell, shared=shared):
                return
            # the owner, or a process with an old handle, holds the lock for a moment
            os.sched_yield()
        raise self._taken_back()

    def _taken_back(self) -> UnavailableError:
        return UnavailableError(
            f"process {self._pid} has taken the memory back, or lent it to another process"
        )

    def _mapped_segment(self, handle: Handle) -> Segment:
        """Return the segment of a handle, mapped shared and writable. The pool keeps the mapping
        for the next array in the segment."""
        fd, inode, nbytes = handle[:3]
        segment = self._mapped.get(inode)
        if segment is None:
            ours = open_memfd(self._pid, fd, inode, nbytes=nbytes)
            segment = Segment(ours, nbytes, 0, None)
            segment.mapping = Mapping(ours, nbytes)
            self._mapped[inode] = segment
            while len(self._mapped) > 1 and (
                len(self._mapped) > SHM_MAPPED_MAX
                or sum(other.nbytes for other in tuple(self._mapped.values()))
                > SHM_MAPPED_BYTES_MAX
            ):
                self._mapped.popitem(last=False)
        elif segment.nbytes < nbytes:
            raise ValueError(
                f"the handle says {nbytes} bytes of a segment that has {segment.nbytes}"
            )
        else:
            self._mapped.move_to_end(inode)
        return segment

    def _release(self, cell: int) -> None:
        self._cells[cell] = 0
        shm_pool.unlock(self._table_fd, cell)

    # -- published, and frozen ---------------------------------------------------------------------

    def _attach_published(self, handle: Handle) -> NDArray[np.uint8]:
        fd, inode, nbytes, offset, length, cell, serial, _ = handle
        lock = self._read_lock(cell, serial)
        ours = open_memfd(self._pid, fd, inode, nbytes=nbytes, writable=False)
        try:
            start = offset // shm_pool.PAGE_BYTES * shm_pool.PAGE_BYTES
            mapping = Mapping(ours, offset + length - start, private=True, offset=start)
        finally:
            os.close(ours)
        array = _CopyOnWriteMemory(lock, mapping, offset - start, length).array()
        # The array holds the lock, which needs a descriptor. Small arrays are copied, so that many
        # of them do not use up the descriptors.
        return array if length >= SHM_DESCRIPTOR_BYTES_MIN else array.copy()

    def _attach_frozen(self, handle: Handle) -> NDArray[np.uint8]:
        fd, inode, nbytes, offset, length, cell, serial, mode = handle
        lock = self._read_lock(cell, serial)
        frozen = _known_frozen.get(inode)
        if frozen is None:
            ours = open_memfd(self._pid, fd, inode, nbytes=nbytes, writable=False)
            if not shm_pool.is_sealed_against_writing(ours):
                os.close(ours)
                raise ValueError("the handle says that the memory is frozen, and it is not")
            frozen = _known_frozen[inode] = FrozenSegment(Segment(ours, nbytes, 0, None))
        elif frozen.segment.nbytes < nbytes:
            raise ValueError(
                f"the handle says {nbytes} bytes of a segment that has {frozen.segment.nbytes}"
            )
        if mode == FROZEN:
            # this process has mapped the segment, so the owner may use the cell for another lease
            self._cells[cell] = 0
        del lock
        return frozen.array()[offset : offset + length]

    def _read_lock(self, cell: int, serial: int) -> _ReadLock:
        # Each lock needs an open file description of its own, so that it is independent of the
        # other locks.
        # The table is opened by this process's own entry in /proc, because this entry exists even
        # after the owner has ended.
        lock = _ReadLock(os.open(f"/proc/self/fd/{self._table_fd}", os.O_RDWR | os.O_CLOEXEC))
        self._lock_cell(lock.fd, cell, serial, shared=True)
        if self._cells[cell] != serial:
            raise self._taken_back()
        return lock


class BlockLease:
    """A claimed lease of a block that is lent to this process alone. The finalizer gives the block
    back, unless a fork has shared the block.

    In a forked child, the finalizer of the lease's copy does nothing.
    """

    __slots__ = ("cell", "owner", "process", "shared_by_fork")

    def __init__(self, owner: PeerPool) -> None:
        self.owner = owner
        self.cell = 0
        """The claimed cell of the owner's table; 0 before the claim."""
        self.shared_by_fork = False
        self.process = _this_process

    def __del__(self) -> None:
        if self.cell and not self.shared_by_fork and self.process is _this_process:
            self.owner._release(self.cell)


class _ExclusiveMemory(Exporter):
    """The memory of an array that was lent to this process alone."""

    __slots__ = ("lease", "length", "offset", "segment")

    def __init__(self, lease: BlockLease, segment: Segment, offset: int, length: int) -> None:
        assert segment.mapping is not None
        super().__init__(segment.mapping.address + offset, length, writable=True)
        self.lease = lease
        self.segment = segment
        self.offset = offset
        self.length = length

    def make_private(self) -> None:
        """Replace the shared mapping by a private mapping, right before a fork. *Invariant*: blocks
        begin and end at page boundaries."""
        if self.lease.shared_by_fork:
            return
        assert self.segment.mapping is not None
        nbytes = -(-self.length // shm_pool.PAGE_BYTES) * shm_pool.PAGE_BYTES
        shm_pool.make_private(
            self.segment.mapping.address + self.offset, nbytes, self.segment.fd, self.offset
        )
        self.lease.shared_by_fork = True


class _ReadLock:
    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _CopyOnWriteMemory(Exporter):
    """The memory of an array that was lent to any number of processes: only this mapping sees the
    bytes that are written to it."""

    __slots__ = ("lock", "mapping")

    def __init__(self, lock: _ReadLock, mapping: Mapping, offset: int, length: int) -> None:
        super().__init__(mapping.address + offset, length, writable=True)
        self.lock = lock
        self.mapping = mapping


def lendable_block(array: NDArray[Any]) -> Block | None:
    """Return a block with the bytes of the array, so that the array can be lent without a copy;
    None if there is no such block.

    There is such a block if the array is a whole block of this process, or if the array begins at
    the beginning of a block that another process has lent to this process alone. Use this for an
    array that no code changes any more.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    pool = this_pool()
    if (
        pool is None
        or not isinstance(base, (_BlockMemory, _ExclusiveMemory))
        or not array.flags.forc
    ):
        return None
    if array.ctypes.data != base.array().ctypes.data:
        return None
    if isinstance(base, _ExclusiveMemory):
        return pool.adopt(base.segment, base.offset, array.nbytes, base)
    return base.block if base.block.nbytes == array.nbytes else None


_this_process = object()
"""Identity of this process; a forked child replaces it."""
_exclusive_memories: weakref.WeakSet[_ExclusiveMemory] = weakref.WeakSet()
_known_frozen: weakref.WeakValueDictionary[int, FrozenSegment] = weakref.WeakValueDictionary()
_peers: weakref.WeakValueDictionary[Offer, PeerPool] = weakref.WeakValueDictionary()


def open_peer(offer: Offer) -> PeerPool | None:
    """Return the pool that a peer offers; None if the pool cannot be opened, because the peer has
    ended or runs on another host, as another user or in another namespace.
    """
    peer = _peers.get(offer)
    if peer is None:
        try:
            peer = _peers[offer] = PeerPool(offer)
        except (OSError, ValueError):
            return None
    return peer


def _before_fork() -> None:
    for hold in list(_exclusive_memories):
        try:
            hold.make_private()
        except OSError:
            # The process may have too many mappings, for instance. The loop goes on, so that the
            # other arrays become private.
            log.exception(
                "an array in shared memory could not be made private before a fork; the child may "
                "see it change"
            )
        _shared_with_child.add(hold.lease.owner)


def _in_child() -> None:
    """Drop the pools of peers in a forked child, because the child shares the locks of their tables
    with the parent. The child opens the pools anew.
    """
    global _this_process
    _this_process = object()
    for peer in list(_peers.values()):
        if peer not in _shared_with_child:
            # If the child kept the table open, it would hold the parent's later locks, and the
            # owner would not notice the parent's end.
            peer.close()
        _inherited.append(peer)
    _peers.clear()


_inherited: list[PeerPool] = []
_shared_with_child: set[PeerPool] = set()
"""Pools of peers with arrays that this fork makes private. The set has elements only during a
fork.
"""

os.register_at_fork(
    before=_before_fork, after_in_parent=_shared_with_child.clear, after_in_child=_in_child
)
