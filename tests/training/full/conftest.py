"""Fixtures of the long tests: programs on clusters of two sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import zmqdist as zd
from tests.training.helpers import Program


@pytest.fixture(params=[1, 2], ids=["1+1", "2+2"])
def program(
    request: pytest.FixtureRequest, clusters: Callable[..., zd.local_cluster]
) -> Iterator[Program]:
    """A program with one worker and one ps, and one with two of each."""
    program = Program(clusters(request.param))
    yield program
    program.strategy.close()
