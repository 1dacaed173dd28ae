"""Launchers in child processes; a fixture ends them even if their test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.helpers import Launched


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Return `launch(program, ...)`, which makes a `Launched` in the test's own folder."""
    launchers: list[Launched] = []

    def make(*args: Any, **options: Any) -> Launched:
        launchers.append(Launched(tmp_path, *args, **options))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.kill()
