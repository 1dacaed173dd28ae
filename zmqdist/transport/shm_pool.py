"""Shared memory that this process owns and lends to other processes of its host (ShmPool), and the
memory that they lend to this process (PeerPool).

Theory of operation
    The owner copies a large buffer once, into a block of a segment (a memfd), and sends a handle of
    eight numbers in place of the bytes. The receiver opens the segment through the owner's entry in
    /proc, maps it and can read the bytes. When no object of the receiver refers to
    the bytes any more, the receiver marks the block as free in the table, a memfd that both
    processes have mapped. Then the owner can reuse the block, which is faster than touching fresh
    memory.

    Each lease has a serial, a number that no other lease of the table ever has, and a cell in the
    table. A file lock on byte N of the table is the lock of cell N. The cell contains
        0          while the cell is free, and after the receiver has given the block back
        serial     from the lending until the receiver claims the block
        -serial    while the receiver has the block and holds the cell's lock
    A receiver locks the cell, checks that the cell contains the serial of its handle, and only then
    maps the block. The owner voids a lease only while it holds the same lock. So a receiver with a
    late handle finds another number, and never maps reused memory. The kernel releases the locks of
    a process that ends in any way. So if a cell contains -serial and its lock is free, the receiver
    was killed. A published block has one cell for any number of receivers. Each receiver maps the
    block privately (copy-on-write) and holds a read lock on the cell, which contains the serial
    until the owner takes the lease back. No process writes to such a block.

Rules
    R1  The owner writes to a block until it lends the block. Then only the receiver writes, unless
        the block is published or frozen.
    R2  The owner reuses a block only when no lease of it is left and no object in this process
        refers to it.
    R3  A finalizer takes no lock of a thread, because the garbage collector may run it in a thread
        that holds this lock, in the middle of a change to the pool. A finalizer only appends to a
        queue, which the next use of the pool processes, or writes the cell of its lease.
    R4  A forked child would see changes through each mapping that it shares with its parent. So
        right before a fork the mappings become private (copy-on-write), and their blocks are not
        reused while the child may see them.
    R5  A frozen segment is sealed, so that no process can ever write to it. It is never reused, and
        it ends with its last user.
    R6  A receiver checks each handle before it uses it. The file that it opens must be a memfd of
        sealed size that contains the bytes of the handle, because mapping any other file could end
        the process. In the owner's table, a receiver writes only the cells of its leases.
    R7  When an array and all arrays made from it were collected, the receiver gives the memory back
        to its owner. If the memory was lent to this receiver alone, the receiver writes the cell of
        the lease. If the memory was published, it closes the descriptor that holds the lock. Arrays
        that a fork has made private are never given back, because the child may go on reading them.

ZMQDIST_ARENA=off switches the pool off. A number is the pool's bound in MiB; the default is a
quarter of the memory for this process.

The kernel offers the shared memory as memfds, mappings, seals and locks, on Linux only. A memfd is
a file without a name. It vanishes when no process has it open or mapped any more, even if a signal
killed the last process. The size of /dev/shm does not bound it. Other processes of the same user
open it through its owner's entry in /proc.

The C library makes the mappings, because Python's `mmap` keeps a descriptor for each mapping and
cannot replace a mapping in place.

`memory_for` returns private memory for large arrays that this process receives or copies. Touching
fresh memory takes several times as long as writing to used memory, and the C library returns large
blocks to the system at once. So this module keeps the memory of collected arrays for the next array
of about the same size, up to RECEIVED_IDLE_BYTES_MAX.

Not here: whether a peer can open this process's segments (transfers.py), and the content of blocks
(rpc, worker).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import secrets
import stat
import struct
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from threading import Lock, RLock
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist import clock as time
from zmqdist.errors import ResourceExhaustedError, UnavailableError, WireError
from zmqdist.files import fill_standard_streams
from zmqdist.limits import (
    RECEIVED_IDLE_BYTES_MAX,
    SHM_BLOCK_BYTES_MIN,
    SHM_CELLS,
    SHM_DESCRIPTOR_BYTES_MIN,
    SHM_IDLE_BYTES_MAX,
    SHM_MAPPED_BYTES_MAX,
    SHM_MAPPED_MAX,
    SHM_SLAB_BYTES,
)
from zmqdist.platforms import IS_LINUX, register_at_fork
from zmqdist.transport.memory_limits import check_room, usable_bytes
from zmqdist.wire.arrays import FrozenMemory

log = logging.getLogger("zmqdist.transport")

MEMFD_NAME: Final = "zmqdist-arena"

_MAP_PRIVATE: Final = 0x02
_MAP_SHARED: Final = 0x01
_MAP_FIXED: Final = 0x10
_FALLOC_PUNCH: Final = 0x03
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"""
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

SEAL_SIZE: Final = 0x0002 | 0x0004
"""F_SEAL_SHRINK | F_SEAL_GROW: no process can resize the file. Shrinking it would kill, by SIGBUS,
each process that has it mapped."""
_SEAL_SHRINK: Final = 0x0002
SEAL_WRITE: Final = 0x0008
_ADD_SEALS: Final = 1033
_GET_SEALS: Final = 1034

