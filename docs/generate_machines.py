"""Write docs/machines.md from the machines of the package: `python docs/generate_machines.py`.

A machine is a class in a module called `machine` or `*_machine`, or in a module of `PARTS`. A
module that has a table of transitions is on the page as well: a name that ends in `TRANSITIONS`,
which maps each member of an enumeration to the members that may follow. For each module the page
has its purpose, its promises in short, its states and their transitions, and the events of its
machines by name: the cases of the method `handle`. A machine without `handle` has a method for each
event; the page does not list methods. The page is written by hand up to the line `BEGIN`.
"""

from __future__ import annotations

import ast
import enum
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("machines.md")
BEGIN = "<!-- Written by docs/generate_machines.py from the code from here on. -->\n"
COLUMNS = 100

PARTS = (
    "scheduling/dispatcher/membership_and_leases.py",
    "scheduling/dispatcher/placement.py",
    "scheduling/coordinator/affinity.py",
    "scheduling/coordinator/work.py",
    "data/service/dispatcher/machine/clients.py",
    "data/service/dispatcher/machine/portions.py",
    "data/service/dispatcher/machine/rounds.py",
    "data/service/dispatcher/machine/workers.py",
)
"""The modules of machines whose names do not end in `machine`, as paths in the package."""

TABLE = re.compile(r"^(?:\w+_)?TRANSITIONS\b", re.MULTILINE)

PROMISE = re.compile(r"^ +([A-Z]\d+)[.:]? +(.+)$")
"""The first line of a promise in the docstring of a module."""

SENTENCE_END = re.compile(r"(?<=[.?!])\s(?=[A-Z`*])")
"""The gap between two sentences. A gap after "e.g." or "..." does not match, because no capital
letter follows it."""

CLAUSE_END = re.compile(
    r"; |: |, (?:after|and|because|but|directly|even if|except|if|in|not|once|or|so "
    r"that|unless|until|when|which|while|with|without)\b"
)
"""The end of the first clause of a sentence: its reasons, exceptions and details follow."""

CLAUSE_MIN = 24
"""A shorter beginning of a promise says too little."""

Function = ast.FunctionDef


def modules() -> list[Path]:
    """Return the modules of machines, in the order of the page."""
    package = ROOT / "zmqdist"
    named = [
        path
        for path in package.rglob("*.py")
        if path.stem.split("_")[-1] == "machine" or TABLE.search(path.read_text())
    ]
    return sorted({*named, *(package / part for part in PARTS)})


def events(owner: ast.ClassDef) -> list[str]:
    """Return the names of the classes that the method `handle` takes, each once, in the order of
    the cases."""
    methods = {node.name: node for node in owner.body if isinstance(node, Function)}
    return [*dict.fromkeys(cases("handle", methods, set()))] if "handle" in methods else []


def cases(name: str, methods: dict[str, Function], seen: set[str]) -> Iterator[str]:
    """Yield the event of each case of the `match` in a method. If the default case calls another
    method, yield that method's events in place of the default case. Do the same for a method that
    has no `match` itself, but calls methods that have one."""
    seen.add(name)
    match = next((node for node in ast.walk(methods[name]) if isinstance(node, ast.Match)), None)
    if match is None:
        yield from called_cases([methods[name]], methods, seen)
        return
    for case in match.cases:
        classes = [
            ast.unparse(x.cls).split(".")[-1]
            for x in ast.walk(case.pattern)
            if isinstance(x, ast.MatchClass)
        ]
        inside = [*called_cases(case.body, methods, seen)] if classes in ([], ["Heard"]) else []
        if inside or not classes:
            yield from inside
            continue
        # An event that carries a message stands for each kind of message, as if the message were
        # the event.
        names = classes if isinstance(case.pattern, ast.MatchOr) else classes[:1]
        if classes[0].endswith("Heard"):
            names = [name for name in classes if not name.endswith("Heard")] or names
        yield from names


def called_cases(
    code: list[ast.stmt], methods: dict[str, Function], seen: set[str]
) -> Iterator[str]:
    """Yield the events of the methods of `self` that this code calls."""
    for node in (x for root in code for x in ast.walk(root) if isinstance(x, ast.Call)):
        name = ast.unparse(node.func).removeprefix("self.")
        if name in methods and name not in seen and "match" in ast.unparse(methods[name]):
            yield from cases(name, methods, seen)


