"""A command of `zmqdist` in this process: what it prints on each stream, and its exit code.

`click.testing.CliRunner` mixes the two streams before click 8.2, unless an argument that 8.2 no
longer has keeps them apart.
"""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import click


class Ended(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def invoke(command: click.Command, *arguments: str) -> Ended:
    """Run the command to its end."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command.main(arguments)
        except SystemExit as ended:  # how click ends each command
            code = ended.code
    assert isinstance(code, int)
    return Ended(code, out.getvalue(), err.getvalue())
