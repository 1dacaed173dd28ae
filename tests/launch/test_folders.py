"""The folder of a run: it is private, it is removed however its owner ends, and no other folder is
touched."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import zmqdist as zd
from tests.launch.helpers import Launched
from zmqdist.launch import folders
from zmqdist.launch.folders import OWNER, RunFolder, folders_in_use, remove_left_behind

KILLED = """
import os, signal, sys
from zmqdist.launch.folders import RunFolder
folder = RunFolder()
(folder.path / "token").write_text("secret")
if sys.argv[1:] == ["forks"] and not os.fork():
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All tests of this file, and their child processes, use a folder of their own for temporary
    files."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def killed(*arguments: str) -> None:
    """Have a process make a folder, and kill the process."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, *arguments]
    assert subprocess.run(command, timeout=50, check=False).returncode == -signal.SIGKILL


def test_folder_is_private_until_closed(temporary: Path) -> None:
    folder = RunFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "keys").mkdir()
    folder.close()
    folder.close()
    assert not list(temporary.iterdir())


def test_folder_of_killed_owner_is_removed(temporary: Path) -> None:
    killed()
    (left,) = temporary.iterdir()
    assert (left / "token").exists()
    folder = RunFolder()
    assert list(temporary.iterdir()) == [folder.path]
    folder.close()


def test_unfinished_removal_is_completed(
    temporary: Path,
) -> None:
    left = temporary / "zmqdist-x.removed"
    left.mkdir(mode=0o700)
    (left / "keys").mkdir()  # the file `owner` is removed already
    assert folders_in_use() == []
    assert remove_left_behind() == [left]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("remover", ["its owner", "the next owner"])
def test_path_unwritable_during_removal(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, remover: str
) -> None:
    if remover == "its owner":
        folder = RunFolder()
        path = folder.path
    else:
        killed()
        (path,) = temporary.iterdir()
    rmtree = shutil.rmtree
    attempts: list[Path] = []

    def writes_first(folder: Path, ignore_errors: bool) -> None:
        with pytest.raises(FileNotFoundError):
            (path / "keys").mkdir()
        attempts.append(path)
        rmtree(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(folders.shutil, "rmtree", writes_first)
    if remover == "its owner":
        folder.close()
    else:
        assert remove_left_behind() == [path]
    assert attempts == [path]
    assert not list(temporary.iterdir())


def test_unrenamable_folder_is_removed(temporary: Path) -> None:
    killed()
    (left,) = temporary.iterdir()
    second = left.with_name(f"{left.name}.removed")
    second.mkdir(mode=0o755)  # of another user, who has seen the name
    (second / "theirs").touch()
    assert remove_left_behind() == [left]
    assert list(temporary.iterdir()) == [second]


def test_two_cleaners_see_no_owner(
    temporary: Path,
) -> None:
    killed()
    (left,) = temporary.iterdir()
    with (left / OWNER).open() as second:
        fcntl.flock(second, fcntl.LOCK_SH)  # as the other process does while it looks
        assert folders_in_use() == []
        assert remove_left_behind() == [left]


@pytest.mark.parametrize(
    "subject", ["its owner lives", "of no run", "being made", "a link", "another name", "a file"]
)
def test_foreign_or_used_folder_stays(subject: str, temporary: Path, tmp_path: Path) -> None:
    run_folder = None
    folder = temporary / ("other-x" if subject == "another name" else "zmqdist-x")
    if subject == "its owner lives":
        run_folder = RunFolder()
    elif subject == "a link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / OWNER).touch()
        folder.symlink_to(tmp_path / "elsewhere")
    elif subject == "a file":
        folder.touch()
    else:
        folder.mkdir()
        if subject != "of no run":
            (folder / (f".{OWNER}" if subject == "being made" else OWNER)).touch()
    before = set(temporary.rglob("*"))
    assert remove_left_behind() == []
    assert set(temporary.rglob("*")) == before
    if run_folder is not None:
        run_folder.close()


def test_folder_of_forked_child_stays(temporary: Path) -> None:
    code = KILLED.replace("signal.pause()", "print(os.getpid(), flush=True); signal.pause()")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, "forks"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert process.wait(20) == -signal.SIGKILL
        assert remove_left_behind() == []
        pidfd = os.pidfd_open(child)
        os.kill(child, signal.SIGKILL)

        assert select.select([pidfd], [], [], 20)[0]
        os.close(pidfd)
    assert len(remove_left_behind()) == 1
    assert not list(temporary.iterdir())


def test_token_of_killed_launcher_is_removed(
    launch: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch("import time\nprint('up', flush=True)\nwhile True: time.sleep(1)")
    job.saw("up")
    job.process.kill()
    assert job.ends() == -signal.SIGKILL
    job.left_nothing(folders=False)
    assert list(job.temporary.rglob("token"))
    monkeypatch.setattr(tempfile, "tempdir", str(job.temporary))
    with zd.local_cluster(workers=0):
        assert len(list(job.temporary.iterdir())) == 1
    job.left_nothing()