def promises(docstring: str) -> list[tuple[str, str]]:
    """Return (number, text) of each promise in the docstring of a module."""
    found: list[tuple[str, list[str]]] = []
    indent: int | None = None
    for line in docstring.splitlines():
        start = PROMISE.match(line)
        depth = len(line) - len(line.lstrip())
        if start is not None:
            indent = depth
            found.append((start[1], [start[2]]))
        elif indent is not None and line.strip() and depth > indent:
            found[-1][1].append(line.strip())
        else:
            indent = None
    return [(number, " ".join(lines)) for number, lines in found]


def in_short(promise: str) -> str:
    """Return the first clause of a promise, and "..." if the promise goes on."""
    sentence = re.sub(r"(?<=\w\w) \([^)]+ [^)]+\)", "", SENTENCE_END.split(promise, maxsplit=1)[0])
    end = CLAUSE_END.search(sentence, CLAUSE_MIN)
    clause = sentence[: end.start() if end else None].rstrip(".")
    return clause + ("..." if len(clause) < len(promise.rstrip(".")) else "")


def tables(path: Path) -> dict[str, Mapping[enum.Enum, frozenset[enum.Enum]]]:
    """Return the tables of transitions of a module, by the name of the enumeration."""
    if not TABLE.search(path.read_text()):
        return {}
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = [table for name, table in vars(module).items() if TABLE.match(name)]
    return {type(next(iter(table))).__name__: table for table in found}


def diagram(table: Mapping[enum.Enum, frozenset[enum.Enum]]) -> str:
    """Return the states and arrows of a table, as a diagram that GitHub draws."""
    states = [*type(next(iter(table)))]
    arrows = [
        f"    {state.name} --> {after}"
        for state in states
        for after in [other.name for other in states if other in table[state]] or ["[*]"]
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *arrows, "```"])


def states(tree: ast.Module, path: Path) -> Iterator[str]:
    """Yield a paragraph for each enumeration of the module: the diagram of its transitions or, if
    it has no table, the names of its members."""
    drawn = tables(path)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in drawn:
            meaning = SENTENCE_END.split(ast.get_docstring(node) or "")[0].rstrip(".")
            yield wrapped(f"`{node.name}`: {meaning[:1].lower()}{meaning[1:]}.")
            yield diagram(drawn[node.name])
        elif isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).endswith("Enum") for base in node.bases
        ):
            members = [ast.unparse(x.targets[0]) for x in node.body if isinstance(x, ast.Assign)]
            yield wrapped(f"States of `{node.name}`: {quoted(members)}.")


def quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def wrapped(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(
        text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


def section(path: Path) -> str:
    """Return the section of a module; "" if the module has neither promises nor a table of
    transitions nor a method `handle`."""
    tree = ast.parse(path.read_text())
    docstring = ast.get_docstring(tree) or ""
    numbered = promises(docstring)
    owners = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    handled = [
        f"Events of `{owner.name}`: {quoted(names)}."
        for owner in owners
        if (names := events(owner))
    ]
    if not numbered and not handled and not tables(path):
        return ""
    purpose = (
        SENTENCE_END.split(" ".join(docstring.partition("\n\n")[0].split()))[0]
        .rstrip(".")
        .removesuffix("; no I/O")
    )
    numbers = f" ({numbered[0][0]}-{numbered[-1][0]})" if numbered else ""
    listed = [wrapped(f"{n}. {in_short(text)}", "   ") for n, (_, text) in enumerate(numbered, 1)]
    paragraphs = [
        wrapped(f"{purpose}{numbers}."),
        "\n".join(listed),
        *states(tree, path),
        *map(wrapped, handled),
    ]
    return (
        "\n\n".join([f"### `{path.relative_to(ROOT / 'zmqdist')}`", *filter(None, paragraphs)])
        + "\n"
    )


def page(current: str) -> str:
    """Return the new text of the page: its part that is written by hand, unchanged, and after it
    the sections."""
    by_hand, mark, _ = current.partition(BEGIN)
    if not mark:
        raise SystemExit(
            f"{PAGE.name} has lost the line that says where its generated part begins:\n{BEGIN}"
        )
    return f"{by_hand}{BEGIN}\n" + "\n".join(filter(None, map(section, modules())))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    sys.stdout.write(f"{PAGE.name}: {len(modules())} modules\n")
