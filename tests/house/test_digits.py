"""examples/digits.py: its mathematics and its result. The program as a user starts it:
full/test_example_programs.py."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import zmqdist as zd

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("digits")


def test_gradient_is_slope_of_loss(digits: ModuleType) -> None:
    rng = np.random.default_rng(1)
    images, labels = rng.integers(0, 17, (5, 64)), rng.integers(0, 10, 5)
    weights = [rng.normal(0, 0.3, size) for size in [(64, 6), (6,), (6, 10), (10,)]]
    loss, gradients = digits.network.gradients(weights, images, labels)
    step = 1e-6
    for weight, gradient in zip(weights, gradients, strict=True):
        for _ in range(10):
            at = tuple(rng.integers(0, side) for side in weight.shape)
            weight[at] += step
            above, _ = digits.network.gradients(weights, images, labels)
            weight[at] -= step
            assert (above - loss) / step == pytest.approx(gradient[at], rel=1e-3, abs=1e-4)


def test_later_run_continues_stopped_run(
    digits: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(digits, "EPOCHS", 4)
    stopped = iter([False, False, True])
    accuracy = digits.network.accuracy

    def stopping(*args: Any) -> float:
        if next(stopped, False):
            raise KeyboardInterrupt
        return float(accuracy(*args))

    monkeypatch.setattr(digits.network, "accuracy", stopping)
    with zd.local_cluster(workers=2, ps=2, processes=False) as cluster:
        with (
            zd.ParameterServerStrategy(cluster, digits.HALVES) as strategy,
            pytest.raises(KeyboardInterrupt),
        ):
            digits.train(strategy, str(tmp_path))
        with zd.ParameterServerStrategy(cluster, digits.HALVES) as strategy:
            curve = digits.train(strategy, str(tmp_path))
    epochs = re.findall(r"epoch +(\d)/4 .* (0\.\d{3})\n", capsys.readouterr().out)
    assert [number for number, _ in epochs] == ["1", "2", "3", "4"]
    assert [text for _, text in epochs] == [f"{value:.3f}" for value in curve[:, 1]]


def test_missing_matplotlib_is_one_line(
    digits: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    digits.plots.curves(tmp_path / "digits.png", "Digits", "epoch", "test accuracy", [[0.5, 0.9]])
    out = capsys.readouterr().out
    assert out == "no picture: it needs matplotlib (pip install matplotlib)\n"
    assert not list(tmp_path.iterdir())
