"""The command that starts a module of this package as a process, and the module path of that
process.

Functions of the program find in a child process the modules that they find in the program, because
the child gets the program's `sys.path`. But what zmqdist itself imports in a child, at the start or
later, must not come from the program's folder or the working directory: a file there with the name
of a module that zmqdist, a library or the standard library needs, such as `msgspec.py` or
`stringprep.py`, would run in place of that module. `LibraryFinder` hides these folders from the
imports of libraries.

The parent hands the path over in an environment variable and not in PYTHONPATH, from which Python
imports modules while it starts. The command imports zmqdist from the folder from which the parent
has imported it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Final

from zmqdist.errors import FailedPreconditionError

PATH_ENV: Final = "ZMQDIST_MODULE_PATH"
"""The environment variable in which a child gets its module path. The child removes it when it
starts."""

_PACKAGE: Final = os.path.dirname(os.path.realpath(__file__))
_STANDARD_LIBRARY: Final = os.path.dirname(os.__file__)
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")
_IMPORTING: Final = ("importlib", "cloudpickle", "pickle")
"""Modules that import for their caller."""
_UNPICKLING: Final = os.path.join(_PACKAGE, "wire", "trusted.py")
"""The module that unpickles, and so imports what a pickle names."""

_START: Final = """\
# {module} of zmqdist
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import importlib, importlib.util
spec = importlib.util.spec_from_file_location("zmqdist", {init!r})
sys.modules["zmqdist"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["zmqdist"])
importlib.import_module("zmqdist.child_command").use_path(sys.path)
sys.exit(importlib.import_module({module!r}).main())
"""

fresh_path: list[str] = []
"""The module path of this process before it got that of its parent. Empty in a process that
`child_command` has not started."""


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a process that calls `main()` of a module of this package. The process
    exits with the return value of `main()`.

    Args:
      arguments: the values of `sys.argv[1:]` in the process.
    """
    init = os.path.join(_PACKAGE, "__init__.py")
    return [sys.executable, "-c", _START.format(init=init, module=module), *arguments]


def path_variable(first: Sequence[str] | None = None) -> dict[str, str]:
    """Return the environment variable that gives a child its module path.

    Args:
      first: absolute folders of the program, which precede the folders on which Python starts. None
        means the `sys.path` of this process.

    Raises:
      FailedPreconditionError: the working directory of this process was removed.
    """
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        raise FailedPreconditionError(
            "the working directory of this process was removed, so child processes cannot start "
            "in it: change to a folder that exists"
        ) from None
    path = [
        os.path.join(directory, folder) if folder else directory
        for folder in sys.path
        if type(folder) is str
    ]
    program = os.path.realpath(getattr(sys.modules.get("__main__"), "__file__", None) or "/")
    hidden = [*LibraryFinder.hidden, *(first or ())]
    hidden += [
        folder
        for folder in path
        if (real := os.path.realpath(folder)) == directory or program.startswith(f"{real}/")
    ]
    # A folder of the program in which the libraries of this process are installed, too, cannot be
    # hidden from them.
    library = getattr(sys.modules.get("msgspec"), "__file__", None) or ""
    libraries = os.path.dirname(os.path.dirname(library))
    hidden = [folder for folder in hidden if folder != libraries and not _is_library(f"{folder}/")]
    return {PATH_ENV: json.dumps([path if first is None else first, hidden])}


def folders_of(variable: str | None) -> tuple[list[str], list[str]]:
    """Return the folders that precede the child's own, and the hidden folders, from the value of
    the variable PATH_ENV."""
    first, hidden = json.loads(variable or "[[], []]")
    return first, hidden


def use_path(start: Iterable[str]) -> None:
    """Take the module path over that the parent has put into this process's environment.

    Args:
      start: the folders on which Python has started.
    """
    fresh_path[:] = start
    first, hidden = folders_of(os.environ.pop(PATH_ENV, None))
    sys.path[:] = dict.fromkeys([*first, *fresh_path])
    LibraryFinder.hidden = frozenset(hidden)
    if LibraryFinder not in sys.meta_path:
        sys.meta_path[sys.meta_path.index(PathFinder)] = LibraryFinder


class LibraryFinder(PathFinder):
    """Finds modules on `sys.path` as Python does. But it first leaves out the hidden folders, and
    relative ones, if a library imports the module. If the import is one of zmqdist, or of a library
    for a module of the standard library, these folders are not searched at all.

    Attributes:
      hidden: the folders of the program that are hidden from libraries.
    """

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        importer = "" if path is not None else _importer(sys._getframe(1))
        is_own = importer.startswith(f"{_PACKAGE}/")
        if is_own or _is_library(importer):
            visible = [
                folder for folder in sys.path if folder not in cls.hidden and os.path.isabs(folder)
            ]
            spec = super().find_spec(fullname, visible, target)
            if spec is not None or is_own or fullname in sys.stdlib_module_names:
                return spec
        return super().find_spec(fullname, path, target)


def _importer(frame: FrameType | None) -> str:
    """Return the file of the code that imports a module, or "" if a pickle of the program names the
    module."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _IMPORTING:
        frame = frame.f_back
    if frame is None or (
        frame.f_code.co_filename == _UNPICKLING and frame.f_code.co_name != "<module>"
    ):
        return ""
    return frame.f_code.co_filename


def _is_library(file: str) -> bool:
    return file.startswith((f"{_STANDARD_LIBRARY}/", "<frozen ")) or any(
        folder in file for folder in _INSTALLED
    )
