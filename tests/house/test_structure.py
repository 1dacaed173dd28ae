"""The architecture as a test: what the import contracts of .importlinter cannot say.

Those know who imports whom among the packages; here are the purity of the machines, by their names,
the size of files, functions and classes, what `import zmqdist` loads, and what must not stand in a
text.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "zmqdist", ROOT / "cli")
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

COLUMNS_MAX = 100
WIDE_SHARE_MAX = 0.005
"""The share of lines that may be wider: what cannot be split, such as a comment that a tool
reads.
"""

IMPURE = {
    "asyncio",
    "datetime",
    "io",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "random",
    "secrets",
    "select",
    "selectors",
}
IMPURE |= {"signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid", "zmq"}
IMPURE_CALLS = {"open", "input", "print", "eval", "exec", "__import__"}

BESIDE_MACHINES = {
    "zmqdist/coordination": ("replies",),
    "zmqdist/data/service": ("retry",),
    "zmqdist/data/service/reader": ("delivery",),
    "zmqdist/data/service/worker": ("task_replies",),
    "zmqdist/scheduling/coordinator": (
        "affinity",
        "called_actors",
        "coordinator_events",
        "options",
        "work",
    ),
    "zmqdist/scheduling/dispatcher": (
        "children",
        "demands",
        "facts",
        "facts_record",
        "membership_and_leases",
        "placement",
        "records",
        "resources",
        "run_times",
        "servers",
        "wait_reasons",
    ),
    "zmqdist/scheduling/shared": (
        "actors",
        "broker_settings",
        "nested_bound",
        "quantities",
        "registrations",
    ),
    "zmqdist/scheduling/worker": (
        "nested_slots",
        "records",
        "worker_events",
    ),
    "zmqdist/transport": ("pace",),
}
"""Parts of machines in files of their own, which are held to the same rules."""

LAZY = ("asyncio", "click", "matplotlib", "rich", "sqlite3", "yaml")

HOME = re.compile(r"(?<![\w.])/(?:home|root|Users)/\w+|(?<![\w./])/work/\w+")
REGISTRY = re.compile(
    r"files\.pythonhosted|(?:test\.)?pypi\.org/simple|--?(?:extra-)?index-url|--find-links"
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of each import, those inside functions too."""
    return ((line, module.split(".")[0]) for line, module in modules(tree))


def modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of each import; for `from zmqdist.a import b` both `zmqdist.a` and
    `zmqdist.a.b`, which may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_machine(path: Path) -> bool:
    """A module called `machine`, `*_machine`, one in a folder of that name, or one that is listed
    beside it."""
    folder = path.parent.relative_to(ROOT).as_posix()
    by_name = path.stem.split("_")[-1] == "machine" or path.parent.name == "machine"
    return by_name or path.stem in BESIDE_MACHINES.get(folder, ())


MACHINES = [path for path in SOURCES if is_machine(path)]


def impurities(source: str) -> list[str]:
    """What a machine must not do: wait, read a clock, toss a coin, open or print something."""
    tree = ast.parse(source)
    found = [
        f"line {line}: imports {module}"
        for line, module in sorted(set(imported(tree)))
        if module in IMPURE
    ]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in IMPURE_CALLS
        ):
            found.append(f"line {node.lineno}: calls {node.func.id}()")
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Global):
            found.append(f"line {node.lineno}: {type(node).__name__}")
    return found


def undocumented(source: str) -> list[str]:
    """A module with code and without a docstring."""
    tree = ast.parse(source)
    return (
        []
        if not tree.body or ast.get_docstring(tree)
        else ["the first thing in it must be a docstring"]
    )


def offences(check: Callable[[str], list[str]], paths: Iterable[Path]) -> list[str]:
    """What `check` finds in the files, each with its file's name."""
    return [f"{name_of(path)}: {offence}" for path in paths for offence in check(path.read_text())]


def foreign(source: str) -> list[str]:
    """What a machine must not know: a module of ours that is neither a machine nor of the
    vocabulary, which all share."""
    found = []
    for line, module in modules(ast.parse(source)):
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        if path in SOURCES and path not in MACHINES and path.parent.name != "zmqdist":
            found.append(f"line {line}: imports {module}")
    return found


def test_machine_only_decides() -> None:
    missing = [f"{folder}/{stem}" for folder in BESIDE_MACHINES for stem in BESIDE_MACHINES[folder]]
    assert not [name for name in missing if not (ROOT / f"{name}.py").is_file()]
    assert len(MACHINES) > 40
    assert not offences(impurities, MACHINES)
    assert not offences(foreign, MACHINES)


@pytest.mark.parametrize(
    ("source", "offence"),
    [
        ("import time", "line 1: imports time"),
        ("def f():\n    from os.path import join", "line 2: imports os"),
        ("x = open('f')", "line 1: calls open()"),
        ("async def f(): ...", "line 1: AsyncFunctionDef"),
    ],
)
def test_machine_check_sees_offence(source: str, offence: str) -> None:
    assert impurities(source) == [offence]


def test_machine_import_check_sees_offence() -> None:
    assert foreign("from zmqdist.transport import pace, loop") == [
        "line 1: imports zmqdist.transport.loop"
    ]


def test_lines_fit_a_hundred_columns() -> None:
    folders = ("zmqdist", "cli", "tests", "benchmarks", "examples")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    widths = [len(line) for path in paths for line in path.read_text().splitlines()]
    wide = sum(width > COLUMNS_MAX for width in widths)
    assert wide <= WIDE_SHARE_MAX * len(widths)


def test_modules_begin_with_docstring() -> None:
    assert not offences(undocumented, SOURCES)


def test_docstring_check_sees_offence() -> None:
    assert undocumented("import os\n") == ["the first thing in it must be a docstring"]
    assert not undocumented("")


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_folders_with_code_are_packages(package: Path) -> None:
    """find_packages forgets a folder without __init__.py, and then the wheel lacks it."""
    lacking = {
        name_of(path.parent)
        for path in package.rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert not lacking


def test_import_of_zmqdist_loads_no_heavy_module() -> None:
    program = f"import sys, zmqdist; print(*[name for name in {LAZY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def texts() -> list[Path]:
    """What is in the repository, or would be after `git add .`; in an unpacked archive,
    everything.
    """
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(
        listing, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    if done.returncode == 0:
        found = [ROOT / name for name in done.stdout.split("\0") if name]
    else:
        found = [
            path
            for path in ROOT.rglob("*")
            if not any(part.startswith(".venv") for part in path.parts)
        ]
    return [path for path in found if path.is_file() and path.suffix not in {".gz", ".png", ".pyc"}]


@pytest.mark.parametrize(
    ("pattern", "what"),
    [(HOME, "a path of one machine"), (REGISTRY, "where packages come from")],
    ids=["home", "registry"],
)
def test_texts_name_no_local_paths(pattern: re.Pattern[str], what: str) -> None:
    found = []
    for path in texts():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{name_of(path)}:{number}: {what}: {line.strip()[:100]}")
    assert not found


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("cd /home/me/zmqdist", True),
        ("/root/.cache", False),
        ("/root/x", True),
        ("python=/Users/me/bin", True),
        ("zmq://host/work/0", False),
        ("https://example.org/home/page", False),
    ],
)
def test_path_check_sees_home_folder(line: str, seen: bool) -> None:
    assert bool(HOME.search(line)) is seen
