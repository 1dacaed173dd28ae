"""docs/protocol.md says what zmqdist/messages.py says, and docs/machines.md what the machines
promise."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.test_structure import MACHINES
from zmqdist import messages

DOCS = Path(__file__).resolve().parents[2] / "docs"

FOR_RUNTIMES = {
    "ActorResults",
    "AskWorker",
    "DescribeWork",
    "LogLines",
    "Observe",
    "Read",
    "ReadDone",
    "WorkDescribed",
    "WorkerAnswer",
}
"""Messages that no machine handles: relays, figures, drain reports, the inside of workers, and a
line in the log."""


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = {
    "protocol.md": generator("generate_protocol"),
    "machines.md": generator("generate_machines"),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_equals_generator_output(name: str) -> None:
    current = (DOCS / name).read_text()
    assert current == PAGES[name].page(current), (
        f"run: python docs/{Path(PAGES[name].__file__ or '').name}"
    )


@pytest.mark.parametrize("name", PAGES)
def test_page_without_mark_is_not_overwritten(name: str) -> None:
    with pytest.raises(SystemExit, match="has lost the line"):
        PAGES[name].page("# A page\n")


def test_page_lists_every_message() -> None:
    sections = PAGES["protocol.md"].every_message().split("### ")[1:]
    items = {}
    for section in sections:
        ends, _, listed = section.partition("\n\n")
        for item in listed.replace("\n  ", " ").splitlines():
            found = re.fullmatch(r"- (\d+) `(\w+)`\((.*?)\): (.+)", item)
            assert found is not None or not item, item
            if found is not None:
                items[found[2]] = (int(found[1]), ends, found[3].replace("`", ""))
    assert items == {
        cls.__name__: (cls.__struct_config__.tag, cls.SENT, ", ".join(cls.__struct_fields__))
        for cls in messages.ALL
    }


def test_wrapped_meaning_is_complete_on_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrapped = "The client ends a call and the server\n    frees its arguments.\n\n    Another paragraph.\n    "
    monkeypatch.setattr(messages.CancelCall, "__doc__", wrapped)
    page = PAGES["protocol.md"].every_message()
    assert (
        "`CancelCall`(`id`): The client ends a call and the server frees its arguments.\n" in page
    )


def test_machines_on_page_are_checked_machines() -> None:
    assert set(PAGES["machines.md"].modules()) <= set(MACHINES)


def test_promises_are_numbered_without_gap() -> None:
    count = 0
    for path in PAGES["machines.md"].modules():
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        numbers = [number for number, _ in PAGES["machines.md"].promises(docstring)]
        assert numbers == [f"{number[0]}{i}" for i, number in enumerate(numbers, 1)], path
        count += len(numbers)
    assert count > 200


def test_transition_tables_have_row_per_state() -> None:
    count = 0
    for path in PAGES["machines.md"].modules():
        for name, table in PAGES["machines.md"].tables(path).items():
            states = {*type(next(iter(table)))}
            assert table.keys() == states, f"{path}: {name}"
            assert {after for row in table.values() for after in row} <= states
            count += 1
    assert count >= 4


@pytest.mark.parametrize(
    ("promise", "shown"),
    [
        ("each ticket gets exactly one reply", "each ticket gets exactly one reply"),
        (
            "the store has at most `keys_max` keys; a key that does not fit is refused",
            "the store has at most `keys_max` keys...",
        ),
        (
            "a task has one incarnation at a time, unless it restarts. Then two.",
            "a task has one incarnation at a time...",
        ),
        (
            "a (job, index) has at most one member at any time",
            "a (job, index) has at most one member at any time",
        ),
    ],
)
def test_continued_promise_is_marked(promise: str, shown: str) -> None:
    assert PAGES["machines.md"].in_short(promise) == shown


def test_messages_are_events_of_machines() -> None:
    page = (DOCS / "machines.md").read_text()
    roles = ("coordinator", "worker", "dispatcher")
    received = {cls.__name__ for cls in messages.ALL if cls.SENT.split(" -> ")[-1] in roles}
    assert {name for name in received if f"`{name}`" not in page} == FOR_RUNTIMES
