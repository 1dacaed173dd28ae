"""`zmqdist validate CONFIG`: report the first mistake in a cluster file, or summarize what it
describes."""

from __future__ import annotations

import json
from typing import Any

import click

from zmqdist.cluster import ClusterConfig, WorkerJob, schema
from zmqdist.errors import ConfigError, OpError
from zmqdist.launch.exit_codes import ExitCode


@click.command()
@click.argument("config", required=False)
@click.option(
    "--schema",
    "wants_schema",
    is_flag=True,
    help="Print the JSON Schema of cluster files; needs no CONFIG.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def validate(
    context: click.Context, config: str | None, *, wants_schema: bool, as_json: bool
) -> None:
    """Check the cluster file CONFIG. The command starts nothing and contacts no host.

    The command prints the first mistake in the file, as one line FILE:LINE: KEY: TEXT. If a program
    or path that the file names does not exist or is wrong, the line is FILE: TEXT. `zmqdist launch`
    can start the cluster of a file without mistakes, except if it meets a problem that this command
    cannot see, such as a port in use or an address of another host.

    Exit codes: 0 the file is right, 2 the file or the command line is wrong.
    """
    if wants_schema:
        click.echo(json.dumps(schema(), indent=2))
        return
    if config is None:
        raise click.UsageError("which CONFIG? (only --schema needs none)")
    from zmqdist.launch.launcher import Launch

    try:
        loaded = ClusterConfig.load(config)
        # On Kubernetes the program is in the image and the keys are in the Secret, so this host
        # cannot check them.
        if loaded.launcher != "kubernetes":
            Launch(loaded, (), click.echo).check()
    except ConfigError as error:
        click.echo(f"zmqdist validate: {error}", err=True)
        context.exit(int(ExitCode.CONFIG))
    except OpError as error:  # `zmqdist launch` would refuse the file
        click.echo(f"zmqdist validate: {config}: {error}", err=True)
        context.exit(int(ExitCode.CONFIG))
    summary = summarize(loaded)
    click.echo(
        json.dumps({"file": config, **summary}, indent=2) if as_json else f"ok: {_line(summary)}"
    )


def summarize(config: ClusterConfig) -> dict[str, Any]:
    """Return the name, jobs and security of a config as a dict. The values of `env` are left out,
    because they may be secrets."""
    jobs: dict[str, Any] = {}
    if config.jobs.dispatcher is not None:
        jobs["dispatcher"] = {"tasks": 1, "address": config.jobs.dispatcher.address}
    for name, job in config.jobs.task_jobs().items():
        jobs[name] = {"tasks": len(job.indices())}
        if isinstance(job, WorkerJob):
            jobs[name]["slots"] = job.slots
        if job.tasks is not None:
            jobs[name]["addresses"] = {
                str(index): address for index, address in sorted(job.addresses().items())
            }
    return {"name": config.name, "jobs": jobs, "curve": config.security.curve}


def _line(summary: dict[str, Any]) -> str:
    parts = []
    for name, job in summary["jobs"].items():
        if name == "dispatcher":
            parts.append(f"dispatcher at {job['address']}")
        else:
            slots = f" (slots {job['slots']})" if "slots" in job else ""
            parts.append(f"{name} x {job['tasks']}{slots}")
    curve = summary["curve"] if summary["curve"] == "auto" else str(summary["curve"]).lower()
    return f"{summary['name']}: {', '.join(parts)}; curve {curve}"
