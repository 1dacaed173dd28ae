"""What the tests of the data service share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import zygote


@pytest.fixture(autouse=True, scope="module")
def _no_server_process_outlives_its_module() -> Iterator[None]:
    """The root's conftest.py takes the children of a fork server for the standard library's own."""
    yield
    left = zygote.left_running()
    assert not left, f"this module left servers running: {left}"
