"""Fixtures of this folder."""

from __future__ import annotations

import pytest

from tests.ports import free_port


@pytest.fixture
def port() -> int:
    """A port of loopback on which no process listens."""
    return free_port()
