"""Reserved ports are let go with the dict that names them: an error that a test caught holds that
in a cycle of frames."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.testing.helpers import Bell


@pytest.fixture(autouse=True, scope="module")
def _freeze() -> Iterator[None]:
    """A collection looks at what the tests of the module have made: at all that is imported it
    takes ten times as long."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def bell(tmp_path: Path) -> Callable[..., Bell]:
    return lambda name="bell": Bell(tmp_path / name)
