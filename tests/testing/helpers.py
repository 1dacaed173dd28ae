"""What the functions of these tests use in their tasks, and the pipes with names by which tasks and
test wait for each other."""

from __future__ import annotations

import json
import os
import select
import threading
from pathlib import Path


def me() -> str:
    """ "worker-1", from TF_CONFIG."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    return f"{task['type']}-{task['index']}"


def for_ever() -> None:
    threading.Event().wait()


def ends(pid: int, within_s: float = 30.0) -> None:
    """Wait for the end of a process that another one waits for: the zygote, init."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(within_s * 1000), f"process {pid} goes on"
    finally:
        os.close(pidfd)


class Bell:
    """A pipe with a name. `ring` waits until somebody hears it, `hear` until somebody rings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)

    def ring(self, text: str = "") -> None:
        self.path.write_text(text)

    def hear(self) -> str:
        return self.path.read_text()
