"""The programs of examples/ as a user starts them: whole trainings, on clusters of processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.digits import trained_accuracy

pytestmark = pytest.mark.timeout(100)  # whole trainings

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_digits_trains_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "digits.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"epoch  1/30  loss \d\.\d{4}  accuracy 0\.\d{3}", lines[0])
    assert lines[-1].startswith("test accuracy: ")
    assert trained_accuracy(done.stdout) >= 0.95
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_embedding_its_loss_goes_down_and_the_rows_that_moved_are_told(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", EXAMPLES / "embedding.py", "--steps", "100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=80, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *told, end = done.stdout.splitlines()
    pattern = re.compile(r"step +(\d+)/100  loss \d\.\d{4}  +[\d,]+ rows/s pulled and pushed")
    assert [int(found[1]) for line in told if (found := pattern.fullmatch(line))] == list(range(10, 101, 10))
    found = re.fullmatch(r"loss: (\d\.\d{3}) at first, (\d\.\d{3}) at last", end)
    assert found
    assert float(found[2]) < 0.8 * float(found[1])
