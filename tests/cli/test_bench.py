"""`zmqdist bench` and `python -m benchmarks`: that they run and answer every question; the figures are nobody's business here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import imports, memory, startup
from benchmarks.__main__ import main as benchmarks_main
from tests.cli.conftest import Open
from tests.cli.running import run
from zmqdist.observe import bench
from zmqdist_cli.main import main

TINY = bench.Plan(blocks=1, calls=3, window=4, windows=1, tasks=10, sizes=(bench.MIB,), transfers=1)
ROOT = Path(__file__).resolve().parents[2]


def test_bench_answers_every_question_in_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "QUICK", TINY)
    assert main(["bench", "--quick"]) == 0
    told = capsys.readouterr()
    names = ("blocking call", "calls, 4 on the way", "no-op tasks", "task, schedule to result", "result of 1 MiB")
    assert all(f"  {name}" in told.out for name in names)
    assert told.err == ""


def test_bench_measures_calls_to_a_peer_as_json(terminal: Open) -> None:
    peer = terminal("bench", "--serve", "127.0.0.1:0")
    address = peer.saw("benchmark peer at").split()[-1]
    done = run("bench", "--peer", address, "--quick", "--json")
    assert done.code == 0, done.err
    assert [figure["unit"] for figure in json.loads(done.out)["figures"]] == ["us", "us", "calls/s"]
    peer.interrupt()
    assert peer.ends() == 0


@pytest.mark.parametrize(("name", "count"), [("imports", 2), ("memory", 5), ("startup", 2)])
def test_a_small_run_of_a_benchmark_of_processes_gives_its_figures(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "TASKS_QUICK", 100)
    monkeypatch.setattr(memory, "SETTLE_S", 0.0)
    figures = {"imports": imports, "memory": memory, "startup": startup}[name].measure(TINY)
    assert all(figure.ours >= 0 for figure in figures)
    assert len(figures) == count


def test_the_benchmarks_are_run_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "QUICK", TINY)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", "calls"])
    assert benchmarks_main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"{os.cpu_count()}", "question", "blocking", "blocking", "calls,"]


def test_an_unknown_question_is_refused_with_the_list() -> None:
    command = [sys.executable, "-m", "benchmarks", "speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "no question 'speed'; there are: calls, tasks" in done.stderr
