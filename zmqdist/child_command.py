"""The command that starts a module of this package as a process, without importing modules from the working directory first.

`python -m` puts the working directory first on the module path. If the directory had a file such as `msgspec.py`, which has the name of a
package that zmqdist needs, the file would be imported in place of the package. This command imports zmqdist from the folder from which the
current process has imported it. The started module calls `add_working_directory` after its own imports, so that the user's functions still
find their modules in the working directory.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

_START = """\
# {module} of zmqdist
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import importlib, importlib.util
spec = importlib.util.spec_from_file_location("zmqdist", {init!r})
sys.modules["zmqdist"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["zmqdist"])
sys.exit(importlib.import_module({module!r}).main())
"""


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a process that calls `main()` of a module of this package. The process exits with the return value of `main()`.

    Args:
      arguments: the values of `sys.argv[1:]` in the process.
    """
    return [sys.executable, "-c", _START.format(init=str(_PACKAGE / "__init__.py"), module=module), *arguments]


def add_working_directory() -> None:
    """Put the working directory first on the module path, as `python -m` does, unless Python runs in safe-path mode."""
    if not getattr(sys.flags, "safe_path", False):
        with contextlib.suppress(OSError):  # if the working directory was removed, there are no modules to find in it
            sys.path.insert(0, os.getcwd())
