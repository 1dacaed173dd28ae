"""The rooms of the code stay small: what the coordinator holds, and how much code there is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COORDINATOR = ROOT / "zmqdist/scheduling/coordinator"

CODE_LINES_MAX = 61_470
"""The bound of the code lines of zmqdist/ and cli/. A change that must exceed it raises it by the
lines that it was allowed."""
COORDINATOR_LINES_MAX = 5_850
"""The bound of the code lines of the coordinator's folder."""
TABLES = {
    "affinity.WorkerAffinity._pinned",
    "executor.ClusterExecutor._begun_early",
    "executor.ClusterExecutor._futures",
    "failures.Failures.unseen",
    "machine.CoordinatorMachine._due",
    "machine.CoordinatorMachine._unsent",
    "machine.CoordinatorMachine.works",
    "runtime.CoordinatorRuntime.outbox",
}
"""The attributes of the coordinator that hold work items between events."""
PASSING = {
    "executor.ClusterExecutor._submitting",
    "machine.CoordinatorMachine._failures",
    "machine.CoordinatorMachine._followups",
    "machine.CoordinatorMachine._resolved",
}
"""The attributes that hold work items only while an event is handled, or one is submitted."""


def code_lines(path: Path) -> int:
    """Return the number of lines of a module without blank lines, comments and docstrings, however
    the module is laid out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                statement
                for statement in body
                if not (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                )
            ] or [ast.Pass()]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


def attributes(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the attributes that the classes of a module set on themselves, each with its type."""
    for owner in ast.parse(path.read_text()).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in ast.walk(owner):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    targets += target.elts if isinstance(target, ast.Tuple) else [target]
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield f"{path.stem}.{owner.name}.{target.attr}", kind


def test_code_size_is_bounded() -> None:
    assert sum(map(code_lines, modules())) <= CODE_LINES_MAX
    assert sum(map(code_lines, COORDINATOR.glob("*.py"))) <= COORDINATOR_LINES_MAX


def modules() -> list[Path]:
    return [*(ROOT / "zmqdist").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]


def test_work_item_is_in_few_tables() -> None:
    tables = {
        name
        for path in COORDINATOR.glob("*.py")
        if path.stem != "work"  # the fields of the record itself
        for name, kind in attributes(path)
        if "Work]" in kind or "Work," in kind or "_Future[" in kind
    }
    numbers = {"failures.Failures.unseen", "executor.ClusterExecutor._begun_early"}
    assert tables | numbers == TABLES | PASSING
    assert len(TABLES) <= 8


def test_coordinator_runtime_has_few_attributes() -> None:
    path = COORDINATOR / "runtime.py"
    names = {name for name, _ in attributes(path) if ".CoordinatorRuntime." in name}
    assert len(names) <= 25, sorted(names)
