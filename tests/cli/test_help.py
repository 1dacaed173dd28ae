"""The command line itself: help, versions, and what is wrong with it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from tests.cli.helpers import run
from zmqdist import __version__
from zmqdist.launch.exit_codes import ExitCode
from zmqdist_cli.main import COMMANDS, cli


def test_help_loads_no_numpy_nor_zeromq() -> None:
    program = (
        "import sys; from zmqdist_cli.main import main; code = main(['--help']);"
        "heavy = {'numpy', 'zmq', 'yaml', 'msgspec', 'rich'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert all(f"  {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_agrees_with_list(name: str) -> None:
    command = cli.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    message = (
        command.get_short_help_str(limit=200)
        if command.short_help
        else (command.help or "").partition("\n")[0]
    )
    shown = CliRunner().invoke(cli, [name, "--help"], prog_name="zmqdist")
    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: zmqdist {name} [OPTIONS]")
    assert message
    if command.short_help:
        assert message == COMMANDS[name][1]


def test_version_is_one_line() -> None:
    result = run("--version")
    assert (result.code, result.out, result.err) == (0, f"zmqdist {__version__}\n", "")


def test_help_on_stderr_without_arguments() -> None:
    result = run()
    assert (result.code, result.out) == (ExitCode.USAGE, "")
    assert result.err.startswith("Usage: zmqdist ")


def test_closed_pipe_is_no_error() -> None:
    command = (
        f"{sys.executable} -m zmqdist_cli validate --schema | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=50, check=False
    )
    assert (result.stdout, result.stderr) == ("{\n0\n", "")
