"""Tests look at what users and operators can see: results, events, effects, status, metrics; hardly
ever into another object."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

REACHES_MAX = 60

PUBLIC = {"_asdict", "_fields", "_make", "_replace"}
"""What the standard library documents about named tuples, though it begins with an underscore."""

REASON = re.compile(r"# reach: \S+ \S+")


def reaches(source: str) -> dict[int, str]:
    """The statements that read or write an attribute with an underscore of something else than
    `self`, by their first lines; of a statement with a body only its head."""
    lines, found = source.splitlines(), {}
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, ast.stmt):
            continue
        last = statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None)
        if body:
            last = max(statement.lineno, body[0].lineno - 1)
        parts = [statement]
        for part in parts:
            parts += [
                child for child in ast.iter_child_nodes(part) if not isinstance(child, ast.stmt)
            ]
        if any(map(is_reach, parts)):
            found[statement.lineno] = "\n".join(lines[statement.lineno - 1 : last])
    return dict(sorted(found.items()))


def is_reach(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not re.match(r"_(?!_).*(?<!_)$", node.attr):
        return False  # `_repr_html_` is a name of a protocol
    called = node.value.func if isinstance(node.value, ast.Call) else node.value
    owner = called.id if isinstance(called, ast.Name) else ""
    ours = owner in {"self", "cls", "super"} or (owner, node.attr) == ("os", "_exit")
    return node.attr not in PUBLIC and not ours


def found_in_tests() -> dict[str, str]:
    return {
        f"{path.relative_to(ROOT)}:{number}": statement
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, statement in reaches(path.read_text()).items()
    }


def test_reaches_of_tests_are_few_with_reason() -> None:
    found = found_in_tests()
    assert len(found) <= REACHES_MAX, "\n".join(
        f"{place}: {line.strip()}" for place, line in found.items()
    )
    silent = [place for place, line in found.items() if not REASON.search(line)]
    assert silent == [], "give the reason at the end of a line of the statement: # reach: ..."


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x._y", [1]),
        ("x = 1\nserver._node.incarnation", [2]),
        ("self._y\ncls._y\nsuper()._y()\nos._exit(1)\nrow._replace(a=1)", []),
        ("self.server._y = 1", [1]),
        ("a._b + c._d", [1]),
    ],
)
def test_check_sees_reach(source: str, lines: list[int]) -> None:
    assert list(reaches(source)) == lines
