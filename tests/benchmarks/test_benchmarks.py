"""The benchmarks run: each question in a form so small that the figures mean nothing, and what is said about who cannot answer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import crowd, measuring, memory, results, servers, simulated, systems, variables
from benchmarks.measuring import Answers, Case, Figure, Plan, Question, Side, measure
from benchmarks.systems import OURS, SYSTEMS, Session, Unusable

TINY = Plan(
    blocks=2,
    starts=1,
    block_s=0.01,
    count_max=8,
    sizes=(2**10, 2**20),
    fanout_bytes=2**17,
    ring_bytes=2**21,
    element_bytes=2**12,
    model_bytes=2**20,
    queued=50,
    queued_each=40,
    workers=(2, 5, 10),
    tasks=(10, 50, 200),
)
TALKING = ["latency", "calls", "tasks", "roundtrip", "bandwidth", "fanout"]
FIELDS = {"question", "title", "curve", "command", "date", "machine", "versions", "figures", "skipped"}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUICK", TINY)
    monkeypatch.setattr(memory, "SETTLE_S", 0.0)
    monkeypatch.setattr(crowd, "WATCH_S", 0.05)
    monkeypatch.setattr(crowd, "SETTLE_S", 0.0)


def asked(folder: Path, *arguments: str) -> dict[str, results.Document]:
    """The documents of one run of the command, by question."""
    file = folder / "figures.json"
    assert command.main([*arguments, "--quick", "--json", str(file)]) == 0
    return {found["question"]: found for found in json.loads(file.read_text())}


def systems_of(found: results.Document) -> list[str]:
    return list(dict.fromkeys(figure["system"] for figure in found["figures"]))


def test_questions_to_processes_that_stay_are_answered_by_all_that_need_no_package(tiny: None, tmp_path: Path) -> None:
    found = asked(tmp_path, *TALKING, "--against", "raw,memcpy,pool,threads,sockets")
    assert {name: systems_of(found[name]) for name in TALKING} == {
        "latency": ["zmqdist", "bare pyzmq", "zmqdist, handler in a thread"],
        "calls": ["zmqdist", "bare pyzmq", "zmqdist, handler in a thread"],
        "tasks": ["zmqdist", "ProcessPoolExecutor"],
        "roundtrip": ["zmqdist", "bare pyzmq", "ProcessPoolExecutor"],
        "bandwidth": ["zmqdist", "bare pyzmq", "memcpy", "ProcessPoolExecutor", "zmqdist, sockets only"],
        "fanout": ["zmqdist", "ProcessPoolExecutor", "zmqdist, sockets only"],
    }
    for document in found.values():
        assert set(document) == FIELDS
        assert document["skipped"] == []
        assert all(figure["median"] > 0 for figure in document["figures"])
        assert all((figure["ratio"] is None) == (figure["system"] == "zmqdist") for figure in document["figures"])
    assert found["latency"]["command"] == (
        "python -m benchmarks latency --quick --against raw,memcpy,pool,threads,sockets"
    )
    assert set(found["tasks"]["versions"]) == {"zmqdist", "ProcessPoolExecutor"}


def test_questions_to_fresh_processes_are_answered(tiny: None, tmp_path: Path) -> None:
    found = asked(tmp_path, "startup", "imports", "memory", "--against", "pool")
    assert [systems_of(found[name]) for name in found] == [["zmqdist", "ProcessPoolExecutor"]] * 3
    assert [figure["unit"] for figure in found["memory"]["figures"]][2:] == ["bytes", "MB", "MB", "MB", "tasks/s", "s"]


def test_questions_about_data_are_answered_by_servers_of_their_own_and_by_those_of_one_process(
    tiny: None, tmp_path: Path
) -> None:
    found = asked(tmp_path, "data_elements", "data_arrays", "data_first", "data_start", "--against", "inside,raw")
    assert [systems_of(document) for document in found.values()] == [["zmqdist", "zmqdist, one process"]] * 4
    assert [figure["case"] for figure in found["data_elements"]["figures"][:2]] == ["one at a time", "in batches of 8"]
    assert all(figure["median"] > 0 for document in found.values() for figure in document["figures"])


def test_images_are_decoded_by_one_worker_and_by_two(tiny: None, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    figures = asked(tmp_path, "data_images", "--against", "none")["data_images"]["figures"]
    assert [(figure["case"], figure["unit"]) for figure in figures] == [
        ("1 worker", "images/s"),
        ("2 workers", "images/s"),
    ]


def test_variables_at_parameter_servers_are_changed_by_tasks(tiny: None, tmp_path: Path) -> None:
    found = asked(tmp_path, "ps_tasks", "ps_rows", "ps_model", "--against", "none")
    assert [figure["unit"] for document in found.values() for figure in document["figures"]] == [
        "tasks/s",
        "rows/s",
        "rows/s",
        "GB/s",
    ]
    assert all(figure["median"] > 0 for document in found.values() for figure in document["figures"])


def test_collectives_are_measured_beside_plain_sockets(tiny: None, tmp_path: Path) -> None:
    found = asked(tmp_path, "collectives", "--against", "none")["collectives"]["figures"]
    assert [figure["unit"] for figure in found] == ["GB/s"] * 3 + ["us"]
    assert [figure["ratio"] is None for figure in found] == [True, False, False, True]
    assert all(figure["median"] > 0 for figure in found)


def test_the_cost_as_it_grows_is_measured_and_drawn_and_written_into_the_page(
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
    assert "| beat, idle |" in text
    assert "[scale.json](benchmarks/scale.json)" in text
    figures = json.loads((folder / "scale.json").read_text())[0]["figures"]
    assert {figure["unit"] for figure in figures} == {"us", "bytes", "%"}


def test_a_cluster_of_servers_in_one_process_is_measured(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "PARTS", 6)
    monkeypatch.setattr(servers, "SERVERS", 2)
    figures = asked(tmp_path, "servers", "--against", "none")["servers"]["figures"]
    assert [figure["at"] for figure in figures] == [None, *servers.FLOATS[:3]]
    assert all(figure["median"] > 0 for figure in figures)


def test_variables_are_measured_beside_calls_and_memcpy(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variables, "TABLE_ROWS", 64)
    monkeypatch.setattr(variables, "ROWS", 8)
    monkeypatch.setattr(variables, "SMALL", 3)
    figures = asked(tmp_path, "variables", "--against", "none")["variables"]["figures"]
    assert [figure["system"] for figure in figures if figure["unit"] == "GB/s"] == ["zmqdist", "calls", "memcpy"]
    assert all(figure["median"] > 0 for figure in figures)
    assert all((figure["ratio"] is None) == (figure["system"] == "zmqdist") for figure in figures)


def test_what_is_measured_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import draw

    bars = [Figure("x", "a case", title, "us", 3.0, 4.0, 2.0) for title in ("zmqdist", "other")]
    lines = [Figure("x", "size", "zmqdist", "us", 10.0**at, at=10**at) for at in range(3)]
    for name, figures, curve in (("bars", bars, ""), ("lines", lines, "size"), ("both", bars + lines, "")):
        answers = Answers(Question("x", "A question", "us", curve=curve), figures)
        draw(results.document(answers, {}, ""), tmp_path / f"{name}.png")
    assert all((tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG" for name in ("bars", "lines", "both"))


# -- who cannot answer --------------------------------------------------------------------------------------------------


@pytest.fixture
def lonely(tmp_path: Path) -> str:
    """An interpreter that finds the standard library and nothing else."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("name", ["grpc", "ray", "ray-data", "dask", "ipyparallel", "parsl", "tf", "tf-data", "torch"])
