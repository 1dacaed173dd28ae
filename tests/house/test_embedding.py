"""examples/embedding.py: its mathematics, and the program as a user starts it, with few steps."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "embedding.py"


@pytest.fixture
def embedding() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embedding", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gradient_is_the_slope_of_the_summed_loss(embedding: ModuleType) -> None:
    rng = np.random.default_rng(1)
    people, things = rng.normal(size=(2, 5, 3))
    clicks = rng.integers(0, 2, 5)
    loss, *gradients = embedding.gradients(people, things, clicks)
    step = 1e-6
    for rows, gradient in zip((people, things), gradients, strict=True):
        for at in np.ndindex(rows.shape):
            rows[at] += step
            above = embedding.gradients(people, things, clicks)[0]
            rows[at] -= step
            assert len(clicks) * (above - loss) / step == pytest.approx(gradient[at], rel=1e-3, abs=1e-4)


def test_the_loss_goes_down_and_the_rows_that_moved_are_told(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", PROGRAM, "--steps", "100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=80, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *told, end = done.stdout.splitlines()
    pattern = re.compile(r"step +(\d+)/100  loss \d\.\d{4}  +[\d,]+ rows/s pulled and pushed")
    assert [int(found[1]) for line in told if (found := pattern.fullmatch(line))] == list(range(10, 101, 10))
    found = re.fullmatch(r"loss: (\d\.\d{3}) at first, (\d\.\d{3}) at last", end)
    assert found
    assert float(found[2]) < 0.8 * float(found[1])
