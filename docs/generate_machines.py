"""Write docs/machines.md from the machines of the package: `python docs/generate_machines.py`.

A machine is a class in a module called `machine` or `*_machine`, or in a module of `PARTS`. The events of a machine are the cases of its
method `handle`; if a machine has no `handle`, they are its public methods. For each event the page lists the methods of the machine's parts
that the machine calls, and the effects that it may return. This program finds both in the code of the event, and in those methods of the
machine and functions of its module that this code calls, directly or through others. The page is written by hand up to the line `BEGIN`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("machines.md")
BEGIN = "<!-- From here on written by docs/generate_machines.py from the code: change it there. -->\n"

PARTS = (
    "scheduling/dispatcher/broker.py",
    "scheduling/dispatcher/membership_and_leases.py",
    "scheduling/dispatcher/placement.py",
    "scheduling/worker/dispatcher_contact.py",
    "scheduling/coordinator/closures.py",
    "scheduling/coordinator/affinity.py",
    "scheduling/coordinator/dependencies_and_retries.py",
    "data/service/dispatcher/machine/clients.py",
    "data/service/dispatcher/machine/portions.py",
    "data/service/dispatcher/machine/rounds.py",
    "data/service/dispatcher/machine/split_assignment.py",
    "data/service/dispatcher/machine/workers.py",
)
"""The modules of machines whose names do not end in `machine`, as paths in the package."""

EFFECTS = ("messages.py",)
"""The modules whose classes all count as effects. The other effects are the classes in the aliases that have `Effect` in their names."""

SENTENCE_END = re.compile(r"(?<=[.?!])\s(?=[A-Z`*])")
"""The gap between two sentences. A gap after "e.g." or "..." does not match, because no capital letter follows it."""

Function = ast.FunctionDef


def modules() -> list[Path]:
    """Return the modules whose classes have a table, in the order of the page."""
    package = ROOT / "zmqdist"
    named = [path for path in package.rglob("*.py") if path.stem.split("_")[-1] == "machine"]
    return sorted({*named, *(package / part for part in PARTS)})


def effect_names() -> set[str]:
    """Return the names of the classes of all effects."""
    found: set[str] = set()
    for path in (ROOT / "zmqdist").rglob("*.py"):
        source = path.read_text()
        tree = ast.parse(source) if "Effect" in source or path.name in EFFECTS else None
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.AnnAssign | ast.Assign):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if isinstance(target, ast.Name) and "Effect" in target.id and node.value is not None:
                    found |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
            elif isinstance(node, ast.ClassDef) and path.name in EFFECTS:
                found.add(node.name)
    return found


def methods_of(owner: ast.ClassDef) -> dict[str, Function]:
    return {node.name: node for node in owner.body if isinstance(node, Function)}


def is_property(function: Function) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in function.decorator_list)


def events(owner: ast.ClassDef) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield (event, the code that handles it) for each event of a machine. If several cases handle an event, join their code."""
    methods = methods_of(owner)
    if "handle" in methods:
        found: dict[str, list[ast.AST]] = {}
        for event, code in cases("handle", methods, set()):
            found.setdefault(event, []).extend(code)
        yield from found.items()
        return
    for name, function in methods.items():
        if not name.startswith("_") and not is_property(function):
            yield name, [*function.body]


def meanings() -> dict[str, str]:
    """Return the summary of each class of the package, by the name of the class."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "zmqdist").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, summary(node))
    return found


def summary(node: ast.ClassDef | Function | ast.Module) -> str:
    """Return the sentences that begin on the first line of a docstring, including their ends on later lines, for a cell of a table."""
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    first_line = paragraph.partition("\n")[0]
    end = SENTENCE_END.search(paragraph, len(first_line) - 1)
    return " ".join(paragraph[: end.start() if end else None].split()).replace("|", "\\|")


def is_query(function: Function, effects: set[str]) -> bool:
    """Return whether a method only returns facts, because the type of its result is neither None nor a type of effects."""
    returns = ast.unparse(function.returns) if function.returns is not None else "None"
    return returns != "None" and "Effect" not in returns and not any(name in returns for name in effects)


def cases(name: str, methods: dict[str, Function], seen: set[str]) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield (event, code) for each case of the `match` in a method. If the default case calls another method, yield that method's cases in
    place of the default case. Do the same for a method that has no `match` itself, but calls methods that have one."""
    seen.add(name)
    matches = [node for node in ast.walk(methods[name]) if isinstance(node, ast.Match)]
    if not matches:
        for called in own_calls(methods[name]):
            if (
                called in methods
                and called not in seen
                and any(isinstance(x, ast.Match) for x in ast.walk(methods[called]))
            ):
                yield from cases(called, methods, seen)
    for match in matches[:1]:
        for case in match.cases:
            classes = [class_name(node.cls) for node in ast.walk(case.pattern) if isinstance(node, ast.MatchClass)]
            inside = [*messages(case.body, methods, seen)] if classes == ["Heard"] else []
            if inside:
                yield from inside
            elif classes:
                # An event that carries a message has a row for each kind of message, as if the message were the event.
                names = classes if isinstance(case.pattern, ast.MatchOr) else classes[:1]
                if classes[0].endswith("Heard"):
                    names = [each for each in classes if not each.endswith("Heard")] or names
                for each in names:
                    yield each, [*case.body]
            else:
                for called in own_calls(*case.body):
                    if called in methods and called not in seen:
                        yield from cases(called, methods, seen)


