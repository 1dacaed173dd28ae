"""An Executor together with the multiprocessing of the standard library: proxies as arguments, and
use in its children."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

import zmqdist as zd

pytestmark = pytest.mark.timeout(150)

SCRIPT = """
import multiprocessing, sys
from types import SimpleNamespace
import zmqdist as zd
from zmqdist.transport.credentials import Credentials

FACTOR = 3

def work(number):
    return number * FACTOR

def child(target, token, queue):
    found = SimpleNamespace(target=target, credentials=Credentials(token_file=token))
    with zd.Executor(found) as executor:
        queue.put((work.__module__, [executor.submit(work, number).result(60) for number in range(3)]))
        global FACTOR
        FACTOR = 4
        queue.put(executor.submit(work, 1).result(60))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with zd.local_cluster(workers=1) as cluster:
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(cluster.target, cluster.credentials.token_file, queue))
        process.start()
        print(*queue.get(), queue.get(), flush=True)
        process.join()
        print(process.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_script_functions_run_from_child_processes(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.run(
        [sys.executable, script, method], capture_output=True, text=True, timeout=100, check=False
    )
    assert process.stdout == "__mp_main__ [0, 3, 6] 4\n0\n", process.stderr


def appends(items: list[int], number: int) -> int:
    items.append(number)
    return len(items)


def test_manager_proxies_may_be_arguments() -> None:
    with (
        multiprocessing.get_context("spawn").Manager() as manager,
        zd.local_cluster(workers=1) as cluster,
        zd.Executor(cluster) as executor,
    ):
        items, event = manager.list([5]), manager.Event()
        assert executor.submit(appends, items, 6).result(60) == 2
        assert executor.submit(lambda: event.set()).result(60) is None
        assert event.wait(30)
        assert list(items) == [5, 6]
        assert sorted(executor.map(appends, [items] * 3, range(3))) == [3, 4, 5]
