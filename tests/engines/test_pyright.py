"""pyright in strict mode reveals and refuses in programs what their comments say, and accepts the
examples of the pages as mypy does. Needs `pip install pyright`, which fetches a part of it by npm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.typed_programs import PROGRAMS, strict_programs, unexpected

pytest.importorskip("pyright")


def reports(folder: Path, programs: dict[str, str]) -> list[dict[str, object]]:
    """What pyright says of programs in a folder of their own, so that it finds zmqdist only where
    it is installed."""
    for name, text in programs.items():
        (folder / name).write_text(text)
    settings = {"typeCheckingMode": "strict", "include": ["."]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {done.stderr[-300:]}")
    return json.loads(done.stdout)["generalDiagnostics"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("typed")
    return reports(folder, {f"{name}.py": text for name, text in PROGRAMS.items()})


@pytest.mark.parametrize("name", PROGRAMS)
def test_pyright_says_what_comments_say(said: list[dict[str, object]], name: str) -> None:
    lines: dict[int, list[str]] = {}
    for report in said:
        if Path(report["file"]).stem != name:
            continue
        text = report["message"]
        if report["severity"] == "information":
            text = text.split(' is "', 1)[1].removesuffix('"')
        else:
            text = f"error: {text}"
        lines.setdefault(report["range"]["start"]["line"] + 1, []).append(text)
    wrong = unexpected(PROGRAMS[name], 1, lines)
    assert not wrong, wrong


def test_pyright_accepts_page_blocks(tmp_path: Path) -> None:
    texts = [
        f"{Path(report['file']).name}:{report['range']['start']['line'] + 1}: {report['message']}"
        for report in reports(tmp_path, strict_programs())
    ]
    assert not texts, "\n".join(texts)
