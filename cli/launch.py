"""`zmqdist launch CONFIG [-- ARGS]`: start a whole cluster for one run of a program."""

from __future__ import annotations

import contextlib
from typing import get_args

import click

from zmqdist.cluster.launcher_sections import LauncherName
from zmqdist_cli.common import grace_option
from zmqdist_cli.exit_codes import ExitCode


@click.command(short_help="Start all jobs of a cluster file and run its program.")
@click.argument("config")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@click.option(
    "--on",
    type=click.Choice(get_args(LauncherName)),
    default=None,
    help="What starts the jobs, in place of the file's `launcher`.",
)
@grace_option("Time that the program and the workers have to end after Ctrl-C or SIGTERM.")
@click.pass_context
def launch(
    context: click.Context, /, config: str, arguments: tuple[str, ...], *, on: str | None, grace_s: float
) -> None:
    """Start all jobs of the cluster file CONFIG and run its program, with ARGS added to its command line.

    The workers and parameter servers run on this machine, or where the file's `launcher` places them; dispatcher and program run here.
    Lines that workers write get a prefix, as [worker-0] or [worker-0@host]. When the program ends, the command stops all jobs and ends
    with the exit code of the program.
    """
    from zmqdist.cluster import ClusterConfig
    from zmqdist.errors import NotFoundError
    from zmqdist.launch.launcher import launch as run

    try:
        code = run(ClusterConfig.load(config, on), list(arguments), say=_say, grace_s=grace_s)
    except NotFoundError as error:  # the program: the file names it
        click.echo(f"zmqdist launch: {config}: {error}", err=True)
        context.exit(int(ExitCode.CONFIG))
    context.exit(code)


def _say(line: str) -> None:
    """Print a line of a worker. A closed pipe is ignored here, because it must not stop the worker."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(line)
