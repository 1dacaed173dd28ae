"""A name means one class, modules import downwards, and objects keep their privates to
themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.test_structure import SOURCES, name_of

REACHES = {
    "storage._untyped_storage": "torch's public name of the storage warns, on each use",
    "threading._register_atexit": "called before the interpreter waits for the program's threads; "
    "`atexit` is called after that",
    "atexit._run_exitfuncs": "what else is to be done at the end is done before `os._exit`, which "
    "passes over it",
    "proxy._authkey": "a proxy of a manager is pickled with the key of its own process, as "
    "multiprocessing does",
}
"""Into privates that another module has made, each with its reason; a function that stands beside
its class is no stranger."""


DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace"}
"""Of the standard library, which documents them in spite of their names."""


def public_classes(source: str) -> list[str]:
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    ]


def test_public_class_names_are_unique() -> None:
    owners: dict[str, list[str]] = {}
    for path in SOURCES:
        for name in public_classes(path.read_text()):
            owners.setdefault(name, []).append(name_of(path))
    assert not {name: paths for name, paths in owners.items() if len(paths) > 1}


def dotted(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(source: str, known: set[str]) -> set[str]:
    """The modules of `known` that this one imports, also inside functions and for types only."""
    found: set[str] = set()
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & known if inside & known else {node.module}
        left += ast.iter_child_nodes(node)
    return found & known


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of modules of which each imports all others, directly or not."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for name in graph[left.pop()] - seen:
                seen.add(name)
                left.append(name)
        return seen

    reach = {name: reachable(name) for name in graph}
    circles = [
        {other for other in reach[name] if name in reach[other]}
        for name in graph
        if name in reach[name]
    ]
    return [circle for index, circle in enumerate(circles) if circle not in circles[:index]]


def test_imports_have_no_cycle() -> None:
    files = {dotted(name_of(path)): path for path in SOURCES}
    graph = {name: imports(path.read_text(), set(files)) - {name} for name, path in files.items()}
    assert cycles(graph) == []


def test_import_check_sees_cycle() -> None:
    known = {"a", "b", "c", "d", "e"}
    graph = {
        "a": imports("def f():\n    import b", known),
        "b": imports("from c import x", known),
        "c": imports("import a", known),
        "d": imports("if TYPE_CHECKING:\n    import e\nimport a", known),
        "e": imports("import d", known),
    }
    assert cycles(graph) == [{"a", "b", "c"}, {"d", "e"}]


def reaches(source: str) -> Iterator[tuple[int, str]]:
    """(line, expression) of each private attribute of another object that this module has not made
    itself."""
    tree = ast.parse(source)
    own = DOCUMENTED | {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if ast.unparse(node.value) in ("self", "cls")}
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    own |= {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for node in attributes:
        if node.attr[0] == "_" and node.attr[:2] != "__" and node.attr not in own:
            yield node.lineno, ast.unparse(node)


def test_private_reaches_are_few() -> None:
    found = [
        (f"{name_of(path)}:{line}", what)
        for path in SOURCES
        for line, what in reaches(path.read_text())
    ]
    assert [(place, what) for place, what in found if what not in REACHES] == []
    assert {what for _, what in found} == REACHES.keys(), "a reach is gone: so goes its reason"


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("other._x = 1", True),
        ("class C:\n    def f(self, other): return self._x + other._x", False),
        ("x.__name__", False),
        ("os._exit(1)", False),
    ],
)
def test_privates_check_sees_reach(source: str, seen: bool) -> None:
    assert bool(list(reaches(source))) is seen
