"""The command `zmqdist`. It finds the subcommand, and reports an error of the subcommand with one
line and an exit code.

The module of a subcommand is imported when a user runs the subcommand, because some of these
modules import NumPy and ZeroMQ, which `zmqdist --help` does not need. Each short help is therefore
written here as well as at its command. tests/cli/test_help.py compares the two texts.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any, Final

import click

from zmqdist._version import __version__
from zmqdist.errors import ConfigError, OpError, of_the_system
from zmqdist.files import fill_standard_streams
from zmqdist.launch.exit_codes import ExitCode, exit_code_for
from zmqdist.platforms import check_linux
from zmqdist_cli.common import printable
from zmqdist_cli.interrupts import importing

COMMANDS: Final = {
    "launch": ("launch", "Start all jobs of a cluster file and run its program."),
    "dispatcher": ("roles", "Run a dispatcher in the foreground."),
    "worker": ("roles", "Run a worker in the foreground."),
    "server": ("roles", "Run one task of a cluster in the foreground."),
    "status": ("status", "Show the workers, queues and lost workers of a dispatcher, once."),
    "top": ("status", "Show the workers, queues and lost workers of a dispatcher, live."),
    "dashboard": ("dashboard", "Show a running cluster in the browser."),
    "stack": ("inside", "Show where the functions of a worker are in their code."),
    "metrics": ("metrics", "Serve the figures of a running cluster for Prometheus."),
    "profile": ("inside", "Record which functions take the time."),
    "logs": ("inside", "Show what functions have printed."),
    "methods": ("call", "List the methods of a server."),
    "call": ("call", "Call a method of a server."),
    "validate": ("validate", "Check a cluster file."),
    "keygen": ("keys", "Make the CURVE keys of a cluster."),
    "keys": ("keys", "Manage the keys that a running dispatcher accepts."),
    "scale": ("control", "Change how many workers a launched cluster has."),
    "drain": ("control", "Stop one worker after it has finished its running functions."),
    "shutdown": ("control", "Stop a dispatcher and its workers, or all tasks of a cluster."),
    "doctor": ("doctor", "Find faults, and say what to do about each."),
    "bench": ("bench", "Compare the speed of zmqdist with bare pyzmq on this host."),
}
"""The module of each command, and its line in `zmqdist --help`."""

LINUX_ONLY: Final = frozenset({"launch", "dispatcher", "worker", "server", "doctor", "bench"})


class Commands(click.Group):
    """The group of all commands. It imports the module of a command when the command is used, and
    reports the failure of a command in one line.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            # Without arguments, click 8.1 would print the help to stdout and exit with 0, and 8.2
            # would raise a class that 8.1 lacks.
            click.echo(ctx.get_help(), err=True)
            ctx.exit(int(ExitCode.USAGE))
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name in LINUX_ONLY:
            check_linux(f"zmqdist {cmd_name}", "run it on a Linux host")
        with importing():
            module = importlib.import_module(f"zmqdist_cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from zmqdist.field_types import did_you_mean

            hint = did_you_mean(args[0], COMMANDS)
            raise click.UsageError(f"no such command {args[0]!r} ({hint})", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # caught here, because click would exit with code 1
            discard_output()
            ctx.exit(int(ExitCode.OK))
        except Exception as error:
            named = (
                error
                if isinstance(error, OpError | ConfigError | NotImplementedError)
                else of_the_system(error)
            )
            if named is None:
                raise
            report(f"{ctx.command_path} {ctx.invoked_subcommand}: {named}")
            ctx.exit(int(exit_code(named)))


def report(message: str) -> None:
    """Print a message to stderr as one line of printable characters, because it may quote another
    process."""
    click.echo(printable(" ".join(message.split())), err=True)


def discard_output() -> None:
    """Send further output to /dev/null, because the reader of the pipe has closed it, as in
    `zmqdist status | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def exit_code(error: Exception) -> ExitCode:
    """Return the exit code for an error that zmqdist raises on purpose."""
    return exit_code_for(error.error_code) if isinstance(error, OpError) else ExitCode.CONFIG


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zmqdist", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", count=True, help="Print logs on stderr; -vv prints more.")
@click.pass_context
def cli(context: click.Context, verbose: int) -> None:
    """Run Python functions, services, parameter servers and input pipelines on many processes or
    hosts.

    \b
    TARGET is the host:port of a dispatcher, or the cluster file that
    `zmqdist launch` runs on this host. You may leave it out in a process
    that `zmqdist launch` has started, except the evaluator.

    \b
    Exit codes: 0 done, 1 the program or request failed, 2 the command line
    or a file is wrong, 3 no reply, 4 refused, 130 Ctrl-C (0 for a
    command that runs until Ctrl-C).
    `launch` returns the exit code of its program.
    """
    context.obj = verbose
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    log_format = "%(asctime)s %(levelname)s %(name)s: %(message)s" if verbose else "%(message)s"
    logging.basicConfig(level=level, format=log_format)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code. An error that zmqdist raises on purpose is printed
    to stderr and is not raised."""
    fill_standard_streams()
    try:
        code = cli.main(arguments, prog_name="zmqdist", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "zmqdist"
        report(f"{path}: {error.format_message()} (see {path} --help)")
        return int(ExitCode.USAGE)
    except click.ClickException as error:
        report(f"zmqdist: {error.format_message()}")
        return error.exit_code
    except click.Abort:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        discard_output()
        return int(ExitCode.OK)
    return code if isinstance(code, int) else int(ExitCode.OK)
