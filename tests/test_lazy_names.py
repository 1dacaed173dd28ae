"""Names that are imported at their first use."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from zmqdist.lazy_names import without_collection

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_as_before_an_import(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        with without_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


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
