"""How many modules one scheduled function passes through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES_MAX = 36


@pytest.mark.timeout(120)
def test_function_path_is_short() -> None:
    program = [sys.executable, "-m", "benchmarks.function_path"]
    printed = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    *paths, summary = printed.splitlines()
    assert summary.startswith(f"{len(paths)} modules of ")
    assert "scheduling/coordinator/machine.py" in paths
    assert len(paths) <= MODULES_MAX
