"""Shared memory as the kernel offers it: memfds, mappings, seals and locks. This module works on
Linux only, and does not decide how the memory is used.

A memfd is a file without a name. It vanishes when no process has it open or mapped any more, even
if a signal killed the last process. The size of /dev/shm does not bound it. Other processes of the
same user open it through its owner's entry in /proc.

The C library makes the mappings, because Python's `mmap` keeps a descriptor for each mapping and
cannot replace a mapping in place.

Not here: who owns a block and who may write to it (shm_pool.py, shm_peer.py).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import ResourceExhaustedError
from zmqdist.files import fill_standard_streams
from zmqdist.transport.memory_limits import check_room

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


class Mapping:
    """Memory of this process that shows the content of a file. The memory is unmapped when no array
    refers to it any more.

    Attributes:
      address, nbytes: the place of the mapping in this process's memory.
    """

    __slots__ = ("address", "nbytes")

    def __init__(
        self, fd: int, nbytes: int, *, writable: bool = True, private: bool = False, offset: int = 0
    ) -> None:
        """Map part of a file. With `private`, only this mapping sees the bytes that are written to
        it.

        Raises:
          OSError: the kernel refuses the mapping.
        """
        self.nbytes = 0
        self.address = _map(
            0, fd, nbytes, offset, writable=writable, flags=_MAP_PRIVATE if private else _MAP_SHARED
        )
        self.nbytes = nbytes
        _libc.madvise(self.address, nbytes, mmap.MADV_HUGEPAGE)

    def array(self) -> NDArray[np.uint8]:
        """Return the whole mapping as a writable array, which keeps the mapping alive."""
        return _Mapped(self).array()

    def __del__(self) -> None:
        if self.nbytes:
            _libc.munmap(self.address, self.nbytes)


def make_private(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Replace a shared mapping in place by a private one of the same file, so that later writes
    stay in this process."""
    _map(address, fd, nbytes, offset, writable=True, flags=_MAP_PRIVATE | _MAP_FIXED)


def _map(address: int, fd: int, nbytes: int, offset: int, *, writable: bool, flags: int) -> int:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    got = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if got in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {nbytes} bytes: {os.strerror(number)}")
    return int(got)


def make_memfd(nbytes: int) -> int:
    """Make a memfd of fixed size, closed on exec; return its descriptor. Raises OSError."""
    fill_standard_streams()
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _ADD_SEALS, SEAL_SIZE)
    except BaseException:
        os.close(fd)
        raise
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
    try:
        return fd, Mapping(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


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
    try:
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


def seal_against_writing(fd: int) -> None:
    """Seal the file so that no process can ever write to it. Raises OSError (EBUSY) while a
    writable shared mapping of it exists."""
    fcntl.fcntl(fd, _ADD_SEALS, SEAL_WRITE)


def is_sealed_against_writing(fd: int) -> bool:
    """Return whether `seal_against_writing` has sealed the file."""
    return bool(fcntl.fcntl(fd, _GET_SEALS) & SEAL_WRITE)


def free_pages(fd: int, nbytes: int) -> None:
    """Return the memory pages of the file to the system, even while processes have them mapped. The
    file then has zeros there."""
    _libc.fallocate(fd, _FALLOC_PUNCH, 0, nbytes)


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


class _Mapped(Exporter):
    __slots__ = ("mapping",)

    def __init__(self, mapping: Mapping) -> None:
        super().__init__(mapping.address, mapping.nbytes, writable=True)
        self.mapping = mapping
