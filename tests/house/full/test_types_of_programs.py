"""mypy --strict accepts programs that use zmqdist as it is installed here: the examples, and the
blocks of README.md and docs/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.test_pages import ROOT, blocks

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("clusters.md", "executor.md", "rpc.md")),
]

# Programs of pages and examples have functions and names without annotations, and blocks use names
# of the block before.
LENIENT = (
    "--allow-untyped-defs",
    "--allow-incomplete-defs",
    "--allow-untyped-calls",
    "--disable-error-code=name-defined",
    "--disable-error-code=var-annotated",
)


def checked_by_mypy(folder: Path, programs: dict[str, str], *options: str) -> str:
    """What mypy says of programs in a folder of their own, so that it finds zmqdist only where it
    is installed."""
    for name, text in programs.items():
        (folder / name).write_text(text)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")
    }
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", *options, *programs]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    return done.stdout + done.stderr if done.returncode else ""


def complaints(folder: Path, programs: dict[str, str]) -> str:
    """What mypy says of programs and blocks of pages."""
    options = ["--ignore-missing-imports", "--allow-redefinition", *LENIENT]
    return checked_by_mypy(folder, programs, *options, "--scripts-are-modules")


@pytest.mark.timeout(180)
def test_examples_pass_type_check(tmp_path: Path) -> None:
    assert not complaints(tmp_path, {example.name: example.read_text() for example in EXAMPLES})


@pytest.mark.timeout(180)
def test_page_blocks_pass_type_check(tmp_path: Path) -> None:
    programs = {
        f"{page.stem.lower()}_{number}.py": f"import zmqdist as zd\n{block}"
        for page in PAGES
        for number, block in enumerate(blocks(page.read_text(), "python"))
    }
    assert len(programs) > 10
    assert not complaints(tmp_path, programs)


def test_type_check_finds_mistake(tmp_path: Path) -> None:
    text = complaints(
        tmp_path, {"wrong.py": "import zmqdist as zd\nzd.local_cluster(workers='two')\n"}
    )
    assert 'incompatible type "str"; expected "int"' in text, text
