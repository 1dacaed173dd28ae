"""The module path of a child: the folders of the program are on it, in the program's order, but
libraries do not import from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import zmqdist
from zmqdist.child_command import path_variable
from zmqdist.errors import FailedPreconditionError

LOOK_UP = """
import importlib.util, json, os, sys
import zmqdist.child_command
program, importer, names = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
os.environ.update(zmqdist.child_command.path_variable([program]))
zmqdist.child_command.use_path(sys.path)
assert sys.path[0] == program
look_up = {"find_spec": importlib.util.find_spec}
exec(compile("def origin(name):\\n    spec = find_spec(name)\\n    return spec and spec.origin", importer, "exec"), look_up)
from_program = []
for name in names:
    try:
        origin = look_up["origin"](name)
    except ValueError:  # a module such as __main__, which has no spec
        continue
    if origin is not None and origin.startswith(program):
        from_program.append(name)
print(",".join(from_program))
"""

STANDARD = Path(subprocess.__file__).parent
INSTALLED = "/some/lib/python3/site-packages"
NEW = ["torch_of_nobody", "mine"]
EVERY_NAME = sorted(sys.stdlib_module_names - {"__main__"})


@pytest.mark.parametrize(
    ("importer", "names", "from_program"),
    [
        (f"{STANDARD}/encodings/idna.py", EVERY_NAME, []),
        (f"{INSTALLED}/numpy/core.py", EVERY_NAME, []),
        (f"{Path(zmqdist.__file__).parent}/wire/arrays.py", [*EVERY_NAME, *NEW], []),
        (f"{INSTALLED}/django/conf.py", ["msgspec", *NEW], NEW),
        ("<stdin>", ["stringprep", *NEW], ["stringprep", *NEW]),
        ("/program/helpers.py", ["stringprep", *NEW], ["stringprep", *NEW]),
    ],
    ids=[
        "standard library",
        "library",
        "zmqdist",
        "library that imports for its user",
        "REPL",
        "program",
    ],
)
def test_program_alone_imports_from_its_folder(
    tmp_path: Path, importer: str, names: list[str], from_program: list[str]
) -> None:
    for name in names:
        (tmp_path / f"{name}.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP, str(tmp_path), importer, ",".join(names)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().split(",") == (from_program or [""])


def test_removed_working_directory_starts_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        FailedPreconditionError, match="the working directory of this process was removed"
    ):
        path_variable()
