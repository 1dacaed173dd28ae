"""docs/protocol.md says what zmqdist/messages.py says, and docs/machines.md what the machines do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.test_structure import MACHINES
from zmqdist import messages

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = {"protocol.md": generator("generate_protocol"), "machines.md": generator("generate_machines")}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_generator_makes(name: str) -> None:
    current = (DOCS / name).read_text()
    assert current == PAGES[name].page(current), f"run: python docs/{Path(PAGES[name].__file__ or '').name}"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_without_the_mark_is_refused_and_not_overwritten(name: str) -> None:
    with pytest.raises(SystemExit, match="has lost the line"):
        PAGES[name].page("# A page\n")


def test_the_table_has_a_row_for_each_message_with_sender_receiver_and_meaning() -> None:
    rows = [line.split(" | ") for line in PAGES["protocol.md"].table().splitlines()[2:]]
    assert [row[1] for row in rows] == [f"`{cls.__name__}`" for cls in messages.ALL]
    assert all(len(row) == 6 and row[2] and row[3] and len(row[5]) > len(" |") for row in rows)


def test_a_meaning_that_wraps_is_in_the_table_to_its_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = "The client ends a call | and the server\n    frees its arguments.\n\n    Another paragraph.\n    "
    monkeypatch.setattr(messages.CancelCall, "__doc__", wrapped)
    assert " | The client ends a call \\| and the server frees its arguments. |\n" in PAGES["protocol.md"].table()


def test_each_module_with_a_table_of_transitions_is_held_to_the_rules_of_machines() -> None:
    assert set(PAGES["machines.md"].modules()) <= set(MACHINES)


def test_each_transition_that_changes_something_says_what() -> None:
    """An event without an effect and without a part that gets a call may change the machine's own fields only; few are of that kind."""
    rows = [line for line in PAGES["machines.md"].tables().splitlines() if line.startswith("| `")]
    silent = [line for line in rows if line.endswith("| - | - |")]
    assert len(rows) > 250
    assert len(silent) < len(rows) / 3
