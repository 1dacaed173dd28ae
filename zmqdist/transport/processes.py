"""What the kernel knows about processes of this host."""

from __future__ import annotations


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs; a zombie does not. True where that cannot be told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # out of descriptors, say
        return True
