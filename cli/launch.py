"""`zmqdist launch CONFIG [-- ARGS]`: start a whole cluster for one run of a program, or write what starts it elsewhere."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, get_args

import click

from zmqdist.cluster.launcher_sections import LauncherName
from zmqdist_cli.common import grace_option
from zmqdist_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from zmqdist.cluster import ClusterConfig


@click.command(short_help="Start all jobs of a cluster file and run its program.")
@click.argument("config")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@click.option(
    "--on",
    type=click.Choice(get_args(LauncherName)),
    default=None,
    help="What starts the jobs, in place of the file's `launcher`.",
)
@click.option("--render", is_flag=True, help="Write the manifests of Kubernetes to standard output; start nothing.")
@grace_option("Time that the program and the workers have to end after Ctrl-C or SIGTERM.")
@click.pass_context
def launch(
    context: click.Context,
    /,
    config: str,
    arguments: tuple[str, ...],
    *,
    on: str | None,
    render: bool,
    grace_s: float,
) -> None:
    """Start all jobs of the cluster file CONFIG and run its program, with ARGS added to its command line.

    The workers and parameter servers run on this machine, or where the file's `launcher` places them; dispatcher and program run here.
    Lines that workers write get a prefix, as [worker-0] or [worker-0@host]. When the program ends, the command stops all jobs and ends
    with the exit code of the program.
    """
    from zmqdist.cluster import ClusterConfig
    from zmqdist.errors import NotFoundError
    from zmqdist.launch.launcher import launch as run

    loaded = ClusterConfig.load(config, on)
    if render or loaded.launcher == "kubernetes":
        _render(loaded, arguments, render, grace_s)
        return
    try:
        code = run(loaded, list(arguments), say=_say, grace_s=grace_s)
    except NotFoundError as error:  # the program: the file names it
        click.echo(f"zmqdist launch: {config}: {error}", err=True)
        context.exit(int(ExitCode.CONFIG))
    context.exit(code)


def _render(config: ClusterConfig, arguments: tuple[str, ...], render: bool, grace_s: float) -> None:
    """Write the manifests to standard output, and to standard error the command that makes the Secret which they name."""
    from zmqdist.launch import kubernetes

    if not render:
        raise click.UsageError(
            "manifests are written with --render and applied with kubectl: "
            "zmqdist launch FILE --on kubernetes --render | kubectl apply -f -"
        )
    if config.launcher != "kubernetes":
        raise click.UsageError(
            f"--render is for Kubernetes, and the launcher is {config.launcher}: add --on kubernetes"
        )
    click.echo(kubernetes.render(config, arguments, grace_s), nl=False)
    click.echo(f"make the Secret of the keys once: {kubernetes.secret_command(config)}", err=True)


def _say(line: str) -> None:
    """Print a line of a worker. A closed pipe is ignored here, because it must not stop the worker."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(line)
