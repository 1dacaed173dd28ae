"""Tests look at what users and operators can see: results, events, effects, status, metrics; hardly ever into another object."""

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


def reaches(source: str) -> list[int]:
    """The lines that read or write an attribute with an underscore of something else than `self`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr) and node.attr not in PUBLIC:
            called = node.value.func if isinstance(node.value, ast.Call) else node.value
            owner = called.id if isinstance(called, ast.Name) else ""
            if owner not in {"self", "cls", "super"} and (owner, node.attr) != ("os", "_exit"):
                found.add(node.lineno)
    return sorted(found)


def found_in_tests() -> dict[str, str]:
    lines = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        lines |= {f"{path.relative_to(ROOT)}:{number}": text.splitlines()[number - 1] for number in reaches(text)}
    return lines


def test_few_tests_reach_into_other_objects_and_each_says_why() -> None:
    found = found_in_tests()
    assert len(found) <= REACHES_MAX, "\n".join(f"{place}: {line.strip()}" for place, line in found.items())
    silent = [place for place, line in found.items() if not REASON.search(line)]
    assert silent == [], "give the reason at the end of the line: # reach: ..."


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
def test_the_check_sees_a_reach(source: str, lines: list[int]) -> None:
    assert reaches(source) == lines
