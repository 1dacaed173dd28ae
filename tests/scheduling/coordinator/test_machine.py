"""The coordinator's machine, scenario by scenario: each file of transcripts/.

The first line of a file names the promises (machine.py) and says what it shows. Then come blocks:
lines of input, ----, the machine's effects, and a blank line. tests/scheduling/coordinator/scripted.py reads the
one and writes the other, and checks after each input what must always be true. After a change of
the machine `make transcripts` writes all effects anew; read the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.scheduling.coordinator.scripted import Script
from zmqdist.scheduling.coordinator import machine

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
TITLE = re.compile(r"# ([PGC]\d+(?:, [PGC]\d+)*): \S")


def played(text: str) -> str:
    """Return the transcript with the effects that its inputs have now."""
    title, *blocks = text.strip().split("\n\n")
    script, parts = Script(), [title]
    for block in blocks:
        inputs, separator, _ = (block + "\n").partition("----\n")
        if separator:
            lines = (line for line in inputs.splitlines() if not line.startswith("#"))
            try:
                effects = [effect for line in lines for effect in script.answer(line)]
            except Exception as error:
                raise AssertionError(f"{error!r} in the block\n{inputs}") from error
            block = "\n".join([f"{inputs}----", *effects])
        parts.append(block)
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_scenario_matches_its_transcript(path: Path) -> None:
    text = path.read_text()
    assert TITLE.match(text), "the first line has the promises and what they mean here"
    now = played(text)
    if os.environ.get("TRANSCRIPTS") == "write":
        path.write_text(now)
    else:
        assert now == text, "make transcripts writes it anew"


def test_promises_of_machine_have_scenarios() -> None:
    promises = re.findall(r"^    ([PGC]\d+) ", machine.__doc__ or "", re.MULTILINE)
    titles = [TITLE.match(path.read_text()) for path in TRANSCRIPTS]
    assert {*promises} == {name for title in titles if title for name in title[1].split(", ")}
