"""The program's code for hosts: which files are packed, which are refused, and what an agent does
with the archive."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from zmqdist import limits
from zmqdist.errors import DataLossError, NotFoundError, ResourceExhaustedError, UnknownError
from zmqdist.launch.agent import agent_command
from zmqdist.launch.agent_stream import AgentHost, NoteHandler, ProcessStream
from zmqdist.launch.code_bundle import CodeBundle, bundle_of, pack, unpack
from zmqdist.launch.hosts import AgentPool
from zmqdist.transport.keys import keygen


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a program; it is the working directory of the test."""
    folder = tmp_path / "project"
    for name, text in {
        "train.py": "import helpers",
        "helpers.py": "VALUE = 1",
        "package/__init__.py": "",
        "package/part.py": "",
        ".git/config": "",
        ".env": "SECRET=1",
        ".venv/lib/x.py": "",
        "environment/pyvenv.cfg": "",
        "environment/lib/x.py": "",
        "package/__pycache__/part.cpython-311.pyc": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def names(bundle: CodeBundle) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as archive:
        return archive.getnames()


def test_hidden_and_compiled_files_left_out(project: Path) -> None:
    bundle = bundle_of(["."], "train.py")
    assert names(bundle) == ["helpers.py", "package/__init__.py", "package/part.py", "train.py"]
    assert (bundle.root, bundle.imports, bundle.files) == (project, (".",), 4)


def test_script_folder_on_path_and_cwd_is_root(
    project: Path,
) -> None:
    (project / "examples").mkdir()
    (project / "examples" / "digits.py").write_text("")
    bundle = bundle_of(["examples", "helpers.py"], "examples/digits.py")
    assert names(bundle) == ["examples/digits.py", "helpers.py"]
    assert (bundle.root, bundle.imports) == (project, ("examples",))


def test_outer_paths_keep_relative_position(project: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").write_text("")
    bundle = bundle_of(["helpers.py", "../other"], "../other/train.py")
    assert (bundle.root, bundle.working, bundle.imports) == (tmp_path, "project", ("other",))
    assert names(bundle) == ["other/train.py", "project/helpers.py"]


def test_working_directory_on_path_without_script(project: Path, tmp_path: Path) -> None:
    (tmp_path / "util.py").write_text("")
    assert bundle_of(["helpers.py", "../util.py"], None).imports == ("project",)


def test_secrets_and_outer_files_left_out_by_name(project: Path, tmp_path: Path) -> None:
    keygen(project / "keys")
    (project / "prod.env").write_text("PASSWORD=1")
    (tmp_path / "shadow").write_text("secret")
    (project / "link.txt").symlink_to(tmp_path / "shadow")
    (project / "again.py").symlink_to("helpers.py")
    bundle = bundle_of(["."], None)
    assert sorted(set(names(bundle)) - {"train.py", "package/__init__.py", "package/part.py"}) == [
        "again.py",
        "helpers.py",
        "keys/authorized",
        "keys/server.pub",
    ]
    assert f"; without link.txt (a link out of {project})" in bundle.describe()
    assert (
        "; without keys/admin.key, keys/client.key, keys/observe.key, ... (a secret by its name)"
        in bundle.describe()
    )
    assert ("a secret by its name", "prod.env") in bundle.left_out


def test_named_secret_is_sent_and_stays_private(project: Path, tmp_path: Path) -> None:
    (project / "service.pem").write_text("secret")
    (project / "service.pem").chmod(0o600)
    bundle = bundle_of(["service.pem"], None)
    (tmp_path / "there").mkdir()
    unpack(bundle.archive, bundle.digest, tmp_path / "there")
    assert (tmp_path / "there" / "service.pem").stat().st_mode & 0o777 == 0o600


def test_digest_ignores_times_of_files(project: Path) -> None:
    before = bundle_of(["."], None).digest
    os.utime(project / "helpers.py", (1, 1))
    assert bundle_of(["."], None).digest == before
    (project / "helpers.py").write_text("VALUE = 2")
    assert bundle_of(["."], None).digest != before


def test_large_file_left_out_by_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqdist.launch.code_bundle.CODE_FILE_BYTES_MAX", 2**20)
    (project / "data.bin").write_bytes(bytes(2**20 + 1))
    bundle = bundle_of(["."], None)
    assert bundle.left_out == (("above 1 MiB", "data.bin"),)
    assert (
        bundle.describe()
        == f"0.0 MiB of code, 4 files of {project}; without data.bin (above 1 MiB)"
    )


@pytest.mark.parametrize(("bound", "value"), [("CODE_BYTES_MAX", 10), ("CODE_FILES_MAX", 3)])
def test_too_much_code_is_refused_in_one_sentence(
    project: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(f"zmqdist.launch.code_bundle.{bound}", value)
    with pytest.raises(
        ResourceExhaustedError,
        match=r"too much for code that is sent to hosts: name what .* as `code:`",
    ):
        bundle_of(["."], None)


def test_missing_path_is_named(project: Path) -> None:
    with pytest.raises(NotFoundError, match="code: 'gone' does not exist"):
        bundle_of(["gone"], None)


def test_archive_unpacks_to_same_files(project: Path, tmp_path: Path) -> None:
    (project / "train.py").chmod(0o755)
    bundle = bundle_of(["."], None)
    (tmp_path / "there").mkdir()
    unpack(bundle.archive, bundle.digest, tmp_path / "there")
    assert pack(tmp_path / "there", ["."]).digest == bundle.digest
    assert os.access(tmp_path / "there" / "train.py", os.X_OK)


def forged(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.type = kind
        entry.linkname = "/etc/passwd"
        archive.addfile(entry)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        forged("../outside.py"),
        forged("/outside.py"),
        forged("inside/../../outside.py"),
        forged("link.py", tarfile.SYMTYPE),
        forged("link.py", tarfile.LNKTYPE),
        forged("device", tarfile.CHRTYPE),
    ],
)
def test_archive_leading_outside_is_refused(archive: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    with pytest.raises(DataLossError, match="which is no file below its folder"):
        unpack(archive, hashlib.sha256(archive).hexdigest(), folder)
    assert list(tmp_path.iterdir()) == [folder]
    assert not list(folder.iterdir())


def test_archive_of_wrong_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataLossError, match="was damaged during the transfer"):
        unpack(forged("a.py"), "0" * 64, tmp_path)


class Hosts:
    """Agents in processes of this host."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.pool = AgentPool(
            [AgentHost(name, None, self._open) for name in ("a", "b")], self.said.append
        )

    def _open(self, note: NoteHandler) -> ProcessStream:
        environment = {**os.environ, "TMPDIR": str(self.temporary)}
        command = agent_command(sys.executable, 60.0)
        return ProcessStream(
            command, lambda code, notes: f"ended ({code}) {notes}", note, environment
        )

    @property
    def received(self) -> list[Path]:
        """Return the folders with code on the hosts."""
        return [folder for folder in self.temporary.glob("zmqdist-*/*") if folder.is_dir()]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    pool_of_hosts = Hosts(tmp_path)
    yield pool_of_hosts
    pool_of_hosts.pool.close()
    assert not list(pool_of_hosts.temporary.iterdir()), "an agent removes the code at its end"


def test_host_with_equal_files_gets_no_code(project: Path, hosts: Hosts) -> None:
    hosts.pool.send_code(bundle_of(["."], "train.py"))
    assert hosts.said == []
    assert hosts.received == []


def test_hosts_without_files_get_them_once(project: Path, hosts: Hosts) -> None:
    bundle = bundle_of(["."], "train.py")
    (project / "helpers.py").write_text("VALUE = 2")  # the hosts find another version of the file
    hosts.pool.send_code(bundle)
    assert sorted(hosts.said) == [
        f"[{host}] gets 0.0 MiB of code, 4 files of {project}" for host in ("a", "b")
    ]
    assert [pack(folder, ["."]).digest for folder in hosts.received] == [bundle.digest] * 2


def test_large_bundle_arrives_in_parts(project: Path, hosts: Hosts) -> None:
    (project / "noise.py").write_bytes(os.urandom(3 * limits.CODE_PART_BYTES))
    bundle = bundle_of(["."], None)
    (project / "noise.py").unlink()
    hosts.pool.send_code(bundle)
    assert [pack(folder, ["."]).digest for folder in hosts.received] == [bundle.digest] * 2


def test_unpackable_bundle_error_names_host(hosts: Hosts) -> None:
    bundle = CodeBundle(Path("/nowhere"), (".",), (".",), forged("../outside.py"), 1)
    with pytest.raises(
        UnknownError,
        match=r"^a: the code of the program cannot be unpacked there: .* no file below",
    ):
        hosts.pool.send_code(dataclasses.replace(bundle))
