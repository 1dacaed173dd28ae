"""Names that are imported at their first use."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zmqdist.lazy_names import without_collection

ROOT = Path(__file__).parents[1]


@pytest.fixture
def threshold() -> Iterator[int]:
    """The threshold of the collector that the program has set."""
    before = gc.get_threshold()
    gc.set_threshold(531)
    yield 531
    gc.set_threshold(*before)


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_as_before_an_import(enabled: bool, threshold: int) -> None:
    if not enabled:
        gc.disable()
    try:
        with without_collection():
            assert gc.get_threshold()[0] == 0
        assert gc.isenabled() is enabled
        assert gc.get_threshold()[0] == threshold
    finally:
        gc.enable()


def test_collector_is_off_until_the_last_of_two_imports_ends(threshold: int) -> None:
    first, second = without_collection(), without_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 0
    second.__exit__(None, None, None)
    assert gc.get_threshold()[0] == threshold


def test_program_may_disable_the_collector_during_an_import() -> None:
    try:
        with without_collection():
            gc.disable()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_program_may_set_the_threshold_during_an_import(threshold: int) -> None:
    with without_collection():
        gc.set_threshold(threshold + 1)
    assert gc.get_threshold()[0] == threshold + 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_collector_runs_in_a_child_forked_during_an_import(threshold: int) -> None:
    with without_collection():
        child = os.fork()
        if child == 0:
            os._exit(gc.get_threshold()[0] != threshold)
    assert os.waitpid(child, 0)[1] == 0


def test_dispatcher_loads_no_operators_of_datasets() -> None:
    program = (
        "import sys, zmqdist.servers.dispatch_server; "
        "print(*[name for name in sys.modules if name.startswith('zmqdist.data.ops')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stdout.split() == []
