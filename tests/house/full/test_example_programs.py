"""The programs of examples/ as a user starts them: each prints what its page says, on clusters of
processes of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import matches_page, trained_accuracy

pytestmark = pytest.mark.timeout(150)  # whole trainings

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SECTIONS = re.findall(
    r"^## (\w+)\.py\n(.*?)(?=^## |\Z)",
    (EXAMPLES / "README.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
SHOWN = {
    name: (
        re.findall(r"^    (.*)$", text, re.MULTILINE)[0],
        *re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL),
    )
    for name, text in SECTIONS
}
"""Of each program the command of its section, and what it prints."""
NEEDS = {"torch_loop": "torch"}
LOGS = {"dataservice": "a worker is lost and may come back"}
"""What a program that loses a worker logs beside what it prints."""


@pytest.mark.parametrize("name", SHOWN)
def test_program_prints_as_its_page_says(name: str, tmp_path: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    command, shown = SHOWN[name]
    words = shlex.split(command.replace("python ", f"{sys.executable} -W error "))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if LOGS.get(name, "\n") not in line] == []
    assert matches_page(shown, done.stdout), (
        f"instead of\n{shown}\nthe program printed\n{done.stdout}"
    )
    for picture in re.findall(r"picture: (.*)", done.stdout):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    if name == "digits":
        assert trained_accuracy(done.stdout) >= 0.95
    if name == "embedding":
        first, last = map(float, re.findall(r"(0\.\d{3}) at", done.stdout))
        assert last < 0.8 * first


def test_programs_with_processes_are_shown() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert programs == set(SHOWN)
