"""docs/protocol.md says what zmqdist/messages.py says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from zmqdist import messages

DOCS = Path(__file__).resolve().parents[2] / "docs"

_spec = importlib.util.spec_from_file_location("generate_protocol", DOCS / "generate_protocol.py")
assert _spec is not None
assert _spec.loader is not None
generate_protocol = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate_protocol)


def test_the_page_is_what_the_generator_makes() -> None:
    current = (DOCS / "protocol.md").read_text()
    assert current == generate_protocol.page(current), "run: python docs/generate_protocol.py"


def test_the_table_has_a_row_for_each_message_with_sender_receiver_and_meaning() -> None:
    rows = [line.split(" | ") for line in generate_protocol.table().splitlines()[2:]]
    assert [row[1] for row in rows] == [f"`{cls.__name__}`" for cls in messages.ALL]
    assert all(len(row) == 6 and row[2] and row[3] and len(row[5]) > len(" |") for row in rows)


def test_a_page_without_the_mark_is_refused_and_not_overwritten() -> None:
    with pytest.raises(SystemExit, match="has lost the line"):
        generate_protocol.page("# The protocol\n")
