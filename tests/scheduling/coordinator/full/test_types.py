"""mypy --strict knows the types of results, and refuses options that do not exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

PROGRAM = """
import zmqdist as zd
from zmqdist.coordinator import RemoteValue

def square(x: int) -> int:
    return x * x

def use(coordinator: zd.ClusterCoordinator, bare: RemoteValue) -> None:
    value = coordinator.submit(square, 3)
    total: int = value.result() + coordinator.options(name="square", retries=1).submit(square, value).get()
    reveal_type(value)
    reveal_type(coordinator.map(square, range(3)))
    reveal_type(coordinator.schedule(square, (3,)).result())
    reveal_type(coordinator.run(square, total))
    reveal_type(coordinator.wait([value], count=1))
    for ended in coordinator.as_completed([value]):
        reveal_type(ended.result())
    reveal_type(bare.result())
    coordinator.options(retry=1)
    coordinator.options(name=5)

async def wait(value: RemoteValue[str]) -> str:
    return await value

def use_async(coordinator: zd.ClusterCoordinator, value: RemoteValue[str]) -> None:
    reveal_type(coordinator.submit(wait, value))
    reveal_type(coordinator.options(retries=1).submit(wait, value))
    reveal_type(coordinator.submit(lambda: 3))
"""

REVEALED = [
    (11, 'note: Revealed type is "RemoteValue[int]"'),
    (12, 'note: Revealed type is "list[RemoteValue[int]]"'),
    (13, 'note: Revealed type is "int"'),
    (14, 'note: Revealed type is "dict[str, int]"'),
    (15, 'note: Revealed type is "tuple[list[RemoteValue[int]], list[RemoteValue[int]]]"'),
    (17, 'note: Revealed type is "int"'),
    (18, 'note: Revealed type is "Any"'),
    (19, 'error: Unexpected keyword argument "retry" for "options" of "ClusterCoordinator"'),
    (
        20,
        (
            'error: Argument "name" to "options" of "ClusterCoordinator" has incompatible type "int"; '
            'expected "str | None"'
        ),
    ),
    (26, 'note: Revealed type is "RemoteValue[str]"'),
    (27, 'note: Revealed type is "RemoteValue[str]"'),
    (28, 'note: Revealed type is "RemoteValue[int]"'),
]


@pytest.mark.timeout(300)
def test_result_types_are_those_of_functions(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--cache-dir",
            ROOT / ".mypy_cache/typed",
            "program.py",
        ],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=290,
    )
    lines = [
        re.fullmatch(r"program\.py:(\d+): (.*?)(?:  \[[a-z-]+\])?", line)
        for line in process.stdout.splitlines()
    ]
    revealed = [
        (int(line[1]), re.sub(r"\b(?:builtins|zmqdist(?:\.\w+)*)\.(?=\w)", "", line[2]))
        for line in lines
        if line and "defined in" not in line[2]
    ]
    assert revealed == REVEALED, process.stdout + process.stderr
