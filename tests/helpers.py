"""What tests of several folders need."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import click

from zmqdist.rpc import internal_client

DIGITS_EPOCHS = 10
NUMBER = r"[-+]?\d[\d.,]*"


def internal_client_with(**functions: Callable[..., Any]) -> SimpleNamespace:
    """Return the module `zmqdist.rpc.internal_client` with other functions, to put it in the place
    of the module in one other module.

    A test that patched the module itself would patch it for all clients of the process, also for a
    reader that another test has left.
    """
    assert functions.keys() <= vars(internal_client).keys()
    return SimpleNamespace(**{**vars(internal_client), **functions})


class CommandResult(NamedTuple):
    """The exit code of a command, and what it printed on each stream."""

    exit_code: int
    stdout: str
    stderr: str


def run_command(command: click.Command, *arguments: str) -> CommandResult:
    """Run a command of `zmqdist` in this process.

    `click.testing.CliRunner` mixes the two streams before click 8.2, unless an argument that 8.2 no
    longer has keeps them apart.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command.main(arguments)
        except SystemExit as end:  # how click ends each command
            code = end.code
    assert isinstance(code, int)
    return CommandResult(code, out.getvalue(), err.getvalue())


def trained_accuracy(text: str) -> float:
    """Return the median test accuracy of the last epochs of a complete training, from what
    examples/digits.py has printed.

    A worker computes a gradient from weights that other workers change meanwhile, so a single epoch
    may dip, the last one too: of the last 12 epochs of 26 trainings with four slots, 2 were below
    0.95, and the lowest at 0.942.
    """
    epochs = re.findall(
        r"epoch +\d+/\d+  loss \d+\.\d{4}  accuracy ([01]\.\d{3})$", text, re.MULTILINE
    )
    assert len(epochs) >= DIGITS_EPOCHS, text
    assert re.findall(r"test accuracy: (.*)$", text, re.MULTILINE) == [epochs[-1]], text
    return median(map(float, epochs[-DIGITS_EPOCHS:]))


def matches_page(shown: str, printed: str) -> bool:
    """Return whether a program has printed what a page shows.

    A number after `~` stands for any number, and a line `...` for any lines; the rest is the same,
    but for the number of spaces.
    """
    pattern = ""
    for line in shown.strip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*"
            continue
        words = [
            NUMBER.join(re.escape(part) for part in re.split(rf"~{NUMBER}", word))
            for word in line.split()
        ]
        pattern += r"[^\S\n]+".join(words) + r"[^\S\n]*\n"
    text = "".join(line.strip() + "\n" for line in printed.strip().splitlines())
    return re.fullmatch(pattern, text) is not None
