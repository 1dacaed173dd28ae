"""How much memory and how many descriptors this process may still take, and the errors for a
process that needs more.

The kernel lets processes allocate more memory than the host has, and ends one of them with SIGKILL
when they use more than there is. So this process checks before a large copy that enough memory is
available; if not, the caller gets an error with the figures and the remedies. The size of /dev/shm
does not matter, because memfds are not stored in it: they count as memory of the host and of the
control group.

Also here: `trim_heap`, which returns to the system the freed memory that the C library keeps, and
whether a process of this host runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from zmqdist.errors import ResourceExhaustedError
from zmqdist.platforms import IS_LINUX, IS_WINDOWS

LOOP_DESCRIPTORS: Final = 16
LOOP_THREADS: Final = 3
"""What a context of ZeroMQ with one or two sockets, and the thread that uses it, need. Without them
libzmq aborts the process."""
_STACK_BYTES: Final = 8 * 2**20
"""The address space for the stack of a thread, if `ulimit -s` does not name another size."""

ASSUMED_BYTES: Final = 4 * 2**30
"""The memory of a host whose system does not tell its size."""

CHECKED_BYTES_MIN: Final = 32 * 2**20
"""Bytes. Smaller amounts are not checked. From this size on the check costs little: writing to the
fresh memory takes a hundred times as long.
"""

TRIM_WORTH_ITEMS: Final = 50_000
"""The heap is trimmed only after a queue of at least this length, because a shorter queue leaves
too little memory to return."""

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_REMEDY: Final = (
    "schedule or keep less at a time (queue_bytes_max, RemoteValues that are not used any more), "
    "end other programs, or raise the limit of"
    " the control group or of `ulimit -v`; ZMQDIST_ARENA bounds shared memory, in MiB"
)


def usable_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return the bytes of memory that this process may use in all: the memory of the host, or the
    limit of its control group if that is lower. ASSUMED_BYTES on Windows.
    """
    limits = [limit for limit, _ in _limits(proc, groups)]
    if not IS_WINDOWS:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=ASSUMED_BYTES)


def private_bytes(pid: int, proc: Path = _PROC) -> int:
    """Return the bytes of memory, in RAM or swapped out, that are not in a file or in shared memory;
    0 if the process has ended. Pages that a fork has in common with its parent count."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    sizes = (line.split() for line in lines if line.startswith(("RssAnon:", "VmSwap:")))
    return sum(int(words[1]) * 1024 for words in sizes)


def usage(pid: int) -> tuple[int, float]:
    """Return the bytes of RAM that a process occupies, shared ones included, and the seconds of
    processor time that it has used; (0, 0.0) if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return int(fields[21]) * mmap.PAGESIZE, ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0, 0.0


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Return the bytes that this process may still take before the kernel has to end a process;
    None if the system does not report it."""
    room_bytes = [max(0, limit - used) for limit, used in _limits(proc, groups)]
    available = _field(proc / "meminfo", "MemAvailable:")
    if available is not None:
        room_bytes.append(available * 1024)
    return min(room_bytes, default=None)


def oom_kills(proc: Path = _PROC) -> int:
    """Return how many processes the kernel of this host has killed because memory was short; 0 if
    the kernel does not count them."""
    return _field(proc / "vmstat", "oom_kill") or 0


def check_room(nbytes: int, purpose: str) -> None:
    """Raise ResourceExhaustedError if `nbytes` bytes are not available; never if they are fewer
    than CHECKED_BYTES_MIN. `purpose` completes "no memory for ...".
    """
    if nbytes >= CHECKED_BYTES_MIN:
        available = available_bytes()
        if available is not None and nbytes > available:
            raise memory_exhausted(nbytes, purpose)


def check_descriptors_and_threads(purpose: str, descriptors: int = LOOP_DESCRIPTORS) -> None:
    """Raise ResourceExhaustedError if this process may not open so many more descriptors, or has no
    address space for LOOP_THREADS more threads. `purpose` begins the text. Only Linux is checked.
    """
    if not IS_LINUX:
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and used + descriptors > limit:
        raise ResourceExhaustedError(
            f"{purpose} needs {descriptors} descriptors, and this process has {used} of {limit}: "
            f"raise `ulimit -n`"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        needed = LOOP_THREADS * (_STACK_BYTES if stack == resource.RLIM_INFINITY else stack)
        used = int((_PROC / "self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        if used + needed > limit:
            raise ResourceExhaustedError(
                f"{purpose} needs {needed >> 20} MiB of address space for its threads, and this "
                f"process has {used >> 20} of"
                f" {limit >> 20} MiB: raise `ulimit -v`"
            )


def memory_exhausted(nbytes: int, purpose: str) -> ResourceExhaustedError:
    """Return the error for `nbytes` bytes that are not available."""
    available = available_bytes()
    there = (
        "" if available is None else f" ({available / 2**20:.0f} MiB are available to this process)"
    )
    return ResourceExhaustedError(
        f"no memory for {purpose}: {nbytes / 2**20:.0f} MiB{there}. {_REMEDY}"
    )


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of this process's control group and of each parent group.

    Pages that the kernel can write back to files do not count as used.
    """
    for folder, limit_name, used_name, stat_name in _folders(proc, groups):
        with contextlib.suppress(OSError, ValueError):  # int("max") raises: this group has no limit
            limit, used = (
                int((folder / limit_name).read_text()),
                int((folder / used_name).read_text()),
            )
            yield limit, used - (_field(folder / "memory.stat", stat_name) or 0)


def _folders(proc: Path, groups: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the folders of this process's control group and of its parents, with the names of the
    files to read.

    The search covers both versions of control groups, and for each of them the paths that a
    container sees and the paths of the host.
    """
    new = ("memory.max", "memory.current", "inactive_file")
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    own = []
    with contextlib.suppress(OSError):
        own = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    for _, controllers, path in (line for line in own if len(line) == 3):
        if controllers == "":
            top, names = groups, new
        elif "memory" in controllers.split(","):
            top, names = groups / "memory", old
        else:
            continue
        inner = top / path.lstrip("/")
        while inner != top and top in inner.parents:
            yield (inner, *names)
            inner = inner.parent
        yield (top, *names)


def _field(path: Path, name: str) -> int | None:
    """Return the number that follows `name` in a file of lines `name number`; None if the file has
    no such line."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1])
    return None


def trim_heap() -> None:
    """Return the freed memory of this process to the system. The call takes milliseconds, or a
    tenth of a second for gigabytes.

    Python and the C library retain freed memory for later use: about 60 MB after a million queued
    work items, although the process may never need that memory again.

    Does nothing if the C library has no `malloc_trim`.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def is_alive(pid: int) -> bool:
    """Return whether a process of this host runs; a zombie does not run. If the system cannot tell,
    return True."""
    if not IS_LINUX:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        # the file cannot be read, for instance because this process has no descriptor left
        return True
