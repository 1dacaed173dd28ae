"""`zmqdist bench`: that it runs and answers every question; the figures are nobody's business
here.
"""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Open
from tests.cli.helpers import run_here
from zmqdist.observe import bench
from zmqdist_cli.main import main

TINY = bench.BenchPlan(
    blocks=1, calls=3, window=4, windows=1, tasks=10, sizes=(bench.MIB,), transfers=1
)


def test_bench_answers_every_question_in_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "QUICK", TINY)
    assert main(["bench", "--quick"]) == 0
    text = capsys.readouterr()
    names = (
        "blocking call",
        "calls, 4 on the way",
        "no-op tasks",
        "task, schedule to result",
        "result of 1 MiB",
    )
    assert all(f"  {name}" in text.out for name in names)
    assert text.err == ""


def test_bench_measures_calls_to_a_peer_as_json(
    terminal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "QUICK", TINY)
    peer = terminal("bench", "--serve", "127.0.0.1:0")
    address = peer.saw("benchmark peer at").split()[-1]
    result = run_here("bench", "--peer", address, "--quick", "--json")
    assert result.code == 0, result.err
    assert [figure["unit"] for figure in json.loads(result.out)["figures"]] == [
        "us",
        "us",
        "calls/s",
    ]
    peer.interrupt()
    assert peer.ends() == 0
