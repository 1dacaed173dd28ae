"""The benchmarks run: each question in a form so small that the figures mean nothing, and what is
said about who cannot answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import measuring, regress, results, simulated
from benchmarks.measuring import Case, Plan, Question, Side
from benchmarks.systems import OURS, SYSTEMS, Session, Unusable
from tests.house.benchmarks.tiny import FIELDS, TINY
from zmqdist import __version__

# -- who cannot answer -----------------------------------------------------------------------------


def test_missing_interpreter_is_named() -> None:
    with pytest.raises(
        Unusable, match=r"^/nowhere/python does not start: No such file or directory$"
    ):
        Session(SYSTEMS["ray"], {"ray": "/nowhere/python"})


# -- how it is compared ----------------------------------------------------------------------------


class FixedSide(Side):
    """A system whose blocks answer what they were told."""

    def __init__(self, *values: float) -> None:
        super().__init__(OURS, {})
        self._values = iter(values)

    def block(self, question: Question, case: Case, count: int) -> list[float]:
        return [next(self._values)]


@pytest.mark.parametrize(("unit", "ratio"), [("us", 0.5), ("tasks/s", 2.0)])
def test_ratio_compares_zmqdist_with_other_system(unit: str, ratio: float) -> None:
    assert measuring.times_better(Question("x", "", unit), 10.0, 5.0) == ratio


def test_blocks_take_turns_after_warm_up() -> None:
    question = Question("x", "", "us")
    pairs = measuring.pairs(FixedSide(10, 30), FixedSide(1000, 20, 40), question, Case(), TINY, 0)
    assert pairs == [([10], [20]), ([30], [40])]


@pytest.mark.parametrize(("each_s", "count"), [(0.001, 500), (0.3, 1), (5.0, 1), (1e-9, 5000)])
def test_block_length_follows_plan(
    each_s: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])

    def block(count: int) -> None:
        now[0] += each_s * count if now[0] else 100.0  # the first one starts a cluster

    assert measuring.fitting(block, 2, Plan(block_s=0.5)) == pytest.approx(count, abs=1)


# -- simulated workers -----------------------------------------------------------------------------


@pytest.mark.parametrize("task_s", [simulated.REPORT_S * 5, simulated.REPORT_S / 20])
@pytest.mark.parametrize("workers", [1, 7, 40])
def test_simulated_tasks_run_once(workers: int, task_s: float) -> None:
    cluster = simulated.Cluster(workers, task_s)
    cluster.submit(500)
    cluster.run(-1)
    assert (cluster.done, cluster.broker.dispatch.placement.queued) == (500, 0)
    assert not any(hands.leases for hands in cluster.broker.dispatch.loads.values())


def test_simulated_workers_take_lowest_free_index() -> None:
    cluster = simulated.Cluster(5, 1.0)
    assert sorted(index for _, index in cluster.broker.membership.members) == [0, 1, 2, 3, 4]


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "no question 'speed'; there are: latency, calls, actors, tasks"),
        (
            ["tasks", "--against", "rya"],
            "no system 'rya'; there are: threads, sockets, inside, changeable, memcpy, raw",
        ),
        (["tasks", "--python", "ray"], "'ray' is not SYSTEM=PATH"),
    ],
)
def test_wrong_word_is_refused_with_list(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_system_includes_all_of_its_packages() -> None:
    assert command.systems_named("torch,tf") == ["torch", "tf", "tf-data", "tf-inside", "tf-native"]
    assert command.systems_named("ray-data") == ["ray-data"]


def test_page_without_figures_stays_unchanged(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match=r"performance\.md has no place for figures"):
        results.rewrite(page, tmp_path, [])
    assert page.read_text() == "nothing"


def test_repository_page_has_current_figures(tmp_path: Path) -> None:
    docs = Path(command.__file__).resolve().parents[1] / "docs"
    page = Path(shutil.copy(docs / command.PAGE, tmp_path))
    results.rewrite(
        page, Path(shutil.copytree(docs / "benchmarks", tmp_path / "benchmarks")), command.QUESTIONS
    )
    assert page.read_text() == (docs / command.PAGE).read_text()
    for path in (docs / "benchmarks").glob("*.json"):
        assert set(json.loads(path.read_text())[0]) == FIELDS
        assert path.with_suffix(".png").exists()


# -- earlier revisions and releases ----------------------------------------------------------------


def document_with(name: str, ratio: float | None) -> dict[str, object]:
    return {
        "question": name,
        "figures": [{"case": "at 500", "system": "Ray", "ratio": ratio}],
    }


def test_history_has_line_a_version_with_latest_ratios(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    results.note_history(file, [document_with("calls", 2.0)], "0.1")
    results.note_history(file, [document_with("calls", 3.0), document_with("tasks", None)], "0.2")
    results.note_history(file, [document_with("tasks", 5.0)], "0.2")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["version"], line["ratios"]) for line in lines] == [
        ("0.1", {"calls at 500 Ray": 2.0}),
        ("0.2", {"calls at 500 Ray": 3.0, "tasks at 500 Ray": 5.0}),
    ]


def test_history_of_project_ends_with_this_version() -> None:
    lines = (Path(command.__file__).with_name("history.jsonl")).read_text().splitlines()
    assert json.loads(lines[-1])["version"] == __version__


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--against", "no-such-revision"], "no-such-revision"),
        (["laziness", "--against", "HEAD"], "no question 'laziness'"),
        ([], "--against"),
    ],
)
def test_regress_refuses_wrong_arguments(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["regress", *words])
    assert end.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(("ratio", "code"), [(0.84, 1), (0.86, 0), (2.0, 0)])
def test_regress_fails_if_ratio_is_too_small(
    ratio: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(questions: list[Question], *_: object) -> object:
        figure = measuring.Figure("latency", "", "zmqdist at HEAD", "us", 1.0, None, ratio)
        return {"latency": measuring.Answers(questions[0], [figure])}, {}

    monkeypatch.setattr(regress, "measure", measured)
    assert command.main(["regress", "latency", "--against", "HEAD"]) == code
    assert ("slower than" in capsys.readouterr().out) == bool(code)
