"""`zmqdist launch CONFIG [-- ARGS]`: a whole cluster on this machine for one run of a program."""

from __future__ import annotations

import contextlib

import click

from zmqdist_cli.common import grace_option
from zmqdist_cli.exit_codes import ExitCode


@click.command(short_help="Start all jobs of a cluster file and run its program.")
@click.argument("config")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@grace_option("What the program and the workers have to end in, after Ctrl-C or SIGTERM.")
@click.pass_context
def launch(context: click.Context, /, config: str, arguments: tuple[str, ...], *, grace_s: float) -> None:
    """Start all jobs of the cluster file CONFIG and run its program, with ARGS added to its command line.

    What workers write has a prefix, as [worker-0]. When the program ends everything is stopped; the exit code is the
    program's.
    """
    from zmqdist.cluster import ClusterConfig
    from zmqdist.errors import NotFoundError
    from zmqdist.launch.launcher import launch as run

    try:
        code = run(ClusterConfig.load(config), list(arguments), say=_say, grace_s=grace_s)
    except NotFoundError as error:  # the program: the file names it
        click.echo(f"zmqdist launch: {config}: {error}", err=True)
        context.exit(int(ExitCode.CONFIG))
    context.exit(code)


def _say(line: str) -> None:
    """A line of a worker; nobody may be reading any more, and that must not stop the worker."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(line)
