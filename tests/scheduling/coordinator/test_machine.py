"""The coordinator's machine, scenario by scenario: each file of transcripts/.

The first line of a file names the promises (machine.py) and says what it shows. scripted.py reads
the inputs and writes the effects, and checks after each input what must always be true. After a
change of the machine `make transcripts` writes all effects anew; read the difference.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scheduling.coordinator.scripted import Script, WatchedWork
from tests.transcripts import check, promises_of
from zmqdist.scheduling.coordinator import called_actors, machine
from zmqdist.scheduling.coordinator.work import MethodCall

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
TITLE = re.compile(r"# ([KP]\d+(?:, [KP]\d+)*): \S")


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_scenario_matches_its_transcript(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the machine knows calls by their exact class, so this class has its states watched itself
    monkeypatch.setattr(MethodCall, "state", WatchedWork.state, raising=False)
    assert TITLE.match(path.read_text()), "the first line has the promises and what they mean here"
    check(path, Script())


def test_promises_of_machine_have_scenarios() -> None:
    titles = [TITLE.match(path.read_text()) for path in TRANSCRIPTS]
    assert promises_of(machine.__doc__) | promises_of(called_actors.__doc__, "K") == {
        name for title in titles if title for name in title[1].split(", ")
    }
