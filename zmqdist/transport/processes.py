"""Whether a process of this host runs, as the kernel reports it."""

from __future__ import annotations


def is_alive(pid: int) -> bool:
    """Return whether a process of this host runs; a zombie does not run. If the system cannot tell,
    return True."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        # the file cannot be read, for instance because this process has no descriptor left
        return True
