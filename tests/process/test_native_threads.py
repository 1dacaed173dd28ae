"""gevent and eventlet replace threads by greenlets: one sentence says that zmqdist needs
threads.
"""

from __future__ import annotations

import _thread
import importlib.util
import queue
import select
import subprocess
import sys
import types
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.background import check_threads
from zmqdist.errors import FailedPreconditionError
from zmqdist.rpc import Client, ZmqServer

TOLD = "has replaced Python's threads in this process \\(monkey patching\\), and zmqdist needs them: use zmqdist in another"

PATCHES: dict[str, tuple[types.ModuleType, str]] = {
    "threads": (_thread, "start_new_thread"),
    "queues": (queue, "SimpleQueue"),
    "polls": (select, "epoll"),
}


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize("patched", PATCHES)
def test_patched_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, library: str, patched: str
) -> None:
    module, name = PATCHES[patched]

    def replaced(*args: Any) -> None:
        """What the library has in place of the function."""

    replaced.__module__ = f"{library}.thread"
    monkeypatch.setitem(sys.modules, library, types.ModuleType(library))
    check_threads()
    monkeypatch.setattr(module, name, replaced)
    for begin in (
        lambda: zd.local_cluster(workers=1),
        lambda: zd.local_cluster(workers=1, processes=False),
        lambda: ZmqServer("127.0.0.1:0").start(),
        lambda: Client.create("zmq", "127.0.0.1:1", "", 100),
    ):
        with pytest.raises(FailedPreconditionError, match=f"{library} {TOLD}"):
            begin()


def test_debugger_may_replace_thread_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", lambda *args: None)
    check_threads()


@pytest.mark.parametrize(
    "patch",
    ["from gevent import monkey; monkey.patch_all()", "import eventlet; eventlet.monkey_patch()"],
)
@pytest.mark.parametrize(
    "order", ["{patch}; import zmqdist as zd", "import zmqdist as zd; {patch}"]
)
def test_patching_libraries_are_refused(patch: str, order: str) -> None:
    library = patch.split()[1].rstrip(";")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = f"{order.format(patch=patch)}; zd.local_cluster(workers=1)"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=50
    )
    assert f"FailedPreconditionError: {library} has replaced" in ended.stderr
