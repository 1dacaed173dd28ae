"""`zmqdist server`: run one task of a cluster in the foreground, until Ctrl-C, SIGTERM or `zmqdist
shutdown`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zmqdist.files import read_regular
from zmqdist_cli.common import (
    check_keys,
    grace_option,
    ports_option,
    secret_options,
    ticket_options,
    use_ports_of,
)

if TYPE_CHECKING:
    from zmqdist.cluster.spec import ClusterSpec


@click.command(short_help="Run one task of a cluster in the foreground.")
@click.argument("config", required=False)
@click.option(
    "--spec",
    metavar="JSON",
    help='In place of CONFIG: {"worker": ["host:port", ...], ...}, or @FILE to read such JSON '
    "from a file.",
)
@click.option(
    "--job",
    metavar="NAME",
    help="Job of this task; you may leave it out if the cluster has only one job.",
)
@click.option(
    "--index",
    type=click.IntRange(0),
    metavar="N",
    help="Index of this task; you may leave it out if its job has only one task.",
)
@click.option(
    "--host",
    "--bind",
    "bind_host",
    metavar="HOST",
    help="Address or interface (eth1) to listen on, in place of the task's address in the cluster.",
)
@ports_option
@grace_option("Time for running calls to end after Ctrl-C or SIGTERM.")
@ticket_options
@secret_options
@click.pass_context
def server(
    context: click.Context,
    /,
    config: str | None,
    *,
    spec: str | None,
    job: str | None,
    index: int | None,
    bind_host: str | None,
    grace_s: float,
    token_file: str | None,
    keys_dir: str | None,
    insecure: bool,
    ticket_file: str | None,
    ticket_fd: int | None,
) -> None:
    """Run one task of a cluster in the foreground: a zmqdist.Server as a process.

    CONFIG is a cluster file with the addresses of its tasks. Without CONFIG and --spec, the
    environment variable TF_CONFIG or ZMQDIST_CONFIG describes the cluster and names the task to
    run. If ZMQDIST_CONFIG is the path of a file, name the task by --job and --index.
    """
    from zmqdist.launch.roles import TaskConfig, run_server

    if config is not None and spec is not None:
        raise click.UsageError("CONFIG and --spec both describe the cluster: give one of them")
    options: dict[str, Any] = {}
    if config is not None:
        cluster, keys_dir, options = _of_file(config, job, keys_dir)
    elif spec is not None:
        cluster = _of_text(spec)
    else:
        cluster, job, index = _of_environment(job, index)
    tickets = ticket_file, ticket_fd
    task = TaskConfig(
        cluster.as_dict(), job, index, token_file, keys_dir, insecure, bind_host, *tickets, options
    )
    try:
        code = run_server(task, grace_s=grace_s, announce=click.echo)
    except ValueError as error:
        # the cluster has several jobs or tasks, so the user has to name one
        raise click.UsageError(f"{error} (--job NAME --index N)") from None
    context.exit(code)


def _of_file(
    path: str, job: str | None, keys_dir: str | None
) -> tuple[ClusterSpec, str | None, dict[str, Any]]:
    """Return the cluster of a cluster file, the folder of its keys, and the config of the server.
    The config says how many slots the task has as a worker.
    """
    from zmqdist.cluster import ClusterConfig

    config = ClusterConfig.load(path)
    check_keys(config, path, keys_dir)
    use_ports_of(config)
    sections = config.jobs.task_jobs()
    if job in sections:
        os.environ.update(sections[job].env)
    cluster = config.task_spec
    if not cluster.jobs or (job in sections and job not in cluster.jobs):
        raise click.UsageError(
            f"{Path(path).name} has no addresses for its tasks: write `tasks: [host:port, ...]` "
            f"in place of `count`"
        )
    worker = config.jobs.worker
    options = {} if worker is None else {"slots": worker.slots_here()}
    return cluster, keys_dir or config.security.keys, options


def _of_text(text: str) -> ClusterSpec:
    from zmqdist.cluster.spec import ClusterSpec

    try:
        if text.startswith("@"):
            text = read_regular(text[1:]).decode()
        return ClusterSpec(json.loads(text))
    except OSError as error:
        raise click.UsageError(f"--spec: {text[1:]} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise click.UsageError(
            f'--spec: {error}; wanted {{"worker": ["host:port", ...]}}'
        ) from None


def _of_environment(job: str | None, index: int | None) -> tuple[ClusterSpec, Any, Any]:
    from zmqdist.cluster.resolvers.base import check_rpc_layer
    from zmqdist.resolvers import TFConfigClusterResolver

    try:
        found = TFConfigClusterResolver(job, index)
        check_rpc_layer(found)
        cluster = found.cluster_spec()
        job, index = found.task_type, found.task_id
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from None
    if not cluster.jobs:
        raise click.UsageError(
            "which cluster? Give a CONFIG or --spec, or set TF_CONFIG or ZMQDIST_CONFIG"
        )
    return cluster, job, index
