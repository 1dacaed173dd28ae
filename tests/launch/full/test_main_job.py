"""The main job on the cluster of its file: unchanged, with encryption, and with tasks that are
killed during the training."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import trained_accuracy
from tests.launch.helpers import Launched

ROOT = Path(__file__).resolve().parents[3]
EPOCH = re.compile(r"epoch ( \d|\d\d)/30  loss \d\.\d{4}  accuracy 0\.\d{3}")


def of_example(name: str) -> str:
    """Return the text of a file of configs/, with an absolute path of the program."""
    return (
        (ROOT / "configs" / name)
        .read_text()
        .replace("examples/digits.py", str(ROOT / "examples" / "digits.py"))
    )


@pytest.mark.parametrize("name", ["digits.yaml", "digits-curve.yaml"])
def test_main_job_exceeds_95_percent(launch: Callable[..., Launched], name: str) -> None:
    job = launch(file=of_example(name))
    assert job.ends(80) == 0, job.text
    assert sum(bool(EPOCH.fullmatch(line)) for line in job.lines) == 30, job.text
    assert job.lines[-1].startswith("test accuracy: "), job.text
    assert trained_accuracy(job.text) >= 0.95
    job.left_nothing()


def test_training_survives_killed_worker_and_ps(
    launch: Callable[..., Launched],
) -> None:
    job = launch(file=of_example("digits.yaml"))
    worker, ps = job.task("worker", 1), job.task("ps", 0)
    job.saw("epoch  3/30", 60)
    os.kill(worker, signal.SIGKILL)
    job.saw("epoch  6/30", 60)
    os.kill(ps, signal.SIGKILL)
    assert job.ends(80) == 0, job.text
    for text in (
        "[worker-1] ended (killed by SIGKILL); it is started again (1 of 3)",
        "[ps-0] ended (killed by SIGKILL); its variables are lost; it is started again (1 of 3)",
    ):
        assert job.lines.count(text) == 1, job.text
        assert job.lines.index(text) < len(job.lines) - 10, (
            "the training continued for long after the loss"
        )
    assert re.search(
        r"^ps:0 came back; restored 4 variables from .*/ckpt-\d+, \d+ s old; ",
        job.text,
        re.MULTILINE,
    )
    assert sum(bool(EPOCH.fullmatch(line)) for line in job.lines) == 30, job.text
    assert job.lines[-1].startswith("test accuracy: "), job.text
    assert trained_accuracy(job.text) >= 0.95
    job.left_nothing()
