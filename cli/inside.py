"""`zmqdist stack`, `profile` and `logs`: what the processes of workers do now, did for some seconds,
and have written."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from zmqdist import clock as time
from zmqdist.errors import UnavailableError
from zmqdist.launch.connection import DispatcherClient
from zmqdist.launch.log_follower import AGAIN_S, ALL, FROM_NOW, KEPT, WAIT_S, NewRows, line_of
from zmqdist.limits import ANSWER_S
from zmqdist_cli.common import (
    Seconds,
    check_worker,
    locate,
    printable,
    target_and,
    target_options,
)


@click.command(short_help="Show where the functions of a worker are in their code.")
@click.argument("words", nargs=-1, metavar="[TARGET] WORKER")
@target_options
def stack(words: tuple[str, ...], *, timeout_s: float, **secrets: Any) -> None:
    """Print the Python stacks of the slots, actors and data tasks of one WORKER, such as worker:0,
    also of those that hang in C code.

    TARGET is the host:port of a dispatcher, or the cluster file that `zmqdist launch` runs on this
    host. You may leave it out if the environment variable ZMQDIST_CONFIG names a running cluster.
    """
    target, worker = target_and(words, "WORKER", "worker:0")
    check_worker(worker)
    with DispatcherClient(*locate(target, **secrets), "observe", timeout_s) as dispatcher:
        stacks = dispatcher.call("stack", worker, timeout_s=ANSWER_S + timeout_s)
    for process, text in stacks.items():
        click.echo(printable(f"{process}\n{text}\n", "\n"))


@click.command(short_help="Record which functions take the time.")
@click.argument("words", nargs=-1, metavar="[TARGET] [WORKER]")
@click.option(
    "--seconds",
    type=Seconds(),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to record.",
)
@click.option(
    "--output",
    "-o",
    default="profile.speedscope.json",
    show_default=True,
    metavar="FILE",
    help="File to write.",
)
@target_options
def profile(
    words: tuple[str, ...], *, seconds: float, output: str, timeout_s: float, **secrets: Any
) -> None:
    """Record in which calls the slots, actors and data tasks of all workers are, or of one WORKER,
    and write a flame graph for https://www.speedscope.app to a file.

    TARGET is the host:port of a dispatcher, or the cluster file that `zmqdist launch` runs on this
    host. You may leave it out if the environment variable ZMQDIST_CONFIG names a running cluster.
    """
    target, worker = target_and_worker(words)
    path = Path(output)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        # says so now, and not after the recording
        raise click.UsageError(f"-o {output}: wanted a file, in a folder where you may write")
    with DispatcherClient(*locate(target, **secrets), "observe", timeout_s) as dispatcher:
        until_s = seconds + ANSWER_S + timeout_s
        answer = dispatcher.call("profile", worker, seconds, timeout_s=until_s)
    for problem in answer["failed"].values():
        click.echo(printable(problem), err=True)
    stacks = answer["stacks"]
    path.write_text(json.dumps(_speedscope(stacks, worker or "all workers")))
    click.echo(f"{sum(stacks.values()):.3g} s in functions: open {output} at speedscope.app")
    own_s: dict[str, float] = defaultdict(float)
    for stack_names, stack_s in stacks.items():
        own_s[stack_names.rpartition(";")[2]] += stack_s
    for frame in sorted(own_s, key=own_s.__getitem__, reverse=True)[:FRAMES_SHOWN]:
        click.echo(printable(f"{own_s[frame]:8.2f} s  {frame}"))


FRAMES_SHOWN = 5


def _speedscope(stacks: dict[str, float], name: str) -> dict[str, Any]:
    """Return a profile in the file format of speedscope."""
    frames: dict[str, int] = {}
    samples = [
        [frames.setdefault(frame, len(frames)) for frame in names.split(";")] for names in stacks
    ]
    places = [frame.removesuffix(")").rpartition(" (") for frame in frames]
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": "zmqdist",
        "name": name,
        "shared": {"frames": [{"name": function, "file": file} for function, _, file in places]},
        "profiles": [
            {
                "type": "sampled",
                "name": name,
                "unit": "seconds",
                "startValue": 0,
                "endValue": sum(stacks.values()),
                "samples": samples,
                "weights": list(stacks.values()),
            }
        ],
    }


@click.command(short_help="Show what functions have printed.")
@click.argument("words", nargs=-1, metavar="[TARGET] [WORKER]")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as a JSON object.")
@target_options
def logs(
    words: tuple[str, ...], *, follow: bool, as_json: bool, timeout_s: float, **secrets: Any
) -> None:
    """Print the last lines that the slots, actors and data tasks of the workers have written, or of
    one WORKER, such as worker:0.

    TARGET is the host:port of a dispatcher, or the cluster file that `zmqdist launch` runs on this
    host. You may leave it out if the environment variable ZMQDIST_CONFIG names a running cluster.
    """
    target, worker = target_and_worker(words)
    with (
        DispatcherClient(*locate(target, **secrets), "observe", timeout_s) as dispatcher,
        contextlib.suppress(KeyboardInterrupt),
    ):
        for row in _rows(dispatcher, worker, timeout_s, follow=follow):
            click.echo(_as_json(row) if as_json else line_of(row))


def target_and_worker(words: tuple[str, ...]) -> tuple[str | None, str]:
    """Return the words of a command line with the arguments [TARGET] and [WORKER]. The target is
    None and the worker is "" if it is left out."""
    if len(words) > 2:
        raise click.UsageError("wanted [TARGET] [WORKER], as 127.0.0.1:5050 worker:0")
    if len(words) == 1:
        return (None, words[0]) if re.fullmatch(r"worker:\d+", words[0]) else (words[0], "")
    if not words:
        return None, ""
    check_worker(words[1])
    return words[0], words[1]


def _rows(
    dispatcher: DispatcherClient, worker: str, timeout_s: float, *, follow: bool
) -> Iterator[list[Any]]:
    # begin to follow first, so that no line falls between
    number = dispatcher.call("logs", worker, FROM_NOW, 0.0)["next"] if follow else 0
    answer = dispatcher.call("logs", worker, KEPT, 0.0, timeout_s=ANSWER_S + timeout_s)
    for problem in answer["failed"].values():
        click.echo(printable(problem), err=True)
    new_rows = NewRows()
    yield from new_rows.of(answer["rows"])
    new_rows.begin_anew()
    while follow:
        try:
            answer = dispatcher.call("logs", worker, number, WAIT_S, timeout_s=WAIT_S + timeout_s)
        except UnavailableError as error:
            click.echo(printable(f"{error}; trying again"), err=True)
            time.sleep(AGAIN_S)
            number = ALL
            new_rows.begin_anew()
            continue
        yield from new_rows.of(answer["rows"])
        number = answer["next"]


def _as_json(row: list[Any]) -> str:
    _, worker, at, process, stream, text = row
    moment = datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
    stream_name = "stderr" if stream == 2 else "stdout"
    return json.dumps(
        {"at": moment, "worker": worker, "process": process, "stream": stream_name, "text": text}
    )
