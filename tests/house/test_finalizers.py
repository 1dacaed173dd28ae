"""Finalizers wait for nothing: the garbage collector runs them in any thread, and collects nothing
else meanwhile."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "zmqdist"

WAITING = {
    "Thread",
    "get_value",
    "is_ok",
    "join",
    "lock",
    "result",
    "run",
    "sleep",
    "start",
    "stop",
    "wait",
}
"""Names that stand for a wait where they are called or entered."""


def waits(source: str) -> list[int]:
    """The lines of `__del__` methods that take a lock, start a thread or wait."""
    found = set()
    for method in ast.walk(ast.parse(source)):
        if not (isinstance(method, ast.FunctionDef) and method.name == "__del__"):
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.With):
                found |= {
                    item.context_expr.lineno
                    for item in node.items
                    if _name(item.context_expr) != "suppress"
                }
            elif isinstance(node, ast.Call) and (
                _name(node.func) in WAITING or (_name(node.func) == "acquire" and not node.args)
            ):
                found.add(node.lineno)
    return sorted(found)


def _name(node: ast.AST) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def test_finalizers_never_wait() -> None:
    found = {
        str(path.relative_to(PACKAGE)): waits(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert {path: lines for path, lines in found.items() if lines} == {}, (
        "leave it to zmqdist.background.in_background"
    )


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("threading.Thread(target=f, daemon=True).start()", [3]),
        ("with self._lock:\n            f()", [3]),
        ("with contextlib.suppress(OSError):\n            f()", []),
        ("self._lock.acquire()", [3]),
        ("self._lock.acquire(False)", []),
        ("in_background('close', self._node.stop)", []),
        ("self._loop.stop()", [3]),
    ],
)
def test_check_sees_wait(body: str, lines: list[int]) -> None:
    assert waits(f"class A:\n    def __del__(self):\n        {body}\n") == lines
