"""The program's code as one archive, for hosts that do not share the program's file system.

A bundle has the files of some paths below one folder, the root, which also contains the working
directory of the launcher. On each host the roles run in the copy of the launcher's working
directory, and the folder of the program's script is on their module path, as under the local
launcher. Files with equal names, contents and modes make an archive with equal bytes, so an agent
compares digests to find out whether its host already has the files.

A bundle silently leaves out names that begin with a dot (`.git`, `.venv`, `.env`), `__pycache__`,
`node_modules`, virtual environments and links to folders. It also leaves out three kinds of files,
which the launcher lists for the user: files above CODE_FILE_BYTES_MAX, which are data rather than
code; files whose names say that they hold a secret (`*.key`, `*.pem`, `*.env`); and links to files
outside of the root. A file that `code:` itself names is left out only if it is too large.

Invariant: no bundle has a secret key of the cluster unless `code:` names the key's file, because
`zmqdist keygen` and `zmqdist keys join` write secret keys to files `*.key`.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Final

from zmqdist.errors import DataLossError, NotFoundError, ResourceExhaustedError
from zmqdist.limits import CODE_BYTES_MAX, CODE_FILE_BYTES_MAX, CODE_FILES_MAX

_LEFT_OUT: Final = ("__pycache__", "node_modules")
_ENVIRONMENT_MARK: Final = "pyvenv.cfg"
_SECRET_SUFFIXES: Final = (".key", ".pem", ".env")
_NAMED_MAX: Final = 3
MIB: Final = 2**20


@dataclass(frozen=True)
class CodeBundle:
    """The files of a program as an archive.

    Attributes:
      root: the folder to which the names of the files are relative.
      paths: the packed files and folders, relative to the root.
      imports: the folders that the roles have on their module path, relative to the root.
      archive: the contents of a tar file.
      files: number of files in the archive.
      left_out: the files that the user would expect in the archive but that are not in it, each as
        (reason, name relative to the root).
      working: the working directory of the roles, relative to the root. This folder may be absent
        from the archive.
    """

    root: Path
    paths: tuple[str, ...]
    imports: tuple[str, ...]
    archive: bytes
    files: int
    left_out: tuple[tuple[str, str], ...] = ()
    working: str = "."

    @property
    def digest(self) -> str:
        """SHA-256 of the archive, in hexadecimal."""
        return hashlib.sha256(self.archive).hexdigest()

    def describe(self) -> str:
        """Return a phrase about the size of the bundle for the user, such as "0.1 MiB of code, 12
        files of /srv/train"."""
        text = f"{len(self.archive) / MIB:.1f} MiB of code, {self.files} files of {self.root}"
        for reason, group in itertools.groupby(self.left_out, key=itemgetter(0)):
            names = [name for _, name in group]
            text += f"; without {', '.join(names[:_NAMED_MAX])}{', ...' if len(names) > _NAMED_MAX else ''} ({reason})"
        return text


def check_paths(paths: Sequence[str]) -> None:
    """Raise NotFoundError if a path of `code:` does not exist in the working directory."""
    for path in paths:
        if not os.path.exists(path):
            raise NotFoundError(f"code: {path!r} does not exist in {os.getcwd()}")


def bundle_of(paths: Sequence[str], script: str | None) -> CodeBundle:
    """Pack files and folders. Their paths are relative to the working directory.

    Args:
      script: the program's script, whose folder is put on the module path. If `script` is None or
        not below the root, the working directory is put on the module path instead.

    Raises:
      NotFoundError: a path does not exist.
      ResourceExhaustedError: the files are too many or too large for code.
    """
    check_paths(paths)
    absolute = [Path(os.path.abspath(path)) for path in paths]
    here = Path.cwd()
    folders = [path if path.is_dir() else path.parent for path in absolute]
    root = Path(os.path.commonpath([here, *folders]))
    names = tuple(str(path.relative_to(root)) for path in absolute)
    working = str(here.relative_to(root))
    beside = None if script is None else Path(os.path.abspath(script)).parent
    imports = (
        working
        if beside is None or not beside.is_relative_to(root)
        else str(beside.relative_to(root))
    )
    return replace(pack(root, names), imports=(imports,), working=working)


