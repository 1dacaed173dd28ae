"""The command `python -m benchmarks --quick` with the plan of tiny.py."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as command
from benchmarks import crowd, memory
from tests.house.benchmarks.tiny import TINY


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUICK", TINY)
    monkeypatch.setattr(memory, "SETTLE_S", 0.0)
    monkeypatch.setattr(crowd, "WATCH_S", 0.05)
    monkeypatch.setattr(crowd, "SETTLE_S", 0.0)
