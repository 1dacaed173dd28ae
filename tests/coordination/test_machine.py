"""The keeper's machines, scenario by scenario: each file of transcripts/, in the folder of its
module (tests/transcripts.py says what a file contains, scripted.py what its lines mean).

Many scenarios are those of TensorFlow's coordination_service_test.cc. Two kinds of its tests do not
apply. TensorFlow's service may have a connection back to its tasks; ours has none, and tasks always
poll for errors. And TensorFlow's service stops when it cannot report an error to any task; ours
continues.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.coordination.scripted import Script
from tests.transcripts import check, promises_of, promises_shown
from zmqdist.coordination import barriers_machine, keys_machine, machine

FOLDER = Path(__file__).parent / "transcripts"
TRANSCRIPTS = sorted(FOLDER.rglob("*.txt"))
MODULES = {"machine": machine, "barriers_machine": barriers_machine, "keys_machine": keys_machine}
OUTSIDE = {"barriers_machine": {"P6"}}
"""Promises that test_barriers_machine.py checks, because they need a smaller table."""


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_effects_of_transcript(path: Path) -> None:
    check(path, Script())


@pytest.mark.parametrize("name", MODULES)
def test_promises_have_transcripts(name: str) -> None:
    paths = [path for path in TRANSCRIPTS if path.parent.name == name]
    missing = promises_of(MODULES[name].__doc__) - promises_shown(paths)
    assert missing == OUTSIDE.get(name, set())
