"""Notebooks in a real kernel: interrupted cells, cells that run again, and what is shown below a cell.

Needs pip install zmqdist[engines].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.kernel import INTERRUPT, Shown

for package in ("nbclient", "ipykernel"):
    pytest.importorskip(package, reason="needs pip install zmqdist[engines]")

pytestmark = pytest.mark.timeout(180)

START = """
import asyncio, gc, os, threading, time
from pathlib import Path
import zmqdist as zd
cluster = zd.local_cluster(workers=2, cancel_on_interrupt=True, cancel_grace_s=0.2)
co = cluster.coordinator()
def say(text):
    print(text)
    return text
"""
LONG = f"""
values = co.map(time.sleep, [600] * 4)
print({INTERRUPT!r}, flush=True)
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNTIME", "CONFIG", "DATA"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


def shown(*cells: str, seen: str = "", file: Path | None = None) -> list[Shown]:
    """Run the cells in a kernel of their own, and return what is below each. `file` is made when
    the text `seen` is below a cell."""
    question = json.dumps({"cells": cells, "seen": seen, "file": os.fspath(file or "")})
    command = [sys.executable, "-m", "tests.engines.kernel"]
    ended = subprocess.run(
        command, input=question, capture_output=True, text=True, check=False, timeout=150
    )
    assert ended.returncode == 0, ended.stderr
    # above it stands what functions have printed
    return [Shown(**row) for row in json.loads(ended.stdout.splitlines()[-1])]


def test_interrupted_cell_cancels_what_it_scheduled() -> None:
    _, interrupted, after = shown(
        START + "executor = zd.Executor(cluster)",
        "future = executor.submit(time.sleep, 600)" + LONG + "co.gather(values)",
        "print(co.submit(abs, -3).result(), executor.submit(abs, -4).result())\n"
        "try: future.result()\nexcept BaseException as error: print(type(error).__name__)\n"
        "print({value.cancelled() for value in values})",
    )
    assert interrupted.errors == ["KeyboardInterrupt"]
    assert after.text == "3 4\nExecutorBroken\n{True}\n"


def test_interrupted_cell_leaves_earlier_work() -> None:
    *_, after = shown(
        START,
        "early = co.submit(lambda: (time.sleep(2), 7)[1])",
        LONG + "time.sleep(600)",
        "print(early.result())",
    )
    assert after.text == "7\n"


def test_interrupted_cell_cancels_calls_of_actors() -> None:
    *_, after = shown(
        START + "class Waiter:\n    async def wait(self): await asyncio.sleep(600)\n"
        "waiter = co.actor(Waiter)",
        "call = waiter.wait()" + LONG + "call.result()",
        "print(type(call.exception()).__name__)",
    )
    assert after.text == "CancelledError\n"


def test_interrupted_cell_with_await_cancels() -> None:
    # ipykernel sees the signal when the event loop wakes
    ticks = "async def tick():\n    while True: await asyncio.sleep(0.05)\n"
    _, interrupted, after = shown(
        START,
        ticks + "ticker = asyncio.create_task(tick())" + LONG + "await values[0]",
        "print({type(value.exception()).__name__ for value in values})",
    )
    assert interrupted.errors == ["CancelledError"]
    assert after.text == "{'CancelledError'}\n"


def test_work_of_interrupted_cell_goes_on_otherwise() -> None:
    *_, after = shown(
        START.replace("cancel_on_interrupt=True", "cancel_on_interrupt=False"),
        LONG + "co.gather(values)",
        "print(co.snapshot().unfinished, co.cancel_all())",
    )
    assert after.text == "4 4\n"


def test_cell_with_an_error_cancels_nothing() -> None:
    _, failed, after = shown(
        START, "value = co.submit(time.sleep, 1)\n1 / 0", "print(value.exception())"
    )
    assert failed.errors == ["ZeroDivisionError"]
    assert after.text == "None\n"


# no function prints, because ipykernel closes the socket of a thread that has printed 10 s later
AGAIN = """
cluster = zd.local_cluster(workers=1, cancel_on_interrupt=True)
co = cluster.coordinator()
executor = zd.Executor(cluster)
kept = co.options(keep=True).submit(bytes, 5_000_000)
large = co.submit(bytes, 5_000_000)
for value in zd.progress([kept, large, co.submit(abs, 1)]): value.result()
print(len(executor.submit(bytes, 1_000_000).result()))
"""

COUNT = """
def figures():
    gc.collect()
    children = sum(len((task / "children").read_text().split())
        for task in Path("/proc/self/task").iterdir())
    maps = Path("/proc/self/maps").read_text()
    return (
        threading.active_count(), children, len(os.listdir("/proc/self/fd")),
        maps.count("memfd:") + maps.count("/dev/shm"),
        sum(map(len, get_ipython().events.callbacks.values())),
        sum(type(thing).__name__ in KINDS for thing in gc.get_objects()),
    )
KINDS = ("local_cluster", "ClusterCoordinator", "ClusterExecutor", "RemoteValue", "DispatchServer")
"""

SETTLED = """
until = time.monotonic() + 40
while (now := figures()) != before and time.monotonic() < until:
    time.sleep(0.05)
print(before, now)
"""


def test_cells_that_run_again_leak_nothing() -> None:
    settled = COUNT + "time.sleep(1)\nbefore = figures()"
    *_, last = shown(START, AGAIN, AGAIN, settled, AGAIN, AGAIN, AGAIN, SETTLED)
    before, now = last.text.strip().strip("()").split(") (")
    assert before == now


def test_prints_of_functions_appear_below_the_cell(tmp_path: Path) -> None:
    waits = f"while not Path({str(tmp_path / 'seen')!r}).exists(): time.sleep(0.01)"
    *_, cell = shown(
        START,
        "1 + 1",
        f"co.submit(say, 'hello').result()\n{waits}",
        seen="hello",
        file=tmp_path / "seen",
    )
    assert cell.text in ("[worker-0] hello\n", "[worker-1] hello\n")


def test_connect_prints_below_the_cell_on_request(tmp_path: Path) -> None:
    waits = (
        f"while not Path({str(tmp_path / 'seen')!r}).exists():\n"
        "    co.submit(say, 'hello').result()\n    time.sleep(0.05)"
    )
    *_, cell = shown(
        START.replace("workers=2,", "workers=2, logs=False,"),
        "connection = zd.connect(cluster.target)\n" + waits,
        seen="] hello",
        file=tmp_path / "seen",
    )
    assert "[worker-" in cell.text


def test_bar_of_progress_is_shown_below_the_cell() -> None:
    _, cell = shown(
        START, "for value in zd.progress(co.map(abs, range(5)), label='bar'): value.result()"
    )
    (html,) = cell.html
    assert html.startswith("<progress value='5' max='5'></progress> bar: 5 of 5, ")


def test_objects_are_tables_below_the_cell() -> None:
    pytest.importorskip("uvicorn", reason="needs pip install zmqdist[dashboard]")
    start = START.replace("workers=2,", "workers=2, dashboard=True,")
    _, of_cluster, of_coordinator = shown(start, "cluster", "co")
    assert "href='http://127.0.0.1:" in of_cluster.html[0]
    assert "<th colspan=2>ClusterCoordinator</th>" in of_coordinator.html[0]
