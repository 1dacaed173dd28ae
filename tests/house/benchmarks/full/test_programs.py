"""The benchmark programs run: each question in a form so small that the figures mean nothing, and
systems that cannot answer."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import results, servers, systems, variables
from benchmarks.measuring import Answers, Case, Figure, Question, measure
from benchmarks.systems import SYSTEMS, Session, Unusable
from tests.house.benchmarks.tiny import FIELDS, TALKING, TINY, run_questions, systems_of


def test_lasting_processes_answer_questions(tiny: None, tmp_path: Path) -> None:
    found = run_questions(tmp_path, *TALKING, "--against", "raw,memcpy,pool,threads,sockets")
    assert {name: systems_of(found[name]) for name in TALKING} == {
        "latency": ["zmqdist", "bare pyzmq", "zmqdist, handler in a thread"],
        "calls": ["zmqdist", "bare pyzmq", "zmqdist, handler in a thread"],
        "tasks": ["zmqdist", "ProcessPoolExecutor"],
        "roundtrip": ["zmqdist", "bare pyzmq", "ProcessPoolExecutor"],
        "bandwidth": [
            "zmqdist",
            "bare pyzmq",
            "memcpy",
            "ProcessPoolExecutor",
            "zmqdist, handler in a thread",
            "zmqdist, sockets only",
        ],
        "fanout": ["zmqdist", "ProcessPoolExecutor", "zmqdist, sockets only"],
        "captured": ["zmqdist", "ProcessPoolExecutor", "zmqdist, sockets only"],
    }
    for document in found.values():
        assert set(document) == FIELDS
        assert document["skipped"] == []
        assert all(figure["median"] > 0 for figure in document["figures"])
        assert all(
            (figure["ratio"] is None) == (figure["system"] == "zmqdist")
            for figure in document["figures"]
        )
    assert found["latency"]["command"] == (
        "python -m benchmarks latency --quick --against raw,memcpy,pool,threads,sockets"
    )
    assert set(found["tasks"]["versions"]) == {"zmqdist", "ProcessPoolExecutor"}


def test_questions_to_fresh_processes_are_answered(tiny: None, tmp_path: Path) -> None:
    found = run_questions(tmp_path, "startup", "imports", "memory", "--against", "pool")
    assert [systems_of(found[name]) for name in found] == [["zmqdist", "ProcessPoolExecutor"]] * 3
    assert [figure["unit"] for figure in found["memory"]["figures"]][2:] == [
        "bytes",
        "MB",
        "MB",
        "MB",
        "tasks/s",
        "s",
    ]


def test_data_questions_with_own_and_shared_servers(tiny: None, tmp_path: Path) -> None:
    found = run_questions(
        tmp_path,
        "data_elements",
        "data_arrays",
        "data_first",
        "data_start",
        "--against",
        "inside,raw",
    )
    assert [systems_of(document) for document in found.values()] == [
        ["zmqdist", "zmqdist, one process"]
    ] * 4
    assert [figure["case"] for figure in found["data_elements"]["figures"][:2]] == [
        "one at a time",
        "in batches of 8",
    ]
    assert all(
        figure["median"] > 0 for document in found.values() for figure in document["figures"]
    )


def test_images_are_decoded_by_one_worker_and_by_two(tiny: None, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    figures = run_questions(tmp_path, "data_images", "--against", "none")["data_images"]["figures"]
    assert [(figure["case"], figure["unit"]) for figure in figures] == [
        ("1 worker", "images/s"),
        ("2 workers", "images/s"),
    ]


def test_variables_at_parameter_servers_are_changed_by_tasks(tiny: None, tmp_path: Path) -> None:
    found = run_questions(tmp_path, "ps_tasks", "ps_rows", "ps_model", "--against", "none")
    assert [figure["unit"] for document in found.values() for figure in document["figures"]] == [
        "tasks/s",
        "rows/s",
        "rows/s",
        "GB/s",
    ]
    assert all(
        figure["median"] > 0 for document in found.values() for figure in document["figures"]
    )


def test_collectives_are_measured_beside_plain_sockets(tiny: None, tmp_path: Path) -> None:
    found = run_questions(tmp_path, "collectives", "--against", "none")["collectives"]["figures"]
    assert [figure["unit"] for figure in found] == ["GB/s"] * 3 + ["us"]
    assert [figure["ratio"] is None for figure in found] == [True, False, False, True]
    assert all(figure["median"] > 0 for figure in found)


def test_growing_cost_is_measured_and_drawn(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr("benchmarks.plots.draw", lambda _, path: drawn.append(path))
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    folder = tmp_path / "benchmarks"
    assert command.main(["scale", "--quick", "--against", "none", "--write", str(folder)]) == 0
    assert drawn == [folder / "scale.png"]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "(benchmarks/scale.png)" in text
    assert "[figures](benchmarks/scale.json)" in text
    figures = json.loads((folder / "scale.json").read_text())[0]["figures"]
    assert {figure["unit"] for figure in figures} == {"us", "bytes", "%"}


def test_servers_in_one_process_are_measured(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "PARTS", 6)
    monkeypatch.setattr(servers, "SERVERS", 2)
    figures = run_questions(tmp_path, "servers", "--against", "none")["servers"]["figures"]
    assert [figure["at"] for figure in figures] == [None, *servers.FLOATS[:3]]
    assert all(figure["median"] > 0 for figure in figures)


def test_cost_of_greedy_client_is_measured(tiny: None, tmp_path: Path) -> None:
    figures = run_questions(tmp_path, "greedy", "--against", "none")["greedy"]["figures"]
    assert [figure["unit"] for figure in figures] == ["ms", "ms", "MB"]
    assert all(figure["median"] > 0 for figure in figures)


def test_variables_are_measured_beside_calls_and_memcpy(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variables, "TABLE_ROWS", 64)
    monkeypatch.setattr(variables, "ROWS", 8)
    monkeypatch.setattr(variables, "SMALL", 3)
    figures = run_questions(tmp_path, "variables", "--against", "none")["variables"]["figures"]
    assert [figure["system"] for figure in figures if figure["unit"] == "GB/s"] == [
        "zmqdist",
        "calls",
        "memcpy",
    ]
    assert all(figure["median"] > 0 for figure in figures)
    assert all((figure["ratio"] is None) == (figure["system"] == "zmqdist") for figure in figures)


def test_measurements_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import draw

    bars = [Figure("x", "a case", title, "us", 3.0, 4.0, 2.0) for title in ("zmqdist", "other")]
    lines = [Figure("x", "size", "zmqdist", "us", 10.0**at, at=10**at) for at in range(3)]
    for name, figures, curve in (
        ("bars", bars, ""),
        ("lines", lines, "size"),
        ("both", bars + lines, ""),
    ):
        answers = Answers(Question("x", "A question", "us", curve=curve), figures)
        draw(results.document(answers, {}, ""), tmp_path / f"{name}.png")
    assert all(
        (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG" for name in ("bars", "lines", "both")
    )


@pytest.fixture
def lonely(tmp_path: Path) -> str:
    """An interpreter that finds the standard library and nothing else."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "name", ["grpc", "ray", "ray-data", "dask", "ipyparallel", "parsl", "tf", "tf-data", "torch"]
)
def test_missing_peer_is_named(name: str, lonely: str) -> None:
    with pytest.raises(Unusable, match=r"^not installed \(no module named '\w+'\)$"):
        Session(SYSTEMS[name], {SYSTEMS[name].owner: lonely})


