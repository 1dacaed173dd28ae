"""A test that leaves something behind has failed, whatever it asserted.

After each test: child processes, threads of zmqdist, sockets and shared memory that were not there
before it. After each
module: processes anywhere on the machine that descend from this run, so that an orphan is found,
too. What ends in the background has `PATIENCE_S` to do so; only a test that fails waits that long.

A cluster that several tests share belongs to a fixture of module scope: it is there before the test
and is checked after the module. A test that changes it (kills one of its workers, say, which is
then replaced) is marked `shares_cluster`.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

PATIENCE_S = 20.0
ROOT = Path(__file__).resolve().parents[1]
_MARK = f"ZMQDIST_TEST_RUN={os.getpid()}"
# the standard library's, for good
_TRACKERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def pytest_configure(config: pytest.Config) -> None:
    # Hypothesis's deadline for an example is 200 ms of wall-clock time (none where CI is set),
    # which a busy machine exceeds.
    hypothesis.settings.register_profile("no deadline", hypothesis.settings(), deadline=None)
    hypothesis.settings.load_profile("no deadline")
    name, value = _MARK.split("=")
    os.environ[name] = value  # children inherit it, and theirs
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a shell; children would inherit that, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers",
        "shares_cluster: changes a cluster of module scope; checked after the module only",
    )


def pytest_collection_finish() -> None:
    """Keep the collected items, of which a process of pytest-xdist has thousands, out of each
    garbage collection of a test."""
    gc.collect()
    gc.freeze()


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:  # it has just gone, or is not ours
        return ""


def _children() -> set[str]:
    pids = {
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in _read(task / "children").split()
    }
    for zygote in [pid for pid in pids if _is_zygote(pid)]:
        # it stays; what was forked from it is ours like the rest
        pids = (pids - {zygote}) | set(
            _read(Path("/proc", zygote, "task", zygote, "children")).split()
        )
    texts = {
        f"child process {pid}: "
        f"{_read(Path('/proc', pid, 'cmdline')) or 'ended, nobody waited for it'}"
        for pid in pids
    }
    return {text for text in texts if not any(tracker in text for tracker in _TRACKERS)}


def _is_zygote(pid: str) -> bool:
    """The process of this one from which zmqdist forks children: there is one until the end,
    whoever needed it first."""
    return _read(
        Path("/proc", pid, "comm")
    ) == "zmqdist-zygote\n" and f"\nPPid:\t{os.getpid()}\n" in _read(Path("/proc", pid, "status"))


def _threads() -> set[str]:
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if "zmqdist" in thread.name
    }


def _descriptors() -> set[str]:
    found = set()
    zygotes = sys.modules.get("zmqdist.process.zygote_client")
    controls = (
        set() if zygotes is None else {str(number) for number in zygotes.control_descriptors()}
    )
    for path in Path("/proc/self/fd").iterdir():
        if path.name in controls:
            continue
        try:
            target = os.readlink(path)
        except OSError:  # the descriptor of this listing itself
            continue
        if target.startswith(("socket:", "/memfd:")) and "zmqdist-arena" not in target:
            found.add(f"descriptor {path.name}: {target}")
    return found


def _leases() -> set[str]:
    """Shared memory that is still lent; the pool itself stays for the life of the process."""
    module = sys.modules.get("zmqdist.transport.shm_pool")
    pool = None if module is None else module._pool  # reach: the public way to it would make one
    if pool is None or not pool.lease_count:
        return set()
    gc.collect()
    pool.sweep()
    return {f"lease of shared memory {number}" for number in range(pool.lease_count)}


def _belongings() -> set[str]:
    return _children() | _threads() | _descriptors() | _leases()


def _descendants() -> set[str]:
    mine = {str(os.getpid())}
    found = set()
    for folder in Path("/proc").iterdir():
        if (
            folder.name.isdigit()
            and folder.name not in mine
            and not _is_zygote(folder.name)
            and f"{_MARK} " in _read(folder / "environ") + " "
        ):
            found.add(f"process {folder.name}: {_read(folder / 'cmdline')}")
    return {text for text in found if not any(tracker in text for tracker in _TRACKERS)}


def left_behind(before: set[str], look: Callable[[], set[str]], patience_s: float) -> list[str]:
    """What `look` sees that was not there before and does not go within `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    pause = threading.Event()
    known = {_identity(text) for text in before}
    while (
        left := [text for text in look() if _identity(text) not in known]
    ) and time.monotonic() < deadline:
        pause.wait(0.01)
    return sorted(left)


def _identity(text: str) -> str:
    """A process is its number: its command line changes when it calls exec."""
    return text.partition(":")[0] if "process" in text.partition(":")[0] else text


@pytest.fixture(autouse=True, scope="module")
def _no_process_outlives_its_module() -> Iterator[None]:
    before = _descendants()
    yield
    left = left_behind(before, _descendants, PATIENCE_S)
    assert not left, "this module left processes behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _belongings()
    yield
    if (ports := sys.modules.get("tests.ports")) is not None:
        ports.release()
    if request.node.get_closest_marker("shares_cluster") is None:
        left = left_behind(before, _belongings, PATIENCE_S)
        assert not left, "this test left behind:\n" + "\n".join(left)


@pytest.fixture
def own_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of this test's own. Folders whose tests make tokens and keys use it for all of
    them.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("ZMQDIST_KEYS_DIR", "ZMQDIST_TOKEN_FILE", "ZMQDIST_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a Python program in another process, which is killed at the end. Its stdout is a pipe;
    its log stays out of that."""
    made: list[subprocess.Popen[str]] = []

    def run(program: str, *args: str) -> subprocess.Popen[str]:
        made.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *args],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return made[-1]

    yield run
    for process in made:
        process.kill()
        process.communicate()


@pytest.fixture
def port() -> int:
    """A port of loopback on which no process listens."""
    from tests.ports import free_port  # only here, because it imports zmqdist

    return free_port()