def pack(root: Path, paths: Sequence[str]) -> CodeBundle:
    """Pack files and folders below `root`. Raises ResourceExhaustedError if the files are too many
    or too large for code, and OSError if a file cannot be read.
    """
    members: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    total = 0
    for path in paths:
        for file in _files(root / path):
            name, size = str(file.relative_to(root)), file.stat().st_size
            if reason := _why_left_out(file, root, size, named=file == root / path):
                left_out[name] = reason
                continue
            total += 0 if name in members else size
            members[name] = file
            if len(members) > CODE_FILES_MAX or total > CODE_BYTES_MAX:
                sources = ", ".join(str(root / source) for source in paths)
                raise ResourceExhaustedError(
                    f"{sources}: more than {CODE_BYTES_MAX // MIB} MiB or {CODE_FILES_MAX:,} "
                    f"files, too much for code that is "
                    "sent to hosts: name what the workers import as `code:` in the cluster file, "
                    "or write `code: []` if the "
                    "hosts share this file system"
                )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(members):
            data = members[name].read_bytes()
            # the entry has no time and no owner, so that equal files make equal archives
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = members[name].stat().st_mode & 0o755
            archive.addfile(entry, io.BytesIO(data))
    reasons = sorted((reason, name) for name, reason in left_out.items() if name not in members)
    return CodeBundle(root, tuple(paths), (".",), buffer.getvalue(), len(members), tuple(reasons))


def _why_left_out(file: Path, root: Path, size: int, named: bool) -> str:
    """Return why a file is left out of the archive, or "" if it is not. A file that `code:` names
    is left out only if it is too large."""
    if size > CODE_FILE_BYTES_MAX:
        return f"above {CODE_FILE_BYTES_MAX // MIB} MiB"
    if named:  # the user has chosen the file, so its name is no reason to leave it out
        return ""
    if file.suffix in _SECRET_SUFFIXES:
        return "a secret by its name"
    if file.is_symlink() and not file.resolve().is_relative_to(root.resolve()):
        return f"a link out of {root}"
    return ""


def _files(path: Path) -> Iterator[Path]:
    """Yield the files below the folder `path` that a bundle does not silently leave out. If `path`
    is a file, yield only `path`."""
    if path.is_file():
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if _is_code(Path(folder, name))]
        for name in files:
            file = Path(folder, name)
            if not name.startswith(".") and not name.endswith(".pyc") and file.is_file():
                yield file


def _is_code(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in _LEFT_OUT:
        return False
    return not folder.is_symlink() and not (folder / _ENVIRONMENT_MARK).exists()


def unpack(archive: bytes, digest: str, folder: Path) -> None:
    """Write the files of an archive below `folder`, which must be empty.

    Raises:
      DataLossError: the archive does not have this digest, or it has an entry that is not a regular
        file below the folder. Some files may have been written.
      OSError: a file cannot be written.
    """
    if hashlib.sha256(archive).hexdigest() != digest:
        raise DataLossError("the archive of the code was damaged during the transfer")
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for entry in opened:
                # the archive is of another host: no entry may lead out of the folder
                parts = Path(entry.name).parts
                if not entry.isreg() or not parts or entry.name.startswith("/") or ".." in parts:
                    raise DataLossError(
                        f"the archive of the code has {entry.name!r}, which is no file below its "
                        f"folder"
                    )
                data = opened.extractfile(entry)
                assert data is not None
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(
                    target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, entry.mode & 0o755
                )
                with open(descriptor, "wb") as file:
                    file.write(data.read())
    except tarfile.TarError as error:
        raise DataLossError(f"the archive of the code cannot be read: {error}") from None