def test_a_peer_that_is_not_installed_says_so(name: str, lonely: str) -> None:
    with pytest.raises(Unusable, match=r"^not installed \(no module named '\w+'\)$"):
        Session(SYSTEMS[name], {SYSTEMS[name].owner: lonely})


def test_an_interpreter_that_is_not_there_is_told() -> None:
    with pytest.raises(Unusable, match=r"^/nowhere/python does not start: No such file or directory$"):
        Session(SYSTEMS["ray"], {"ray": "/nowhere/python"})


def test_who_is_not_installed_is_left_out_of_a_question_with_one_line(lonely: str) -> None:
    said: list[str] = []
    question = Question("bandwidth", "", "B/s", cases=lambda _: [Case(str(n), {"size": n}) for n in (10, 20)])
    question = replace(question, count=1)
    answers, _ = measure([question], [SYSTEMS["grpc"]], TINY, {"grpc": lonely}, said.append)
    assert answers["bandwidth"].skipped == ["skipped: grpcio: not installed (no module named 'grpc')"]
    assert said[0] == answers["bandwidth"].skipped[0]
    assert [(figure.system, figure.at, figure.ratio) for figure in answers["bandwidth"].figures] == [
        ("zmqdist", None, None),
        ("zmqdist", None, None),
    ]


def test_a_question_that_fails_is_the_end_of_that_answer_only() -> None:
    with Session(SYSTEMS["memcpy"], {}) as session:
        with pytest.raises(Unusable, match="AttributeError: 'Memcpy' object has no attribute 'latency'"):
            session.ask("latency", count=1)
        assert session.ask("bandwidth", count=1, size=10)[0] > 0
        assert session.version()


