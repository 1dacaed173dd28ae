"""The main job, on the cluster of its file: as it is, with encryption, and with a worker that is killed on the way."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.launched import Launched

ROOT = Path(__file__).resolve().parents[2]
EPOCH = re.compile(r"epoch ( \d|\d\d)/30  loss \d\.\d{4}  accuracy 0\.\d{3}")


def of_example(name: str) -> str:
    """A file of configs/, with the program's path as seen from anywhere."""
    return (ROOT / "configs" / name).read_text().replace("examples/digits.py", str(ROOT / "examples" / "digits.py"))


def accuracy(launched: Launched) -> float:
    found = re.fullmatch(r"test accuracy: (0\.\d{3})", launched.lines[-1])
    assert found, launched.text
    return float(found[1])


@pytest.fixture(scope="module")
def accuracies() -> set[float]:
    """What the runs of this module came to: each must come to the same."""
    return set()


@pytest.mark.parametrize("name", ["digits.yaml", "digits-curve.yaml"])
def test_it_trains_to_more_than_95_percent(launch: Callable[..., Launched], accuracies: set[float], name: str) -> None:
    job = launch(file=of_example(name))
    assert job.ends(50) == 0, job.text
    assert sum(bool(EPOCH.fullmatch(line)) for line in job.lines) == 30, job.text
    accuracies.add(accuracy(job))
    assert max(accuracies) >= 0.95
    assert len(accuracies) == 1
    job.left_nothing()


def test_a_worker_that_is_killed_is_reported_and_changes_nothing_else(
    launch: Callable[..., Launched], accuracies: set[float]
) -> None:
    job = launch(file=of_example("digits.yaml"))
    pid = job.worker(1)
    job.saw("epoch  5/30")
    os.kill(pid, signal.SIGKILL)
    assert job.ends(50) == 0, job.text
    told = "[worker-1] ended (killed by SIGKILL); it is started again (1 of 3)"
    assert job.lines.count(told) == 1, job.text
    assert job.lines.index(told) < len(job.lines) - 10, "it went on for long after the loss"
    accuracies.add(accuracy(job))
    assert len(accuracies) == 1
    job.left_nothing()