def test_missing_system_is_left_out_with_one_line(lonely: str) -> None:
    said: list[str] = []
    question = Question(
        "bandwidth", "", "B/s", cases=lambda _: [Case(str(n), {"size": n}) for n in (10, 20)]
    )
    question = replace(question, count=1)
    answers, _ = measure([question], [SYSTEMS["grpc"]], TINY, {"grpc": lonely}, said.append)
    assert answers["bandwidth"].skipped == [
        "skipped: grpcio: not installed (no module named 'grpc')"
    ]
    assert said[0] == answers["bandwidth"].skipped[0]
    assert [
        (figure.system, figure.at, figure.ratio) for figure in answers["bandwidth"].figures
    ] == [
        ("zmqdist", None, None),
        ("zmqdist", None, None),
    ]


def test_failed_question_ends_only_its_answer() -> None:
    with Session(SYSTEMS["memcpy"], {}) as session:
        with pytest.raises(
            Unusable, match="AttributeError: 'Memcpy' object has no attribute 'latency'"
        ):
            session.ask("latency", count=1)
        assert session.ask("bandwidth", count=1, size=10)[0] > 0
        assert session.version()


def test_hanging_system_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "END_LIMIT_S", 0.0)
    with (
        Session(SYSTEMS["memcpy"], {}) as session,
        pytest.raises(Unusable, match=r"no answer after 0\.01 s"),
    ):
        session.ask("bandwidth", 0.01, count=1_000_000, size=2**24)
    assert systems.marked(session.mark) == []


def test_ended_system_leaves_no_processes() -> None:
    with Session(SYSTEMS["pool"], {}) as session:
        assert session.ask("tasks", count=5)[0] > 0
        assert len(systems.marked(session.mark)) > 1
        os.kill(session.pid, signal.SIGKILL)
        with pytest.raises(Unusable, match="its process ended: exit code -9"):
            session.ask("tasks", count=5)
    assert systems.marked(session.mark) == []


def test_own_failure_is_not_blamed_on_peer() -> None:
    question = Question("fanout", "", "tasks/s", cases=lambda _: [Case("", {"wrong": 1})], count=1)
    with pytest.raises(RuntimeError, match="zmqdist itself: TypeError"):
        measure([question], [SYSTEMS["pool"]], TINY, {}, lambda _: None)
