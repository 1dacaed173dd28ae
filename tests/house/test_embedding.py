"""examples/embedding.py: its mathematics. The program as a user starts it:
full/test_example_programs.py."""

from __future__ import annotations

import importlib.util
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


def test_gradient_is_slope_of_summed_loss(embedding: ModuleType) -> None:
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
            assert len(clicks) * (above - loss) / step == pytest.approx(
                gradient[at], rel=1e-3, abs=1e-4
            )
