"""`zmqdist launch CONFIG [-- ARGS]`: start a whole cluster for one run of a program, or write the
manifests that start it elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Final, get_args

import click

from zmqdist.cluster.launcher_sections import LauncherName
from zmqdist.launch.exit_codes import ExitCode
from zmqdist_cli.common import grace_option

if TYPE_CHECKING:
    from zmqdist.cluster import ClusterConfig

_THIS_COMMAND: Final = """\
import sys
sys.path[:] = [folder for folder in sys.path if folder]
from zmqdist_cli.main import main
sys.exit(main())
"""
"""Python code that runs the command `zmqdist` without importing modules from the working directory.
Slurm's job runs it with the Python of this process.
"""


@click.command(short_help="Start all jobs of a cluster file and run its program.")
@click.argument("config", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@click.option(
    "--on",
    type=click.Choice(get_args(LauncherName)),
    default=None,
    help="The system that starts the jobs, in place of the file's `launcher`.",
)
@click.option(
    "--detach", is_flag=True, help="With Slurm: submit the job, print its id, and return at once."
)
@click.option(
    "--attach",
    "job",
    type=int,
    metavar="JOB",
    help="Print the output of the Slurm job with this id, until the job ends.",
)
@click.option(
    "--render", is_flag=True, help="Print manifests for kubectl (Kubernetes); start nothing."
)
@click.option(
    "--dashboard",
    is_flag=True,
    help="Serve a page about the cluster on this host, and print the link.",
)
@grace_option(
    "Time for the program to end after Ctrl-C or SIGTERM, and for the jobs to end after the "
    "program."
)
@click.pass_context
def launch(
    context: click.Context,
    /,
    config: str | None,
    arguments: tuple[str, ...],
    *,
    on: str | None,
    detach: bool,
    job: int | None,
    render: bool,
    dashboard: bool,
    grace_s: float,
) -> None:
    """Start all jobs of the cluster file CONFIG and run its program, with ARGS added to its command
    line.

    A job is a group of processes of one kind, such as the workers. Workers and parameter servers
    run on this host, or on the hosts where the file's `launcher` starts them. The dispatcher, the
    program and an evaluator run on this host; with Slurm, they run in the Slurm job. Each line that
    a worker, parameter server or evaluator prints has a prefix such as [worker-0] or
    [worker-0@host]. When the program ends, the command stops all jobs and returns the program's
    exit code.
    """
    if job is not None:
        if config is not None or detach:
            raise click.UsageError(
                "--attach JOB follows a job that was submitted before: give neither CONFIG nor "
                "--detach"
            )
        context.exit(_follow(job))
    if config is None:
        raise click.UsageError("Missing argument 'CONFIG'.")
    from zmqdist.cluster import ClusterConfig
    from zmqdist.errors import NotFoundError
    from zmqdist.launch.launcher import launch as run

    loaded = ClusterConfig.load(config, on)
    if render or loaded.launcher == "kubernetes":
        _render(loaded, arguments, render, grace_s)
        return
    try:
        in_job = os.environ.get("SLURM_JOB_ID")
        if loaded.launcher == "slurm" and in_job is None:
            options = ["--grace", str(grace_s), *(["--dashboard"] if dashboard else [])]
            code = _submit(loaded, os.path.abspath(config), arguments, detach, grace_s, options)
        elif detach:
            why = (
                f"this process runs in job {in_job} already"
                if loaded.launcher == "slurm"
                else f"launcher: {loaded.launcher} submits no job"
            )
            raise click.UsageError(
                f"--detach submits a job of Slurm without following it, but {why}"
            )
        else:
            code = run(loaded, list(arguments), say=_say, grace_s=grace_s, dashboard=dashboard)
    except NotFoundError as error:  # a program or a path that the file names is missing
        click.echo(f"zmqdist launch: {config}: {error}", err=True)
        context.exit(int(ExitCode.CONFIG))
    context.exit(code)


def _submit(
    cluster: ClusterConfig,
    config: str,
    arguments: tuple[str, ...],
    detach: bool,
    grace_s: float,
    options: list[str],
) -> int:
    """Submit a job of Slurm that runs this command again with `options`, and follow the job unless
    `detach` is True. Return the exit code."""
    from zmqdist.launch.launcher import Launch
    from zmqdist.launch.slurm_job import following, submit

    # check now, because the job may wait for hours before it starts
    Launch(cluster, arguments, _say).check()
    command = [
        sys.executable,
        "-c",
        _THIS_COMMAND,
        "launch",
        config,
        "--on",
        "slurm",
        *options,
        "--",
    ]
    with following(_say) as follower:
        number = submit(cluster, [*command, *arguments], grace_s)
        if detach:
            click.echo(str(number))
            return int(ExitCode.OK)
        _say(
            f"[slurm] job {number} is submitted; its output is in {cluster.name}-{number}.out, "
            f"too; Ctrl-C cancels the job"
        )
        return follower.run(number, submitted=True)


def _follow(number: int) -> int:
    from zmqdist.launch.slurm_job import following

    with following(_say) as follower:
        return follower.run(number, submitted=False)


def _render(
    config: ClusterConfig, arguments: tuple[str, ...], render: bool, grace_s: float
) -> None:
    """Write the manifests to standard output. Write to standard error the command that makes the
    Secret that the manifests name."""
    from zmqdist.launch import kubernetes

    if not render:
        raise click.UsageError(
            "manifests are written with --render and applied with kubectl: "
            "zmqdist launch FILE --on kubernetes --render | kubectl apply -f -"
        )
    if config.launcher != "kubernetes":
        raise click.UsageError(
            f"--render is for Kubernetes, and the launcher is {config.launcher}: add --on "
            f"kubernetes"
        )
    click.echo(kubernetes.render(config, arguments, grace_s), nl=False)
    click.echo(f"make the Secret of the keys once: {kubernetes.secret_command(config)}", err=True)


def _say(line: str) -> None:
    """Print a line of output of a role. If standard output was closed, drop the line, because the
    cluster must go on."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(line)
