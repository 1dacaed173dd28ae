"""The benchmarks run: each question in a form so small that the figures mean nothing, and what is
said about who cannot answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import measuring, results, simulated
from benchmarks.measuring import Case, Plan, Question, Side
from benchmarks.systems import OURS, SYSTEMS, Session, Unusable
from tests.house.benchmarks.tiny import FIELDS, TINY

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
            "no system 'rya'; there are: threads, sockets, inside, memcpy, raw",
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