def test_who_hangs_is_given_up_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "END_LIMIT_S", 0.0)
    with Session(SYSTEMS["memcpy"], {}) as session, pytest.raises(Unusable, match=r"no answer after 0\.01 s"):
        session.ask("bandwidth", 0.01, count=1_000_000, size=2**24)
    assert systems._marked(session._mark) == []


def test_who_ends_takes_what_it_started_with_it_and_its_last_words_are_told() -> None:
    with Session(SYSTEMS["pool"], {}) as session:
        assert session.ask("tasks", count=5)[0] > 0
        assert len(systems._marked(session._mark)) > 1
        session._process.kill()
        with pytest.raises(Unusable, match="its process ended: exit code -9"):
            session.ask("tasks", count=5)
    assert systems._marked(session._mark) == []


def test_a_failure_of_our_own_is_not_blamed_on_the_other() -> None:
    question = Question("fanout", "", "tasks/s", cases=lambda _: [Case("", {"wrong": 1})], count=1)
    with pytest.raises(RuntimeError, match="zmqdist itself: TypeError"):
        measure([question], [SYSTEMS["pool"]], TINY, {}, lambda _: None)


# -- how it is compared -------------------------------------------------------------------------------------------------


class Told(Side):
    """A system whose blocks answer what they were told."""

    def __init__(self, *values: float) -> None:
        super().__init__(OURS, {})
        self._values = iter(values)

    def block(self, question: Question, case: Case, count: int) -> list[float]:
        return [next(self._values)]


@pytest.mark.parametrize(("unit", "ratio"), [("us", 0.5), ("tasks/s", 2.0)])
def test_a_ratio_says_how_many_times_better_zmqdist_is(unit: str, ratio: float) -> None:
    assert measuring._times_better(Question("x", "", unit), 10.0, 5.0) == ratio


def test_blocks_take_turns_and_the_first_ones_do_not_count() -> None:
    question = Question("x", "", "us")
    pairs = measuring._pairs(Told(10, 30), Told(1000, 20, 40), question, Case(), TINY, 0)
    assert pairs == [([10], [20]), ([30], [40])]


@pytest.mark.parametrize(("each_s", "count"), [(0.001, 500), (0.3, 1), (5.0, 1), (1e-9, 5000)])
def test_a_block_is_made_as_long_as_the_plan_wants(each_s: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])

    def block(count: int) -> None:
        now[0] += each_s * count if now[0] else 100.0  # the first one starts a cluster

    assert measuring._fitting(block, 2, Plan(block_s=0.5)) == pytest.approx(count, abs=1)


# -- simulated workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task_s", [simulated.REPORT_S * 5, simulated.REPORT_S / 20])
@pytest.mark.parametrize("workers", [1, 7, 40])
def test_every_simulated_task_is_done_once(workers: int, task_s: float) -> None:
    cluster = simulated.Cluster(workers, task_s)
    cluster.submit(500)
    cluster.run(-1)
    assert (cluster.done, cluster.broker.dispatch.queued) == (500, 0)
    assert not any(hands.leases for hands in cluster.broker.dispatch.hands.values())


def test_simulated_workers_take_the_lowest_free_places() -> None:
    cluster = simulated.Cluster(5, 1.0)
    assert sorted(index for _, index in cluster.broker.membership.members) == [0, 1, 2, 3, 4]


# -- the command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["speed"], "no question 'speed'; there are: latency, calls, tasks"),
        (["tasks", "--against", "rya"], "no system 'rya'; there are: threads, sockets, inside, memcpy, raw"),
        (["tasks", "--python", "ray"], "'ray' is not SYSTEM=PATH"),
    ],
)
def test_a_wrong_word_is_refused_with_the_list(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert told in capsys.readouterr().err


def test_a_system_takes_in_all_that_its_packages_have() -> None:
    assert command._systems("torch,tf") == ["torch", "tf", "tf-data", "tf-inside", "tf-native"]
    assert command._systems("ray-data") == ["ray-data"]


def test_a_page_without_a_place_for_figures_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match=r"performance\.md has no place for figures"):
        results.rewrite(page, tmp_path, [])
    assert page.read_text() == "nothing"


def test_the_page_of_this_repository_has_its_place_and_what_it_shows() -> None:
    docs = Path(command.__file__).resolve().parents[1] / "docs"
    text = (docs / "performance.md").read_text()
    assert text.index(results.BEGIN) < text.index(results.END)
    for path in (docs / "benchmarks").glob("*.json"):
        assert set(json.loads(path.read_text())[0]) == FIELDS
        assert path.with_suffix(".png").exists()
