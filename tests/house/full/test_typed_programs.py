"""mypy --strict reveals and refuses in programs what their comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.full.test_types_of_programs import checked_by_mypy
from tests.house.typed_programs import PROGRAMS, strict_programs, unexpected


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("typed")
    return checked_by_mypy(folder, {f"{name}.py": text for name, text in PROGRAMS.items()})


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", PROGRAMS)
def test_mypy_says_what_comments_say(output: str, name: str) -> None:
    lines: dict[int, list[str]] = {}
    for file, number, text in re.findall(r"^(\w+)\.py:(\d+): (.*)$", output, re.MULTILINE):
        if file != name:
            continue
        if text.startswith("error"):
            lines.setdefault(int(number), []).append(text)
        elif revealed := re.fullmatch(r'note: Revealed type is "(.*)"', text):
            lines.setdefault(int(number), []).append(revealed[1])
    wrong = unexpected(PROGRAMS[name], 0, lines)
    assert not wrong, wrong


@pytest.mark.timeout(180)
def test_mypy_accepts_page_blocks_in_strict_mode(tmp_path: Path) -> None:
    text = checked_by_mypy(tmp_path, strict_programs())
    assert not text, text
