"""examples/: each is short and stands on its page; a quick one runs. The others, as a user starts them: full/test_example_programs.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.printed import is_shown

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
PROGRAMS = sorted({*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")})
LINES_MAX = 79


def lines_of(program: Path) -> int:
    if program.suffix == ".py":
        return program.read_text().count("\n")
    return sum(len(cell["source"]) for cell in json.loads(program.read_text())["cells"])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_an_example_is_short_and_on_its_page(program: Path) -> None:
    assert lines_of(program) <= LINES_MAX
    assert f"]({program.name})" in PAGE


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a ~0.98", "a 0.9", True),
        ("a ~1,000 rows/s", "a   22,333 rows/s", True),
        ("a 0.98", "a 0.9", False),
        ("a\n...\nb", "a\n1\n2\nb", True),
        ("a\n...\nb", "a\nb", True),
        ("a\nb", "a\n1\nb", False),
        ("(a) ~1%", "(a) 20%", True),
        ("a", "ab", False),
    ],
)
def test_what_a_page_shows_is_compared_line_by_line(shown: str, printed: str, same: bool) -> None:
    assert is_shown(shown, printed) is same