_LOCK: Final = struct.Struct("hhqqi4x")
PAGE_BYTES: Final = mmap.PAGESIZE

_libc: Any = None
"""The C library. None on another system than Linux, where this module makes no pool."""
if IS_LINUX:
    import fcntl
    import resource

    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class Exporter:
    """An object that holds a piece of memory and makes arrays over it. The arrays, and views of
    them, refer to the object through `base`. When no array refers to it any more, the object is
    collected, and a subclass then frees the memory or gives it back.
    """

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int, *, writable: bool) -> None:
        self.__array_interface__ = {
            "data": (address, not writable),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }

    def array(self) -> NDArray[np.uint8]:
        """Return all of the memory as an array of bytes."""
        return np.asarray(self)


class MappedMemory:
    """Unmaps memory when its Mapping is gone. Not a finalizer of the Mapping itself: Python calls
    that before it clears weak references, so that another thread could get the Mapping from one
    while its memory is unmapped."""

    __slots__ = ("address", "nbytes")
    # bound here, because Python clears the names of this module before the last mappings end
    munmap: Any = staticmethod(_libc.munmap) if IS_LINUX else None

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes

    def __del__(self) -> None:
        self.munmap(self.address, self.nbytes)


class Mapping(Exporter):
    """Memory of this process that shows the content of a file. The memory is unmapped when no array
    refers to it any more.

    Attributes:
      address, nbytes: the place of the mapping in this process's memory.
    """

    __slots__ = ("_memory", "address", "nbytes")

    def __init__(
        self, fd: int, nbytes: int, *, writable: bool = True, private: bool = False, offset: int = 0
    ) -> None:
        """Map part of a file. With `private`, only this mapping sees the bytes that are written to
        it.

        Raises:
          OSError: the kernel refuses the mapping.
        """
        self.address = _map(
            0, fd, nbytes, offset, writable=writable, flags=_MAP_PRIVATE if private else _MAP_SHARED
        )
        self.nbytes = nbytes
        self._memory = MappedMemory(self.address, nbytes)
        super().__init__(self.address, nbytes, writable=writable)
        _libc.madvise(self.address, nbytes, mmap.MADV_HUGEPAGE)


