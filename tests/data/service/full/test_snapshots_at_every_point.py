"""Saves that are cut off at many more points, and restarted in more combinations, than the faster
tests do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.service.snapshots.test_faults import DATASETS, save_over_restarts
from tests.data.service.snapshots.test_writer import PIPELINES, crash_and_go_on


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", DATASETS)
def test_save_completes_over_restarts(tmp_path: Path, kind: str, workers: int) -> None:
    save_over_restarts(tmp_path, kind, workers)


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("step", [1, 7])
def test_crash_at_any_point_keeps_elements_once(
    kind: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_and_go_on(kind, step, range(1, 60, 7), tmp_path, monkeypatch)
