"""Names say what the thing is: of locals, of tests, and of the folders of the tests."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_rooms import code_lines, modules

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VAGUE = words(
    """
    another any anything asked begun both chosen come each either ended every everything found
    given gone got held kept known made meant neither ones other others place placed
    places said same seen some something started stopped such taken that these thing things
    this those told tried unknown waited wanted what which
    """
)
"""Determiners and participles, which say nothing of a thing when a name ends with them."""
VAGUE_MAX = 12
"""The largest number of vague names among 1,000 names that are bound."""

NO_SUBJECT = words(
    """
    a an and another any are as asked at be before both but by can could did do does each
    either every for had has have he here how if in is it its may must neither no nobody
    none not nothing of on ones only or other others she so some somebody such than
    that the their them then there these they this those to told was we were what whatever
    when where while who whoever whom whose which why will with without would you your
    """
)
"""Words with which the name of a test must not begin, because its subject comes first."""

WITHOUT_COUNTERPART = {"campaigns", "engines", "house", "platforms", "sim"}


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield each name as often as it is bound: variables, attributes, parameters, functions and
    classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name


def is_vague(name: str) -> bool:
    return name.strip("_").rpartition("_")[2] in VAGUE


def names_of_tests(path: Path) -> Iterator[str]:
    """Yield the names of the tests in a file, without "test_"."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and node.name.startswith("test_"):
            yield node.name.removeprefix("test_")


def comments(path: Path) -> int:
    """Return the number of lines with a comment for readers."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return sum(
        token.type == tokenize.COMMENT
        and not token.string.startswith(("# type:", "# noqa", "# --"))
        for token in tokens
    )


def test_bound_names_are_rarely_vague() -> None:
    names = [name for path in modules() for name in bound_names(ast.parse(path.read_text()))]
    vague = sum(map(is_vague, names))
    assert 1000 * vague / len(names) <= VAGUE_MAX


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("for each in items: pass", 1),
        ("worker = next(iter(items))", 0),
        ("self._last_held = 1", 1),
        ("def found(): pass", 1),
        ("def f(other, name): pass", 1),
        ("place: int = 1", 1),
        ("each.value = 1", 0),
        ("kept_values = []", 0),
    ],
)
def test_vague_names_are_counted(source: str, count: int) -> None:
    assert sum(map(is_vague, bound_names(ast.parse(source)))) == count


def test_test_names_begin_with_their_subject() -> None:
    names = [name for path in sorted(TESTS.rglob("test_*.py")) for name in names_of_tests(path)]
    parts = {name: name.split("_") for name in names}
    assert [name for name in parts if parts[name][0] in NO_SUBJECT] == []
    assert [name for name in parts if {"told", "asked"} & {*parts[name]}] == []


def test_test_names_are_short() -> None:
    lengths = {
        f"test_{name}": len(f"test_{name}")
        for path in sorted(TESTS.rglob("test_*.py"))
        for name in names_of_tests(path)
    }
    assert [name for name, length in lengths.items() if length > 60] == []
    assert statistics.median(lengths.values()) <= 40


def test_folders_of_tests_are_those_of_the_code() -> None:
    folders = {
        path.parent.relative_to(TESTS).as_posix().removesuffix("/full").removesuffix("/transcripts")
        for path in TESTS.rglob("test_*.py")
    }
    without = {
        folder
        for folder in folders
        if folder not in (".", "cli")
        and folder.split("/")[0] not in WITHOUT_COUNTERPART
        and not (ROOT / "zmqdist" / folder).is_dir()
    }
    assert without == set()


def test_rules_have_their_reasons_beside_them() -> None:
    """Machines, runtimes and the transport apply the rules."""
    paths = [
        path
        for path in modules()
        if path.stem in {"machine", "runtime"}
        or path.stem.endswith("_machine")
        or path.parent.name in {"machine", "transport"}
    ]
    lines = sum(map(code_lines, paths))
    assert 100 * sum(map(comments, paths)) / lines >= 3
