"""The machine of the data service's dispatcher, scenario by scenario: each file of transcripts/.

tests/transcripts.py has the form, scripted.py the lines. After a change of the machine
`make transcripts` writes all effects anew; read the difference.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import transcripts
from tests.data.service.dispatcher.machine.scripted import Script
from zmqdist.data.service.dispatcher.machine import machine, portions, rounds

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
TITLE = re.compile(r"# ([DER]\d+(?:, [DER]\d+)*|clients): \S")


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_scenario_has_effects_of_its_transcript(path: Path) -> None:
    assert TITLE.match(path.read_text()), "the first line has the promises and their meaning here"
    transcripts.check(path, Script())


def test_promises_have_scenarios() -> None:
    heads = "".join(module.__doc__ or "" for module in (machine, portions, rounds))
    titles = [TITLE.match(path.read_text()) for path in TRANSCRIPTS]
    names = {name for title in titles if title for name in title[1].split(", ")}
    assert set(re.findall(r"^    ([DER]\d+) ", heads, re.MULTILINE)) == names - {"clients"}