def messages(code: list[ast.stmt], methods: dict[str, Function], seen: set[str]) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield (message, code) for each message that a machine handles: the cases of the methods that the code of the case `Heard` calls."""
    for called in own_calls(*code):
        if called in methods and called not in seen:
            yield from cases(called, methods, seen)


def class_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def own_calls(*nodes: ast.AST) -> list[str]:
    """Return the names of the methods of `self` that this code calls."""
    found = (node.func for root in nodes for node in ast.walk(root) if isinstance(node, ast.Call))
    return [
        call.attr
        for call in found
        if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "self"
    ]


def reached(code: list[ast.AST], known: dict[str, Function]) -> list[ast.AST]:
    """Return the code of an event, and the code of each known method and function that it calls, directly or through others."""
    found, waiting, seen = [*code], [*code], set()
    while waiting:
        node = waiting.pop()
        names = own_calls(node)
        names += [x.func.id for x in ast.walk(node) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)]
        for name in names:
            if name in known and name not in seen:
                seen.add(name)
                found.append(known[name])
                waiting.append(known[name])
    return found


def row(event: str, meaning: str, code: list[ast.AST], known: dict[str, Function], effects: set[str]) -> str | None:
    """Return the line of the table for one event; None for a method that only returns facts (`is_query`)."""
    parts: dict[str, None] = {}
    made: dict[str, None] = {}
    for node in (x for root in reached(code, known) for x in ast.walk(root) if isinstance(x, ast.Call)):
        call = node.func
        if class_name(call).rpartition(".")[2] in effects:
            made[class_name(call).rpartition(".")[2]] = None
        elif (
            isinstance(call, ast.Attribute)
            and isinstance(call.value, ast.Attribute)
            and isinstance(call.value.value, ast.Name)
            and call.value.value.id == "self"
            and not call.attr.startswith("_")
            and call.attr not in COLLECTIONS
        ):
            parts[f"{call.value.attr.strip('_')}.{call.attr}"] = None
    if event in known and not (parts or made) and is_query(known[event], effects):
        return None
    names = [", ".join(f"`{name}`" for name in found) for found in (parts, sorted(made))]
    return f"| `{event}` | {' | '.join(cell or '-' for cell in (meaning, *names))} |"


COLLECTIONS = {name for kind in (dict, list, set, str, bytes) for name in dir(kind)} | {
    "appendleft",
    "popleft",
    "extendleft",
}
"""The names of methods of collections. A call of such a method changes a collection of the machine, and is no call of a part."""


def meaning(event: str, known: dict[str, Function], of_class: dict[str, str]) -> str:
    return summary(known[event]) if event in known else of_class.get(event.partition(" ")[0], "")


def tables() -> str:
    effects, of_class = effect_names(), meanings()
    pieces = []
    for path in modules():
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in tree.body if isinstance(node, Function)}
        for owner in (node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")):
            known = {**functions, **methods_of(owner)}
            lines = [row(event, meaning(event, known, of_class), code, known, effects) for event, code in events(owner)]
            rows = [line for line in lines if line is not None]
            if len(rows) < 2 or not ast.get_docstring(owner) or "Protocol" in map(ast.unparse, owner.bases):
                continue
            where = path.relative_to(ROOT / "zmqdist")
            head = ["| event | meaning | calls | effects |", "|---|---|---|---|"]
            pieces.append(f"### `{owner.name}`\n\n`{where}`: {summary(tree)}\n\n" + "\n".join([*head, *rows]) + "\n")
    return "\n".join(pieces)


def page(current: str) -> str:
    """Return the new text of the page: its part that is written by hand, unchanged, and after it the generated tables."""
    by_hand, mark, _ = current.partition(BEGIN)
    if not mark:
        raise SystemExit(f"{PAGE.name} has lost the line that says where its generated part begins:\n{BEGIN}")
    return f"{by_hand}{BEGIN}\n{tables()}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    sys.stdout.write(f"{PAGE.name}: {len(modules())} modules\n")
