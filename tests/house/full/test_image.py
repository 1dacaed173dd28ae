"""What deploy/Dockerfile copies is enough to build the wheel, by the command that it runs; Docker
is not needed for that."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.test_deploy import ROOT, instructions


@pytest.mark.timeout(180)
def test_image_files_build_wheel_with_command(tmp_path: Path) -> None:
    commands = []
    for name, rest in instructions():
        words = rest.split()
        if name == "FROM" and commands:
            break
        if name == "COPY":
            for each in words[:-1]:
                copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
                copy(ROOT / each, tmp_path / each)
        elif name == "RUN" and "wheel" in words[:4]:
            commands.append([word.replace("/wheels", str(tmp_path / "wheels")) for word in words])
    ((_, *command),) = commands
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("zmqdist-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"zmqdist/launch/agent.py", "zmqdist_cli/main.py", "zmqdist/py.typed"} <= set(names)
