"""`zmqdist doctor [CONFIG | ADDRESS...]`: find faults of this host or of a cluster, and say what to
do about them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

import click

from zmqdist.launch.exit_codes import ExitCode
from zmqdist_cli.common import target_options

if TYPE_CHECKING:
    from zmqdist.cluster import ClusterConfig
    from zmqdist.observe.doctor.findings import Finding
    from zmqdist.transport.credentials import Credentials

HOSTS_AT_A_TIME: Final = 16


@click.command(short_help="Find faults, and say what to do about each.")
@click.argument("targets", nargs=-1, metavar="[CONFIG | ADDRESS...]")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@target_options
@click.pass_context
def doctor(
    context: click.Context,
    /,
    targets: tuple[str, ...],
    *,
    as_json: bool,
    timeout_s: float,
    token_file: str | None,
    keys_dir: str | None,
    insecure: bool,
) -> None:
    """Find faults of this host and of a cluster, and say what to do about each.

    The command always checks this host. CONFIG is a cluster file; its cluster need not run. With
    CONFIG, the command also checks Python and zmqdist on the hosts of the file's `launcher`. Each
    ADDRESS is the host:port of a zmqdist server. Without CONFIG and ADDRESS, the command also
    checks the cluster that ZMQDIST_CONFIG or TF_CONFIG names. Each line of the output is ok, a
    warning or a problem.

    Exit codes: 0 no problem was found, 1 at least one was found.
    """
    from zmqdist.cluster import ClusterConfig
    from zmqdist.observe.doctor.findings import healthy
    from zmqdist.transport.credentials import Credentials

    credentials = Credentials(token_file, keys_dir, insecure)
    if len(targets) == 1 and (targets[0].endswith((".yaml", ".yml")) or os.path.isfile(targets[0])):
        findings = _cluster(ClusterConfig.load(targets[0]), credentials, timeout_s)
    else:
        config = None if targets else ClusterConfig.from_environment()
        findings = (
            _addresses(targets, credentials, timeout_s)
            if config is None
            else _cluster(config, credentials, timeout_s)
        )
        findings += [] if targets or config is not None else _tasks(credentials, timeout_s)
    if as_json:
        click.echo(json.dumps([finding.record() for finding in findings], indent=2))
    else:
        click.echo("\n".join(finding.line() for finding in findings))
    context.exit(int(ExitCode.OK if healthy(findings) else ExitCode.PROGRAM_FAILED))


def _cluster(config: ClusterConfig, credentials: Credentials, timeout_s: float) -> list[Finding]:
    from zmqdist.observe.doctor import cluster, host, secrets

    findings = host.examine(cluster.descriptors_needed(config))
    findings += secrets.examine(cluster.credentials_for(config, credentials))
    return findings + cluster.examine_config(config, credentials, timeout_s) + _hosts(config)


def _hosts(config: ClusterConfig) -> list[Finding]:
    """Examine each host on which the launcher of a cluster file would start roles. This starts a
    host agent on each host, but no role."""
    from concurrent.futures import ThreadPoolExecutor

    from zmqdist.errors import OpError
    from zmqdist.launch.agent_stream import AgentHost
    from zmqdist.launch.hosts import AgentPool, agent_hosts
    from zmqdist.observe.doctor.findings import PROBLEM, WARNING, Finding, ok, warning

    def examine(host: AgentHost) -> list[Finding]:
        lines: list[str] = []
        try:
            pool = AgentPool([host], lines.append)
        except (OpError, OSError) as error:
            return [Finding(PROBLEM, host.name, str(error).removeprefix(f"{host.name}: "))]
        hello = pool.hello(host.name)
        pool.close()
        cores = "1 core" if hello.cores == 1 else f"{hello.cores} cores"
        slots = "" if host.slots is None else f", {host.slots} slots"
        good = ok(
            host.name,
            f"Python {hello.python}, zmqdist {hello.version} ({hello.path}), {cores}{slots}",
        )
        return [
            good,
            *(
                Finding(WARNING, host.name, line.partition("warning: ")[2] or line)
                for line in lines
            ),
        ]

    try:
        hosts = agent_hosts(config) or []
    except OpError as error:
        return [
            warning(
                config.launcher,
                f"its hosts are not checked: {error.message}",
                "run `zmqdist doctor` there",
            )
        ]
    with ThreadPoolExecutor(HOSTS_AT_A_TIME, thread_name_prefix="zmqdist-doctor") as threads:
        return [finding for findings in threads.map(examine, hosts) for finding in findings]


def _addresses(
    addresses: tuple[str, ...], credentials: Credentials, timeout_s: float
) -> list[Finding]:
    from zmqdist.errors import InvalidArgumentError
    from zmqdist.observe.doctor import cluster, host, secrets
    from zmqdist.transport.endpoint import split

    plain = [address.removeprefix("zmq://") for address in addresses]
    for address in plain:
        try:
            split(address)
        except InvalidArgumentError as error:
            raise click.UsageError(f"{error.message}; a cluster file ends with .yaml") from None
    return (
        host.examine()
        + secrets.examine(credentials)
        + cluster.examine_addresses(plain, credentials, timeout_s)
    )


def _tasks(credentials: Credentials, timeout_s: float) -> list[Finding]:
    """Examine the tasks in TF_CONFIG, if it is set."""
    from zmqdist.observe.doctor import cluster
    from zmqdist.observe.doctor.findings import problem
    from zmqdist.resolvers import TFConfigClusterResolver

    try:
        return cluster.examine_tasks(
            TFConfigClusterResolver().cluster_spec(), credentials, timeout_s
        )
    except (ValueError, TypeError) as error:
        return [problem("TF_CONFIG", str(error), "correct it, or unset it")]
