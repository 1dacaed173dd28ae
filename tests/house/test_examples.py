"""examples/: each is short and stands on its page; a quick one runs. The others, as a user starts
them: full/test_example_programs.py."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import matches_page

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
PROGRAMS = sorted({*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")})
LINES_MAX = 79


def lines_of(program: Path) -> int:
    if program.suffix == ".py":
        return program.read_text().count("\n")
    return sum(len(cell["source"]) for cell in json.loads(program.read_text())["cells"])


def run_cell(source: str, names: dict[str, Any]) -> str:
    """Run a cell as Jupyter does: the value of an expression that ends it is shown, and may be
    awaited."""
    tree, printed = ast.parse(source), io.StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            value = eval(compile(ast.Expression(last.value), "cell", "eval", flags=flags), names)
            value = asyncio.run(value) if asyncio.iscoroutine(value) else value
            if value is not None:
                print(repr(value))
    return re.sub(r".*\r", "", printed.getvalue())  # a terminal shows what stands after it


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_example_is_short_and_on_page(program: Path) -> None:
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
def test_page_output_is_compared_by_line(shown: str, printed: str, same: bool) -> None:
    assert matches_page(shown, printed) is same


@pytest.mark.timeout(120)
def test_notebook_cells_show_saved_output() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            saved = [
                "".join(shown.get("text") or shown["data"]["text/plain"])
                for shown in cell["outputs"]
            ]
            source = "".join(cell["source"])
            assert matches_page("\n".join(saved), run_cell(source, names)), source
