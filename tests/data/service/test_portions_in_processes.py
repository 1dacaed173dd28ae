"""Exactly once, and in order, where what dies is a task's process and not its worker."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.service.helpers import serving
from zmqdist.data.dataset import Dataset
from zmqdist.errors import UnavailableError


def dies_once(at: int, mark: Path, how: Callable[[], object]) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        if int(x) == at and not mark.exists():
            mark.touch()
            how()
        return x

    return step


@pytest.mark.parametrize(
    "options", [{"delivery": "exactly_once"}, {"ordered": True}], ids=["exactly once", "in order"]
)
@pytest.mark.parametrize("workers", [1, 2])
def test_portions_of_dead_process_are_recomputed(
    options: dict[str, Any], workers: int, tmp_path: Path
) -> None:
    with serving(workers) as service:
        step = dies_once(700, tmp_path / "died", lambda: ctypes.string_at(0))
        found = [int(x) for x in service.dealt(Dataset.range(1500).map(step), **options)]
    assert (tmp_path / "died").exists()
    assert (found if "ordered" in options else sorted(found)) == list(range(1500))


def test_consumer_survives_dead_process(tmp_path: Path) -> None:
    with serving() as service:
        step = dies_once(300, tmp_path / "died", lambda: os._exit(3))
        parts = [
            service.dealt(
                Dataset.range(1000).map(step),
                ordered=True,
                job_name="parts",
                consumer_index=index,
                num_consumers=2,
            )
            for index in range(2)
        ]
        found = [[int(x) for x in part] for part in parts]
    assert sorted(found[0] + found[1]) == list(range(1000))


def test_deadly_positions_end_iteration() -> None:
    def step(x: Any) -> Any:
        if int(x) == 500:
            ctypes.string_at(0)
        return x

    with serving() as service:
        found: list[int] = []
        text = r"3 processes died while they computed positions 498 to 500 of the source[^$]*worker:0 \(.*SIGSEGV\)"
        with pytest.raises(UnavailableError, match=text):
            found.extend(
                map(int, service.dealt(Dataset.range(1000).map(step), delivery="exactly_once"))
            )
        assert len(found) == len(set(found))
        assert 500 not in found
        assert [int(x) for x in service.dealt(Dataset.range(3), delivery="exactly_once")] == [
            0,
            1,
            2,
        ]
