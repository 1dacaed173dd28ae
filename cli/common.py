"""Code that several commands share: types of options, the address and secret of the target, and the
connection to a dispatcher.

Modules whose import takes long are imported in functions, so that `zmqdist --help` takes no
noticeable time.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from zmqdist import limits

if TYPE_CHECKING:
    from zmqdist.transport.credentials import Credentials

ANSWER_S: Final = 3.0
"""Seconds that a command waits for a reply if --timeout is not given."""

F = TypeVar("F", bound=Callable[..., Any])


class Seconds(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.4
    """A type of option: a finite number of seconds above 0. With `zero=True` 0 is allowed, too."""

    name = "seconds"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and not self._zero):
            bound = "0 or more" if self._zero else "more than 0"
            self.fail(f"{value!r} is not a number of seconds: wanted {bound}", param, ctx)
        return seconds


def interval_option(help_text: str) -> Callable[[Any], Any]:
    """Return the option `--interval` of a command that asks a dispatcher again and again."""
    return click.option(
        "--interval",
        "interval_s",
        type=Seconds(),
        default=1.0,
        show_default=True,
        metavar="SECONDS",
        help=help_text,
    )


def grace_option(help: str) -> Callable[[F], F]:
    """Return the option --grace, for a command that stops processes or work. `help` is the help
    text of the option."""
    return click.option(
        "--grace",
        "grace_s",
        type=Seconds(zero=True),
        default=limits.GRACE_S,
        show_default=True,
        metavar="SECONDS",
        help=help,
    )


def _combined(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds several options to a command. The help lists the last one
    first."""

    def add(command: F) -> F:
        for option in options:
            command = option(command)
        return command

    return add


secret_options = _combined(
    click.option(
        "--insecure",
        is_flag=True,
        help="If there are no keys, use no token either. A server then lets every process "
        "that can connect to its port run code. "
        "A client then connects only to a server that was started with --insecure, too.",
    ),
    click.option(
        "--keys",
        "keys_dir",
        metavar="DIR",
        help="Folder of CURVE keys, made by zmqdist keygen or keys join.",
    ),
    click.option(
        "--token-file",
        metavar="FILE",
        help="File with the token to use instead of the one in your home folder.",
    ),
)
"""Adds the options for a secret in an unusual place, or for no secret."""

target_options = _combined(
    secret_options,
    click.option(
        "--timeout",
        "timeout_s",
        type=Seconds(),
        default=ANSWER_S,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for a reply.",
    ),
)
"""Adds the options for connecting to a running server."""

ticket_options = _combined(
    click.option(
        "--ticket-fd",
        type=click.IntRange(0),
        metavar="N",
        help="File descriptor from which to read a join ticket.",
    ),
    click.option(
        "--ticket-file",
        metavar="FILE",
        help="Private file with a join ticket (zmqdist keys token).",
    ),
)
"""Adds the options for a join ticket. A role that joins with a ticket makes its own keys."""


def _use_ports(context: click.Context, option: click.Parameter, ports: str | None) -> None:
    from zmqdist.addresses import VARIABLE, parse_ports

    if ports is not None:
        try:
            parse_ports(ports)
        except ValueError as error:
            raise click.BadParameter(str(error), context, option) from None
        # this process and its child processes read the range from this variable
        os.environ[VARIABLE] = ports


ports_option = click.option(
    "--ports",
    metavar="FIRST-LAST",
    expose_value=False,
    callback=_use_ports,
    help="Range, such as 5000-5100, for all ports that no other option sets, so that a firewall "
    "has to open only this range.",
)


def _check_advertise(
    context: click.Context, option: click.Parameter, advertise: str | None
) -> str | None:
    from zmqdist.addresses import check_advertised

    if advertise is not None:
        try:
            check_advertised(advertise)
        except ValueError as error:
            raise click.BadParameter(
                f"bad address {advertise!r}: {error}", context, option
            ) from None
    return advertise


advertise_option = click.option(
    "--advertise",
    metavar="HOST[:PORT]",
    callback=_check_advertise,
    help="Address to which other processes connect, if it differs from --host: behind NAT, for "
    "example.",
)


def locate(
    target: str | None,
    token_file: str | None,
    keys_dir: str | None,
    insecure: bool,
    *,
    name: str = "TARGET",
) -> tuple[str, Credentials]:
    """Return the "host:port" of a dispatcher and the credentials for it.

    Args:
      target: the TARGET of the command line. This is an address, or the file of a cluster that
        `zmqdist launch` runs on this host. None means the cluster in ZMQDIST_CONFIG.
      name: the name of the target in the error text of the command.

    Raises:
      click.UsageError: neither TARGET nor ZMQDIST_CONFIG names a dispatcher, or TARGET is not an
      address.
      ConfigError: the file that TARGET or ZMQDIST_CONFIG names is wrong.
      NotFoundError: no cluster of the file runs on this host.
      FailedPreconditionError: several clusters of this name run on this host.
    """
    from zmqdist.cluster.config import ClusterConfig
    from zmqdist.cluster.environment import CONFIG_ENV
    from zmqdist.errors import InvalidArgumentError
    from zmqdist.launch.connection import running_cluster
    from zmqdist.transport.credentials import Credentials
    from zmqdist.transport.endpoint import split

    credentials = Credentials(token_file, keys_dir, insecure)
    if target is None or target.endswith((".yaml", ".yml")):
        config = ClusterConfig.from_environment() if target is None else running_cluster(target)
        if config is None or config.runtime is None:
            raise click.UsageError(
                f"which {name}? Give the host:port of a dispatcher; {CONFIG_ENV} names no running "
                f"cluster"
            )
        target = config.runtime.dispatcher
        if credentials == Credentials():
            credentials = Credentials(config.runtime.token_file, config.runtime.keys_dir)
    address = target.removeprefix("zmq://")
    try:
        split(address)
    except InvalidArgumentError as error:
        raise click.UsageError(error.message) from None
    return address, credentials


def target_and(words: tuple[str, ...], name: str, example: str) -> tuple[str | None, str]:
    """Return the words of a command line with the arguments [TARGET] and `name`. The target is None
    if there is only one word.
    """
    if not 1 <= len(words) <= 2:
        raise click.UsageError(f"wanted [TARGET] {name}, as 127.0.0.1:5050 {example}")
    return (words[0] if len(words) == 2 else None), words[-1]


def check_worker(name: str) -> None:
    """Raise click.UsageError if this is not the name of a worker."""
    if not re.fullmatch(r"[\w-]+:[0-9]{1,9}", name):
        raise click.UsageError(
            f"{name!r} is not the name of a worker: wanted JOB:INDEX, as worker:1"
        )


def printable(text: str, allowed: str = "") -> str:
    """Return a text of another process with unprintable characters replaced, because they could
    move the cursor of the terminal. The characters in `kept` remain.
    """
    return "".join(char if char.isprintable() or char in allowed else "?" for char in text)
