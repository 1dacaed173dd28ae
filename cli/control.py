"""`zmqdist scale`, `zmqdist drain` and `zmqdist shutdown`: change how many workers a launched cluster
has, or stop one worker, or a dispatcher with all its workers, in good order."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import click

from zmqdist import clock as time
from zmqdist.errors import FailedPreconditionError, OpError
from zmqdist.launch.connection import DECIDED_S, IS_NO_DISPATCHER, SCALE_S, DispatcherClient
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.observe.status import plural
from zmqdist_cli.common import (
    Seconds,
    check_worker,
    grace_option,
    locate,
    printable,
    target_and,
    target_options,
)

if TYPE_CHECKING:
    from zmqdist.transport.credentials import Credentials

LOOK_S: Final = 0.1
"""Seconds between two checks whether the dispatcher has ended."""

SILENT_S: Final = 1.0
"""Seconds without a reply after which a dispatcher that has accepted the shutdown counts as
ended.
"""

ASKED_S: Final = 3.0
"""Seconds beyond --timeout that a drain may take, because the dispatcher asks the programs what the
worker has for them."""

ENDS_WITHIN_S: Final = 3.0
"""Seconds that a dispatcher may take to end after the grace."""

_grace = grace_option("Time for running functions to end; then they are killed.")


@click.command(short_help="Stop one worker after it has finished its running functions.")
@click.argument("target_and_worker", nargs=-1, metavar="[TARGET] WORKER")
@_grace
@click.option(
    "--force",
    is_flag=True,
    help="Drain the worker even if kept values, data tasks or functions scheduled with `worker=` "
    "depend on this worker alone.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print what would become of everything that the worker has, and do nothing.",
)
@target_options
@click.pass_context
def drain(
    context: click.Context,
    /,
    target_and_worker: tuple[str, ...],
    *,
    grace_s: float,
    force: bool,
    dry_run: bool,
    timeout_s: float,
    **secrets: Any,
) -> None:
    """Have a worker finish its running functions, and leave.

    WORKER is the name of the worker, such as worker:1. The command prints what becomes of
    everything that the worker has. Without --force it refuses the drain if kept values, data tasks
    or functions scheduled with `worker=` depend on this worker alone. Other functions that the
    worker has not begun return to the queue at once. The command does not wait until the worker has
    left.
    """
    target, name = target_and(target_and_worker, "WORKER", "worker:1")
    check_worker(name)
    job, _, index = name.rpartition(":")
    with DispatcherClient(*locate(target, **secrets), "submit", timeout_s) as dispatcher:
        reply = dispatcher.call(
            "drain", job, int(index), grace_s, force, dry_run, timeout_s=timeout_s + ASKED_S
        )
    lines = _report_lines(reply["reports"])
    for line in lines:
        click.echo(line)
    if dry_run:
        if not lines:
            click.echo(f"{name} has nothing to lose")
    elif reply["refused"]:
        click.echo(f"zmqdist drain: {_stay(reply['refused'])}", err=True)
        context.exit(int(ExitCode.REFUSED))
    else:
        click.echo(f"{name} leaves; its running functions have {grace_s:g} s to end")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _report_lines(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return the dispatcher's drain reports as lines, each of which begins with the name of the
    worker."""
    return [
        printable(f"{report['worker']}: {line}") for report in reports for line in report["lines"]
    ]


def _stay(refused: Sequence[str]) -> str:
    """Return a sentence that says why the dispatcher has refused to drain these workers."""
    verb, them = ("stays", "it") if len(refused) == 1 else ("stay", "them")
    return f"{', '.join(refused)} {verb}, because something would be lost; --force drains {them}"