def make_private(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Replace a shared mapping in place by a private one of the same file, so that later writes
    stay in this process."""
    _map(address, fd, nbytes, offset, writable=True, flags=_MAP_PRIVATE | _MAP_FIXED)


def _map(address: int, fd: int, nbytes: int, offset: int, *, writable: bool, flags: int) -> int:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    start = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if start in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {nbytes} bytes: {os.strerror(number)}")
    return int(start)


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def make_memfd(nbytes: int) -> int:
    """Make a memfd of fixed size, closed on exec; return its descriptor. Raises OSError."""
    fill_standard_streams()
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with _closed_on_error(fd):
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _ADD_SEALS, SEAL_SIZE)
    return fd


def make_mapped(nbytes: int) -> tuple[int, Mapping]:
    """Make a memfd of fixed size and map all of it; return its descriptor and the mapping.

    Raises:
      OSError: the kernel refuses the file or the mapping; or, as ENOMEM, `check_room` finds too
        little memory before the file is made.
    """
    try:
        check_room(nbytes, "it")
    except ResourceExhaustedError as error:
        raise OSError(errno.ENOMEM, error.message) from None
    fd = make_memfd(nbytes)
    with _closed_on_error(fd):
        return fd, Mapping(fd, nbytes)


def open_memfd(pid: int, fd: int, inode: int, *, nbytes: int, writable: bool = True) -> int:
    """Open another process's memfd; return a descriptor of this process.

    Raises:
      OSError: the memfd does not exist any more, may not be opened, or its descriptor number now
        belongs to another file.
      ValueError: the file is not a memfd of at least `nbytes` with a sealed size. Mapping such a
        file could end this process.
    """
    # Without O_NONBLOCK, opening a FIFO would wait until another process opens its other end.
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    ours = os.open(f"/proc/{pid}/fd/{fd}", flags)
    try:  # faster than `_closed_on_error`, because each published array is opened
        status = os.fstat(ours)
        if status.st_ino != inode:
            raise OSError(
                errno.ENOENT, f"descriptor {fd} of process {pid} now belongs to another file"
            )
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"descriptor {fd} of process {pid} is not a memfd, because it is not a regular file"
            )
        try:
            seals = fcntl.fcntl(ours, _GET_SEALS)
        except OSError:
            raise ValueError(f"descriptor {fd} of process {pid} is not a memfd") from None
        if not seals & _SEAL_SHRINK or status.st_size < nbytes:
            raise ValueError(
                f"descriptor {fd} of process {pid} has {status.st_size} bytes, or its size is not "
                f"sealed"
            )
    except BaseException:
        os.close(ours)
        raise
    return ours


def try_lock(fd: int, byte: int, *, shared: bool = False) -> bool:
    """Lock one byte of a file for this open file description. Return False if another open file
    description holds the lock.

    The kernel releases the lock when no process has the open file description any more, so that
    other processes can recognise that the holder was killed.

    Args:
      shared: take a lock for reading, which other readers may hold at the same time.
    """
    try:
        kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, byte: int) -> None:
    """Release the lock on one byte of a file."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def address_of(view: Any) -> int:
    """Return the address of the bytes of a contiguous buffer."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def same_bytes(first: int, second: int, nbytes: int) -> bool:
    """Return whether two places in this process's memory hold equal bytes. This takes as long as
    reading both places."""
    return _libc.memcmp(first, second, nbytes) == 0  # type: ignore[no-any-return]


POOL_VARIABLE: Final = "ZMQDIST_ARENA"

# Modes of a lease: one receiver maps the block writable; many map it privately; one maps it
# read-only; many map it read-only. RETURNED is the mode of an EXCLUSIVE handle that its receiver
# sends back to the owner.
EXCLUSIVE, PUBLISHED, FROZEN, FROZEN_PUBLISHED, RETURNED = range(5)

Handle: TypeAlias = tuple[int, int, int, int, int, int, int, int]
"""(descriptor, inode, size of the segment; offset, size of the block; cell, serial, mode of the
lease). The Offer names the owner."""
Offer: TypeAlias = tuple[int, int, int]
"""(pid of the owner, descriptor of its table, inode of the table)."""

NONCE_CELL: Final = 0
SWEEP_S, SWEEP_FULL_S = 1.0, 0.01
"""Least seconds between two searches for killed receivers: SWEEP_S while the pool can still grow,
SWEEP_FULL_S when it is full."""


class Segment:
    """One memfd, which this process has made, or which another process has made and this process
    keeps open.

    Attributes:
      whole: all bytes as an array, if this process has made the segment.
      capacity: bytes of each block of the segment; 0 if the segment is frozen or was made by
        another process.
      used: number of the segment's blocks that are in use.
      sealable: whether the segment can be sealed, because no other process has ever mapped it
        shared and writable.
      single_use: whether the segment's only block must not be reused.
    """

    __slots__ = (
        "__weakref__",
        "capacity",
        "fd",
        "inode",
        "mapping",
        "nbytes",
        "sealable",
        "single_use",
        "used",
        "whole",
    )

    def __init__(self, fd: int, nbytes: int, capacity: int, mapping: Mapping | None) -> None:
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self.nbytes = nbytes
        self.capacity = capacity
        self.mapping = mapping
        self.whole: Any = None if mapping is None else mapping.array()
        self.used = 0
        self.sealable = True
        self.single_use = False

    def __del__(self) -> None:
        os.close(self.fd)


class Block:
    """Bytes in shared memory that can be lent. The block is free again when no object refers to it
    and all its leases have ended.

    Attributes:
      nbytes: the size of the block.
    """

    __slots__ = ("__weakref__", "_pool", "base", "mode", "nbytes", "offset", "segment")

    def __init__(
        self,
        pool: ShmPool,
        segment: Segment,
        offset: int,
        nbytes: int,
        *,
        mode: int = EXCLUSIVE,
        base: object = None,
    ) -> None:
        self._pool = pool
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.mode = mode
        self.base = base
        """An object that must live as long as the block: the lease by which another process lends
        the bytes, or a frozen array's memory."""

    def lend(self) -> Handle | None:
        """Lend the block to one receiver, which may write to it unless it is frozen. Return None if
        too many leases exist."""
        return self._pool.lend(self, self.mode)

    def publish(self) -> Handle | None:
        """Lend the block, which no process may write to any more, to any number of receivers.
        Return None if too many leases exist."""
        return self._pool.lend(self, FROZEN_PUBLISHED if self.mode == FROZEN else PUBLISHED)

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes of the block as an array of this process. The array keeps the block in
        use."""
        if isinstance(self.base, FrozenSegment):
            return self.base.array()[self.offset : self.offset + self.nbytes]
        return _BlockMemory(self).array()

    def shows_same(self, block: Block) -> bool:
        """Return whether both blocks show the same frozen bytes."""
        mine, theirs = (
            (self.base, self.offset, self.nbytes),
            (block.base, block.offset, block.nbytes),
        )
        return isinstance(self.base, FrozenSegment) and mine == theirs

    @property
    def address(self) -> int:
        segment = self.segment
        if segment.mapping is None:
            segment.mapping = Mapping(segment.fd, segment.nbytes)
        return segment.mapping.address + self.offset

    def __del__(self) -> None:
        if self.mode == EXCLUSIVE:
            self._pool.dropped_blocks.append((self.segment, self.offset))


class _BlockMemory(Exporter):
    """The bytes of a block, as the memory of an array of this process."""

    __slots__ = ("block",)

    def __init__(self, block: Block) -> None:
        super().__init__(block.address, block.nbytes, writable=True)
        self.block = block


class FrozenSegment(Mapping, FrozenMemory):
    """The memory of an array that this or another process has frozen."""

    __slots__ = ("segment",)

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        super().__init__(segment.fd, segment.nbytes, writable=False)
        _frozen_segments.add(self)


class _FrozenSegments:
    """All frozen memory of this process, ordered by address, so that the pool can recognise a view
    of frozen memory."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._by_start: dict[int, weakref.ref[FrozenSegment]] = {}
        self.lock = RLock()

    def add(self, frozen: FrozenSegment) -> None:
        start = frozen.address
        with self.lock:
            if start not in self._by_start:
                bisect.insort(self._starts, start)
            self._by_start[start] = weakref.ref(frozen)

    def find(self, address: int, nbytes: int) -> tuple[FrozenSegment, int] | None:
        """Return the frozen memory that contains these bytes, and their offset in it; None if no
        frozen memory contains them."""
        with self.lock:
            frozen = None
            while frozen is None:
                # remove entries of freed memory, because its addresses may be in use again
                index = bisect.bisect_right(self._starts, address) - 1
                if index < 0:
                    return None
                start = self._starts[index]
                frozen = self._by_start[start]()
                if frozen is None:
                    del self._starts[index], self._by_start[start]
        return (frozen, address - start) if address + nbytes <= start + frozen.nbytes else None


_frozen_segments = _FrozenSegments()


class ShmPool:
    """The shared-memory pool of this process. Any thread may use it.

    Attributes:
      offer: the numbers by which another process finds the table of this pool.
      nonce: a random number in the table. A process that sends it to this one proves that it can
        read the table.
      bytes_max: bound on the bytes of all segments.
      dropped_blocks, to_take_back: queues to which finalizers, which take no lock (R3), append
        unused blocks, and the handles of leases. The next use of the pool makes the blocks free, and
        takes the leases back.
    """

    def __init__(self, bytes_max: int) -> None:
        """Make the table of leases. Raises OSError if the kernel refuses memfds."""
        self.bytes_max = bytes_max
        self.pid = os.getpid()
        self._table_fd = make_memfd(8 * SHM_CELLS)
        self._cells = memoryview(Mapping(self._table_fd, 8 * SHM_CELLS).array()).cast("q")  # type: ignore[arg-type]
        self.nonce = self._cells[NONCE_CELL] = secrets.randbits(62) | 1
        self.offer: Offer = (self.pid, self._table_fd, os.fstat(self._table_fd).st_ino)
        self._free_cells = list(range(SHM_CELLS - 1, NONCE_CELL, -1))
        self._serials = itertools.count(1)
        self._lent: dict[int, tuple[int, Block]] = {}
        self._revoked: dict[int, Block] = {}
        """Published blocks, by cell, whose leases were taken back while a receiver still reads
        them."""
        self._free: dict[int, list[tuple[Segment, int]]] = {}
        self._segments: dict[Segment, None] = {}
        self._idle: OrderedDict[Segment, None] = OrderedDict()
        self._idle_bytes = 0
        self.dropped_blocks: deque[tuple[Segment, int]] = deque()
        self.to_take_back: deque[Handle] = deque()
        self._user_arrays: weakref.WeakSet[_BlockMemory] = weakref.WeakSet()
        self._lock = RLock()
        self._warned = False
        self._uses_until_collect = 0
        self._swept_at = -SWEEP_S
        self._segments_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4

    # -- blocks ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Block | None:
        """Return a block to fill. Return None if the pool is full or the system refuses memory;
        then the bytes travel by sockets."""
        with self._lock:
            size = _block_size(nbytes)
            self._reclaim()
            free_block = self._pop_free(size) or self._pop_after_sweep(size) or self._grow(size)
            if free_block is None:
                return None
            segment, offset = free_block
            segment.used += 1
            if segment in self._idle:
                del self._idle[segment]
                self._idle_bytes -= segment.nbytes
            segment.sealable = False
            return Block(self, segment, offset, nbytes)

    def copy_in(self, view: Any) -> Block | None:
        """Copy a contiguous buffer into a new block, and return the block. Return None if
        `allocate` finds no block."""
        source = np.frombuffer(view, np.uint8)
        block = self.allocate(source.nbytes)
        if block is not None:
            # a slice takes a third of the time of `block.array()`
            whole = block.segment.whole
            np.copyto(whole[block.offset : block.offset + source.nbytes], source)
        return block

    def find_frozen(self, view: Any) -> Block | None:
        """Return a block that shows the bytes of a frozen array, without a copy; None if the array
        is not frozen."""
        view = memoryview(view)
        if not view.readonly or not view.nbytes:
            return None
        frozen_view = _frozen_segments.find(address_of(view), view.nbytes)
        if frozen_view is None:
            return None
        frozen, offset = frozen_view
        return Block(self, frozen.segment, offset, view.nbytes, mode=FROZEN, base=frozen)

    def user_array(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return a whole segment for one array of the program, so that `freeze` can seal it. Return
        None if there is no room."""
        with self._lock:
            self._reclaim()
            size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            segment = self._new_segment(size, size)
            if segment is None:
                return None
            # no other array uses the segment, because a frozen segment cannot be reused
            segment.single_use = True
            segment.used = 1
            memory = _BlockMemory(Block(self, segment, 0, nbytes))
            self._user_arrays.add(memory)
            return memory.array()

    # -- leases ------------------------------------------------------------------------------------

    def lend(self, block: Block, mode: int) -> Handle | None:
        """Make a lease of a block in one of the four modes, and return its handle. Return None if
        too many leases exist."""
        with self._lock:
            self._reclaim()
            if not self._free_cells:
                self.sweep()
            if not self._free_cells:
                self._warn_once(f"all {SHM_CELLS} leases are in use")
                return None
            cell = self._free_cells.pop()
            serial = next(self._serials)
            self._cells[cell] = serial
            self._lent[cell] = (serial, block)
        segment = block.segment
        return (
            segment.fd,
            segment.inode,
            segment.nbytes,
            block.offset,
            block.nbytes,
            cell,
            serial,
            mode,
        )

    def is_unclaimed(self, handle: Handle) -> bool:
        """Return whether a lease still waits for its receiver to claim it. Do not use this for a
        published block, which is not claimed."""
        return bool(self._cells[handle[5]] == handle[6])

    def take_back(self, handle: Handle) -> None:
        """Prevent receivers from claiming a lease from now on. A receiver that uses the block
        already keeps its bytes."""
        cell, serial, mode = handle[5:]
        with self._lock:
            lent_serial, block = self._lent.get(cell, (0, None))
            if lent_serial != serial or block is None:
                return
            if mode in (PUBLISHED, FROZEN_PUBLISHED):
                self._cells[cell] = 0
                del self._lent[cell]
                self._revoked[cell] = block
                self._sweep_revoked()
            else:
                self._end_lease(cell)

    def sweep(self) -> int:
        """End the leases whose receivers have given the block back or were killed. Return how many
        leases ended."""
        with self._lock:
            before = len(self._free_cells)
            self._uses_until_collect = 0
            self._end_returned()
            for cell, (serial, _) in list(self._lent.items()):
                if self._cells[cell] == -serial:
                    # a receiver that had claimed the block was killed if its lock is free
                    self._end_lease(cell)
            self._sweep_revoked()
            return len(self._free_cells) - before

    @property
    def lease_count(self) -> int:
        """Number of leases that have not ended, as far as the pool knows without reading the
        table.
        """
        return len(self._lent) + len(self._revoked)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments of the pool, used or free."""
        return sum(segment.nbytes for segment in self._segments)

    def _end_returned(self) -> None:
        """End the leases whose receivers have given the block back, and those that finalizers have
        passed to `take_back_soon`."""
        while self.to_take_back:
            self.take_back(self.to_take_back.popleft())
        cells = self._cells
        for cell in [cell for cell in self._lent if not cells[cell]]:
            # A receiver writes 0 to its cell and then unlocks it. A new lease of the cell must not
            # begin between these two steps.
            self._end_lease(cell)

    def _end_lease(self, cell: int) -> None:
        """End a lease, unless a receiver holds the lock of its cell."""
        if try_lock(self._table_fd, cell):
            self._cells[cell] = 0
            leases = self._lent if cell in self._lent else self._revoked
            del leases[cell]
            self._free_cells.append(cell)
            unlock(self._table_fd, cell)

    def _sweep_revoked(self) -> None:
        for cell in list(self._revoked):
            self._end_lease(cell)

    # -- segments ----------------------------------------------------------------------------------

    def _reclaim(self) -> None:
        """Make dropped blocks free. In every n/16th call, where n is the number of leases, also
        read all cells and end returned leases."""
        self._uses_until_collect -= 1
        if self._uses_until_collect <= 0:
            self._end_returned()
            self._uses_until_collect = len(self._lent) // 16
        while self.dropped_blocks:
            segment, offset = self.dropped_blocks.popleft()
            if segment not in self._segments:
                # the segment belongs to another process, which reuses the block itself
                continue
            segment.used -= 1
            if segment.single_use:
                if not segment.used:
                    del self._segments[segment]
                continue
            self._free.setdefault(segment.capacity, []).append((segment, offset))
            if not segment.used:
                self._idle[segment] = None
                self._idle_bytes += segment.nbytes
        while self._idle_bytes > SHM_IDLE_BYTES_MAX:
            self._close_idle()

    def _pop_free(self, size: int) -> tuple[Segment, int] | None:
        """Return a free block of this size; None if there is no such block. The block that was in
        use last is returned first."""
        free = self._free.get(size)
        while free:
            segment, offset = free.pop()
            if segment in self._segments:
                return segment, offset
        return None

    def _pop_after_sweep(self, size: int) -> tuple[Segment, int] | None:
        """Search for killed receivers, and return a block of this size that has become free; None
        if there is no such block.

        The search costs a system call for each lease, so it is made at most once in SWEEP_S or, if
        the pool is full, in SWEEP_FULL_S.
        """
        now = time.monotonic()
        full = self.nbytes + size > self.bytes_max
        if now < self._swept_at + SWEEP_S and not (full and now > self._swept_at + SWEEP_FULL_S):
            return None
        self._swept_at = now
        self.sweep()
        self._reclaim()
        return self._pop_free(size)

    def _grow(self, size: int) -> tuple[Segment, int] | None:
        nbytes = max(size, SHM_SLAB_BYTES // size * size)
        segment = self._new_segment(nbytes, size)
        if segment is None:
            return None
        blocks = [(segment, offset) for offset in range(nbytes - size, -1, -size)]
        first = blocks.pop()
        self._free.setdefault(size, []).extend(blocks)
        return first

    def _new_segment(self, nbytes: int, capacity: int) -> Segment | None:
        if nbytes > self.bytes_max:
            log.info(
                "%d bytes do not fit into shared memory, whose bound is %d", nbytes, self.bytes_max
            )
            return None
        while self._idle and (
            self.nbytes + nbytes > self.bytes_max or len(self._segments) >= self._segments_max
        ):
            self._close_idle()
        if self.nbytes + nbytes > self.bytes_max:
            self._warn_once(f"{self.nbytes >> 20} of {self.bytes_max >> 20} MiB are in use")
            return None
        if len(self._segments) >= self._segments_max:
            self._warn_once(
                f"{self._segments_max} segments are in use, a quarter of the descriptors that "
                f"this process may have"
            )
            return None
        try:
            fd, mapping = make_mapped(nbytes)
        except OSError as error:
            self._warn_once(f"the system refuses {nbytes} bytes: {error.strerror}")
            return None
        segment = Segment(fd, nbytes, capacity, mapping)
        self._segments[segment] = None
        return segment

    def _close_idle(self) -> None:
        """Drop the segment that was unused for longest, and return its pages to the system.
        Processes may map it, but none uses a block."""
        segment, _ = self._idle.popitem(last=False)
        self._idle_bytes -= segment.nbytes
        del self._segments[segment]
        _libc.fallocate(segment.fd, _FALLOC_PUNCH, 0, segment.nbytes)

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "no room in shared memory (%s): large arrays travel by sockets, which is slower",
                why,
            )

    # -- freezing ----------------------------------------------------------------------------------

    def freeze(self, address: int, nbytes: int) -> FrozenSegment | None:
        """Seal and return the segment of an array from `user_array`. Return None for any other
        array, or if the segment cannot be sealed.

        Before the sealing, the array's own mapping becomes private, so that later writes through
        the array stay in this process.
        """
        with self._lock:
            for memory in self._user_arrays:
                block = memory.block
                if block.address == address and block.nbytes == nbytes and block.segment.sealable:
                    break
            else:
                return None
            segment = block.segment
            make_private(address, segment.nbytes, segment.fd, 0)
            segment.sealable = False
            return self._seal(os.dup(segment.fd), segment.nbytes)

    def frozen_copy(self, source: NDArray[np.uint8]) -> FrozenSegment | None:
        """Return a frozen copy of any bytes. Return None if the system refuses memory."""
        size = -(-source.nbytes // PAGE_BYTES) * PAGE_BYTES
        try:
            fd, mapping = make_mapped(size)
        except OSError as error:
            self._warn_once(f"the system refuses {size} bytes: {error.strerror}")
            return None
        np.copyto(mapping.array()[: source.nbytes], source)
        del mapping  # a file with a writable mapping cannot be sealed
        return self._seal(fd, size)

    def _seal(self, fd: int, nbytes: int) -> FrozenSegment | None:
        try:
            # the kernel refuses this (EBUSY) while a writable shared mapping of the file exists
            fcntl.fcntl(fd, _ADD_SEALS, SEAL_WRITE)
            return FrozenSegment(Segment(fd, nbytes, 0, None))
        except OSError:  # a child that was forked without the hooks below has the file mapped
            os.close(fd)
            return None

    # -- forks -------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Make the arrays of `user_array` private before a fork (R4). No other thread can use the
        pool until `after_fork`."""
        self._lock.acquire()
        for memory in list(self._user_arrays):
            segment = memory.block.segment
            if segment.sealable:
                make_private(memory.block.address, segment.nbytes, segment.fd, 0)
                segment.sealable = False

    def after_fork(self) -> None:
        """Unlock the pool in the parent after a fork."""
        self._lock.release()


def _block_size(nbytes: int) -> int:
    """Return the block size for `nbytes`. There are few sizes, so that blocks are reused. Above
    SHM_SLAB_BYTES at most 1/8 is wasted."""
    power = 1 << max(nbytes - 1, 1).bit_length()
    if power <= SHM_SLAB_BYTES:
        return max(power, SHM_BLOCK_BYTES_MIN)
    step = power // 16
    return -(-nbytes // step) * step


# -- the pool of this process ----------------------------------------------------------------------

_pool: ShmPool | None = None
_tried = False
_lock = RLock()


def this_pool() -> ShmPool | None:
    """Return the pool of this process; make it on first use. Return None if it is switched off, or
    if the system has no shared memory."""
    if _tried:
        return _pool
    with _lock:
        if not _tried:
            _make()
    return _pool


def _make() -> None:
    global _pool, _tried
    setting = os.environ.get(POOL_VARIABLE, "")
    is_number = setting.isascii() and setting.isdecimal()
    if setting not in ("", "off") and not is_number:
        log.warning(
            '%s is %r, wants "off" or a number of MiB: the default is used', POOL_VARIABLE, setting
        )
    if setting != "off" and IS_LINUX:
        try:
            _pool = ShmPool(int(setting) << 20 if is_number else usable_bytes() // 4)
        except (OSError, AttributeError) as error:
            log.warning(
                "no shared memory here (%s): large arrays travel by sockets, which is slower", error
            )
    _tried = True


# -- memory that other processes lend ---------------------------------------------------------------

LOCK_TRIES: Final = 1000
"""Number of attempts to lock a cell. Another process holds the cell's lock only while it looks at
the cell, and this process yields the core after each attempt.
"""


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
        self._cells = memoryview(Mapping(self._table_fd, 8 * SHM_CELLS).array()).cast("q")  # type: ignore[arg-type]
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
        if mode == EXCLUSIVE and offset % PAGE_BYTES:
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
        memory = ExclusiveMemory(lease, self._mapped_segment(handle), offset, length)
        memory.handle = handle
        return memory.array()

    def returned(self, block: Block) -> NDArray[np.uint8]:
        """Return the bytes of a block that this process has lent to the peer alone, and that the
        peer gives back with its reply. The caller may write to them."""
        lease = BlockLease(self)
        memory = ExclusiveMemory(lease, block.segment, block.offset, block.nbytes, block)
        return memory.array()

    def _claim(self, cell: int, serial: int) -> BlockLease:
        lease = BlockLease(self)
        self._lock_cell(self._table_fd, cell, serial)
        if self._cells[cell] != serial:
            # The value -serial means that this process has claimed the block before. That claim's
            # lease still needs the cell's lock.
            if self._cells[cell] >= 0:
                unlock(self._table_fd, cell)
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
            if try_lock(fd, cell, shared=shared):
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
                or sum(mapped.nbytes for mapped in tuple(self._mapped.values()))
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
        unlock(self._table_fd, cell)

    # -- published, and frozen ---------------------------------------------------------------------

    def _attach_published(self, handle: Handle) -> NDArray[np.uint8]:
        fd, inode, nbytes, offset, length, cell, serial, _ = handle
        lock = self._read_lock(cell, serial)
        ours = open_memfd(self._pid, fd, inode, nbytes=nbytes, writable=False)
        try:
            start = offset // PAGE_BYTES * PAGE_BYTES
            mapping = _CopyOnWriteMapping(ours, offset + length - start, private=True, offset=start)
        finally:
            os.close(ours)
        mapping.lock = lock
        array = mapping.array()[offset - start :]
        # The array holds the lock, which needs a descriptor. Small arrays are copied, so that many
        # of them do not use up the descriptors.
        return array if length >= SHM_DESCRIPTOR_BYTES_MIN else array.copy()

    def _attach_frozen(self, handle: Handle) -> NDArray[np.uint8]:
        fd, inode, nbytes, offset, length, cell, serial, mode = handle
        lock = self._read_lock(cell, serial)
        frozen = _known_frozen.get(inode)
        if frozen is None:
            ours = open_memfd(self._pid, fd, inode, nbytes=nbytes, writable=False)
            if not fcntl.fcntl(ours, _GET_SEALS) & SEAL_WRITE:
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


class ExclusiveMemory(Exporter):
    """The memory of an array that was lent to this process alone, or that this process has lent
    and got back.

    Attributes:
      nbytes: the size of the memory.
      block: the block of this process that it got back; None if another process has lent the memory.
      handle, call: the handle of the lease, and the call that it came with (BulkChannel.call_of).
    """

    __slots__ = ("block", "call", "handle", "lease", "nbytes", "offset", "segment")

    def __init__(
        self,
        lease: BlockLease,
        segment: Segment,
        offset: int,
        nbytes: int,
        block: Block | None = None,
    ) -> None:
        assert segment.mapping is not None
        super().__init__(segment.mapping.address + offset, nbytes, writable=True)
        self.lease = lease
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.block = block
        self.handle: Handle | None = None
        self.call: object = None
        _exclusive_memories.add(self)

    def make_private(self) -> None:
        """Replace the shared mapping by a private mapping, right before a fork. *Invariant*: blocks
        begin and end at page boundaries."""
        if self.lease.shared_by_fork:
            return
        assert self.segment.mapping is not None
        nbytes = -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES
        make_private(
            self.segment.mapping.address + self.offset, nbytes, self.segment.fd, self.offset
        )
        self.lease.shared_by_fork = True
        if self.block is not None:
            _inherited.append(self.block)  # this process does not map the block any more


class _ReadLock:
    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _CopyOnWriteMapping(Mapping):
    """The memory of an array that was lent to any number of processes: only this mapping sees the
    bytes that are written to it."""

    __slots__ = ("lock",)
    lock: _ReadLock


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
        or not isinstance(base, (_BlockMemory, ExclusiveMemory))
        or not array.flags.forc
    ):
        return None
    if array.ctypes.data != base.array().ctypes.data:
        return None
    if isinstance(base, ExclusiveMemory):
        if base.lease.shared_by_fork:
            return None
        if base.block is not None:
            return base.block if base.nbytes == array.nbytes else None
        return Block(pool, base.segment, base.offset, array.nbytes, base=base)
    return base.block if base.block.nbytes == array.nbytes else None


def whole_memory(view: Any) -> ExclusiveMemory | None:
    """Return the memory that another process has lent to this process alone, if `view` is a
    memoryview of all its bytes; otherwise None."""
    base: Any = view.obj if type(view) is memoryview else None
    while isinstance(base, np.ndarray):
        base = base.base
    if type(base) is not ExclusiveMemory or base.nbytes != view.nbytes:
        return None
    return None if base.handle is None or base.lease.shared_by_fork else base


_this_process = object()
"""Identity of this process; a forked child replaces it."""
_exclusive_memories: weakref.WeakSet[ExclusiveMemory] = weakref.WeakSet()
_known_frozen: weakref.WeakValueDictionary[int, FrozenSegment] = weakref.WeakValueDictionary()
_peers: weakref.WeakValueDictionary[Offer, PeerPool] = weakref.WeakValueDictionary()


def open_peer(offer: Offer) -> PeerPool | None:
    """Return the pool that a peer offers; None if the pool cannot be opened, because the peer has
    ended or runs on another host, as another user or in another namespace, or because this system
    has no pools.
    """
    if not IS_LINUX:
        return None
    peer = _peers.get(offer)
    if peer is None:
        try:
            peer = _peers[offer] = PeerPool(offer)
        except (OSError, ValueError):
            return None
    return peer


# -- forks -----------------------------------------------------------------------------------------


def _before_fork() -> None:
    for memory in list(_exclusive_memories):
        try:
            memory.make_private()
        except OSError:
            # The process may have too many mappings, for instance. The loop goes on, so that the
            # other arrays become private.
            log.exception(
                "an array in shared memory could not be made private before a fork; the child may "
                "see it change"
            )
        _shared_with_child.add(memory.lease.owner)
    _lock.acquire()
    if _pool is not None:
        _pool.before_fork()


def _after_fork() -> None:
    if _pool is not None:
        _pool.after_fork()
    _lock.release()
    _shared_with_child.clear()


def _in_child() -> None:
    """Forget the parent's pools in a forked child, which makes and opens its own. The parent's
    arrays keep the inherited mappings."""
    global _pool, _tried, _lock, _this_process
    _inherited.append(_pool)
    # another thread of the parent may have held the lock during the fork
    _frozen_segments.lock = RLock()
    _received.lock = Lock()
    _pool, _tried = None, False
    _lock = RLock()
    _this_process = object()
    # the child shares the locks of the peers' tables with the parent
    for peer in list(_peers.values()):
        if peer not in _shared_with_child:
            # If the child kept the table open, it would hold the parent's later locks, and the
            # owner would not notice the parent's end.
            peer.close()
        _inherited.append(peer)
    _peers.clear()


_inherited: Final[list[object]] = []
"""In a forked child, the parent's pools. The child does not close them, because arrays of the child
still use their mappings. Also blocks that a fork has made private, which are never reused."""
_shared_with_child: Final[set[PeerPool]] = set()
"""Pools of peers with arrays that this fork makes private. The set has elements only during a
fork.
"""

register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


# -- private memory for arrays that arrive ---------------------------------------------------------

_KEPT_BYTES_MIN = 2**20
"""Bytes. Smaller arrays get no memory of the pool, because the C library itself keeps smaller freed
blocks for later use."""


class ReceivedMemory(Exporter):
    """The memory of one array. The array and its views keep this object alive; its finalizer gives
    the memory back to the pool."""

    __slots__ = ("_memory", "_pool")

    def __init__(self, memory: NDArray[np.uint8], nbytes: int) -> None:
        super().__init__(memory.__array_interface__["data"][0], nbytes, writable=True)
        self._memory = memory
        self._pool = _received

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


class _ReceivePool:
    """Free memory in the order in which it was given back. `give_back` takes no lock, because
    finalizers call it at any point of any thread.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._free: list[NDArray[np.uint8]] = []
        self._returned: deque[NDArray[np.uint8]] = deque()

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        if (
            memory.nbytes + sum(idle.nbytes for idle in tuple(self._returned))
            <= RECEIVED_IDLE_BYTES_MAX
        ):
            self._returned.append(memory)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        with self.lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            while sum(memory.nbytes for memory in self._free) > RECEIVED_IDLE_BYTES_MAX:
                del self._free[0]
            for index in reversed(range(len(self._free))):
                if nbytes <= self._free[index].nbytes <= nbytes + nbytes // 4:
                    return self._free.pop(index)
        return np.empty(nbytes, np.uint8)


_received = _ReceivePool()


def memory_for(nbytes: int) -> NDArray[np.uint8]:
    """Return `nbytes` uninitialized bytes that no other array uses. Raises MemoryError."""
    if nbytes < _KEPT_BYTES_MIN:
        return np.empty(nbytes, np.uint8)
    return ReceivedMemory(_received.take(nbytes), nbytes).array()
