"""A program that somebody types into `python -i`, as in a notebook: functions of __main__, Ctrl-C,
a closed cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduling.work import until

pytestmark = pytest.mark.timeout(120)


class Session:
    """A Python whose standard input is typed line by line."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-i", "-u", "-q"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])},
                process_group=0,
            )

    def type(self, *lines: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.process.stdin.flush()

    def says(self, pattern: str) -> str:
        match = until(lambda: re.search(pattern, self.output.read_text()), pattern, within_s=60)
        return str(match.group())


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path)
    session.type(
        "import time, zmqdist as zd",
        "cluster = zd.local_cluster(workers=1)",
        "coordinator = zd.ClusterCoordinator(cluster, cancel_grace_s=0.2)",
    )
    yield session
    session.type("coordinator.close()", "cluster.close()", "print('the ' + 'end')")
    session.says("the end")
    assert session.process.stdin is not None
    session.process.stdin.close()
    assert session.process.wait(30) == 0


def test_typed_function_runs_and_can_be_replaced(session: Session) -> None:
    session.type(
        "factor = 2",
        "def scaled(x):",
        "    return x * factor",
        "",
        "value = coordinator.submit(scaled, 21)",
    )
    session.type("print('result', value.result(timeout=30))")
    session.says("result 42")
    session.type(
        "def scaled(x):",
        "    return -x * factor",
        "",
        "print('now', coordinator.submit(scaled, 21).result(30))",
    )
    session.says("now -42")
    session.type(
        "values = coordinator.map(lambda x: x + factor, range(3))",
        "print('all', coordinator.gather(values, timeout=30))",
    )
    session.says(r"all \[2, 3, 4\]")
    session.type(
        "class Pair:",
        "    def __init__(self, a): self.a = a",
        "",
        "pair = coordinator.submit(Pair, 5).result(30)",
    )
    session.type("print('same', type(pair) is Pair, pair.a)")
    session.says("same True 5")


@pytest.mark.parametrize(
    "call",
    [
        "value.result()",
        "value.exception()",
        "coordinator.gather([value])",
        "coordinator.wait([value])",
        "list(coordinator.as_completed([value]))",
        "coordinator.join()",
        "coordinator.run(time.sleep, 60)",
    ],
)
def test_ctrl_c_ends_wait_and_session_stays_usable(session: Session, call: str) -> None:
    session.type("from tests.scheduling.coordinator.helpers import interrupt_when_waiting")
    session.type("value = coordinator.submit(time.sleep, 60)", f"interrupt_when_waiting(); {call}")
    session.says("KeyboardInterrupt")
    session.type("print('cancelled', coordinator.cancel_all() <= 1)")
    session.says("cancelled True")
    session.type("coordinator.join(30)", "print('usable', coordinator.submit(abs, -3).result(30))")
    session.says("usable 3")


def test_closed_coordinator_raises_and_never_hangs(session: Session) -> None:
    session.type(
        "coordinator.submit(abs, -1).result(30)", "pending = coordinator.submit(time.sleep, 60)"
    )
    session.type("coordinator.close()", "pending.result()")
    session.says("CancelledError: time.sleep was cancelled")
    for call in ("submit(abs, -1)", "map(abs, [1])", "run(abs, -1)", "cancel_all()", "workers()"):
        session.type(f"coordinator.{call}", f"print({call!r}, 'done')")
        session.says(re.escape(f"{call} done"))
    assert (
        len(
            re.findall("Error: this ClusterCoordinator has been closed", session.output.read_text())
        )
        == 5
    )
    session.type("print(coordinator)")
    session.says(r"<ClusterCoordinator of zmq://localhost:\d+: closed>")
