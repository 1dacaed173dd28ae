"""`zmqdist scale [TARGET] worker=COUNT`: change how many workers a launched cluster has, and wait
until it has this number."""

from __future__ import annotations

from typing import Any

import click

from zmqdist.launch.connection import DECIDED_S, SCALE_S, DispatcherClient
from zmqdist_cli.common import Seconds, grace_option, place, target_options
from zmqdist_cli.control import report_lines, stay
from zmqdist_cli.exit_codes import ExitCode


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
    target, job, count = _parsed(target_and_count)
    with DispatcherClient(*place(target, **secrets), "submit", timeout_s) as dispatcher:
        decision = dispatcher.call(
            "scale", job, count, grace_s, force, timeout_s=timeout_s + DECIDED_S
        )
        for line in _lines(decision, count):
            click.echo(line)
        if decision["refused"]:
            click.echo(f"zmqdist scale: {stay(decision['refused'])}", err=True)
            context.exit(int(ExitCode.REFUSED))
        problem = dispatcher.wait_scaled(decision, wait_s, grace_s)
    if problem:
        click.echo(f"zmqdist scale: {problem}", err=True)
        context.exit(int(ExitCode.PROGRAM_FAILED))


def _parsed(words: tuple[str, ...]) -> tuple[str | None, str, int]:
    if not 1 <= len(words) <= 2:
        raise click.UsageError("wanted [TARGET] worker=COUNT, as 127.0.0.1:5050 worker=8")
    *target, size = words
    job, _, count = size.partition("=")
    if not job or not count.isascii() or not count.isdigit() or len(count) > 9:
        raise click.UsageError(f"{size!r} is no size: wanted worker=COUNT, as worker=8")
    return target[0] if target else None, job, int(count)


def _lines(decision: dict[str, Any], count: int) -> list[str]:
    from zmqdist.observe.status import plural

    starts, leaves = decision["starts"], decision["leaves"]
    lines = [f"{', '.join(starts)} {'starts' if len(starts) == 1 else 'start'}"] if starts else []
    lines += report_lines(decision["reports"])
    lines += [f"{', '.join(leaves)} {'leaves' if len(leaves) == 1 else 'leave'}"] if leaves else []
    return lines or [f"there {'is' if count == 1 else 'are'} {plural(count, 'worker')} already"]