@click.command(short_help="Change how many workers a launched cluster has.")
@click.argument("target_and_count", nargs=-1, metavar="[TARGET] worker=COUNT")
@grace_option("Time for running functions of leaving workers to end; then they are killed.")
@click.option(
    "--force",
    is_flag=True,
    help="End workers even if kept values, data tasks or functions scheduled with `worker=` "
    "depend on one of these workers alone.",
)
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(zero=True),
    default=SCALE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for new workers; the wait for leaving workers is longer by --grace.",
)
@target_options
@click.pass_context
def scale(
    context: click.Context,
    /,
    target_and_count: tuple[str, ...],
    *,
    grace_s: float,
    force: bool,
    wait_s: float,
    timeout_s: float,
    **secrets: Any,
) -> None:
    """Change the number of workers of a cluster that `zmqdist launch` runs.

    If the cluster has fewer than COUNT workers, new ones are started. If it has more, the workers
    with the least to lose finish their running functions and leave. The command returns when the
    new workers have registered and the leaving workers have left.
    """
    target, size = target_and(target_and_count, "worker=COUNT", "worker=8")
    job, _, count_text = size.partition("=")
    if not job or not _is_number(count_text):
        raise click.UsageError(f"{size!r} is no size: wanted worker=COUNT, as worker=8")
    count = int(count_text)
    with DispatcherClient(*locate(target, **secrets), "submit", timeout_s) as dispatcher:
        decision = dispatcher.call(
            "scale", job, count, grace_s, force, timeout_s=timeout_s + DECIDED_S
        )
        for line in _lines(decision, count):
            click.echo(line)
        if decision["refused"]:
            click.echo(f"zmqdist scale: {_stay(decision['refused'])}", err=True)
            context.exit(int(ExitCode.REFUSED))
        problem = dispatcher.wait_scaled(decision, wait_s, grace_s)
    if problem:
        click.echo(f"zmqdist scale: {problem}", err=True)
        context.exit(int(ExitCode.PROGRAM_FAILED))


def _lines(decision: dict[str, Any], count: int) -> list[str]:
    starts, leaves = decision["starts"], decision["leaves"]
    lines = [f"{', '.join(starts)} {'starts' if len(starts) == 1 else 'start'}"] if starts else []
    lines += _report_lines(decision["reports"])
    lines += [f"{', '.join(leaves)} {'leaves' if len(leaves) == 1 else 'leave'}"] if leaves else []
    return lines or [f"there {'is' if count == 1 else 'are'} {plural(count, 'worker')} already"]


@click.command(short_help="Stop a dispatcher and its workers, or all tasks of a cluster.")
@click.argument("target", required=False)
@_grace
@target_options
@click.pass_context
def shutdown(
    context: click.Context,
    /,
    target: str | None,
    *,
    grace_s: float,
    timeout_s: float,
    **secrets: Any,
) -> None:
    """Stop the dispatcher TARGET and its workers, and wait until the dispatcher has ended.

    Functions that have not begun do not run. A program that waits for results gets an error, unless
    a dispatcher is started again at this address. If TARGET is a task of a cluster (zmqdist
    server), the command stops all running tasks of the cluster, and does not wait until they have
    ended.
    """
    address, credentials = locate(target, **secrets)
    try:
        dispatcher = DispatcherClient(address, credentials, "submit", timeout_s)
    except FailedPreconditionError as error:
        if IS_NO_DISPATCHER not in error.message:
            raise
        click.echo(
            f"the server at {address} ends: "
            f"{', '.join(_end_tasks(address, credentials, grace_s, timeout_s))}"
        )
        return
    with dispatcher:
        pid = dispatcher.call("facts")["pid"]
        count = dispatcher.call("shutdown", grace_s)
        click.echo(f"dispatcher at {dispatcher.address} ends, with {plural(count, 'worker')}")
        if not _wait_for_end(dispatcher, pid, grace_s + ENDS_WITHIN_S):
            click.echo(
                f"zmqdist shutdown: the dispatcher (pid {pid}) still answers after its grace",
                err=True,
            )
            context.exit(int(ExitCode.PROGRAM_FAILED))


def _end_tasks(
    address: str, credentials: Credentials, grace_s: float, timeout_s: float
) -> list[str]:
    from zmqdist.tasks.session import Session

    with Session(SimpleNamespace(target=address, credentials=credentials)) as session:
        return session.shutdown(grace_s, timeout_in_ms=timeout_s * 1000)


def _wait_for_end(dispatcher: DispatcherClient, pid: int, within_s: float) -> bool:
    """Wait until the dispatcher does not reply any more, or a process with another pid replies.
    Return False if `within_s` passes first."""
    until = time.monotonic() + within_s
    with contextlib.suppress(OpError):
        while dispatcher.call("facts", timeout_s=SILENT_S)["pid"] == pid:
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_S)
    return True
