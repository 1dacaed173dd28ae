"""`zmqdist dashboard` and `zmqdist launch --dashboard`, by the links that they print."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.cli.conftest import Open
from tests.cli.helpers import Terminal, run_here
from tests.observe.dashboard.visitor import Visitor

FILE = """
name: test
program: python program.py
jobs:
  worker: {count: 1}
"""


def facts_of(terminal: Terminal) -> dict[str, object]:
    """The first facts that the page of the printed link gets."""
    link = terminal.saw("dashboard: ").partition("dashboard: ")[2]
    visitor = Visitor(link)
    with visitor.stream(visitor.token()) as messages:
        facts: dict[str, object] = next(messages)["facts"]
        return facts


def test_dashboard_serves_facts_until_interrupt(terminal: Open, dispatcher_here: str) -> None:
    shown = terminal("dashboard", dispatcher_here)
    assert facts_of(shown)["address"] == dispatcher_here
    shown.saw("the link was used; a new one: http://127.0.0.1:")
    shown.interrupt()
    assert shown.ends() == 0


def test_dashboard_of_no_dispatcher_is_refused() -> None:
    result = run_here("dashboard", "127.0.0.1:1", "--timeout", "0.2")
    assert (result.code, result.out) == (3, "")
    assert "no dispatcher answered" in result.err


def test_launch_prints_the_link_of_its_dashboard(terminal: Open, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE.replace("program.py", f"{tmp_path}/program.py"))
    (tmp_path / "program.py").write_text("import signal; signal.pause()")
    shown = terminal("launch", "--dashboard", str(tmp_path / "cluster.yaml"))
    assert facts_of(shown)["pid"] == shown.pid
    shown.process.send_signal(signal.SIGTERM)
    assert shown.ends() == 128 + signal.SIGTERM
