"""Code that several commands share: types of options, the address and secret of the target, and the
connection to a dispatcher.

Modules whose import takes long are imported in functions, so that `zmqdist --help` takes no
noticeable time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from zmqdist import limits

if TYPE_CHECKING:
    from zmqdist.cluster import ClusterConfig
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
            wanted = "0 or more" if self._zero else "more than 0"
            self.fail(f"{value!r} is not a number of seconds: wanted {wanted}", param, ctx)
        return seconds


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


def secret_options(command: F) -> F:
    """Add the options --token-file, --keys and --insecure to a command. The user needs them if the
    secret is in an unusual place, or to use no secret.
    """
    for option in (
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
    ):
        command = option(command)
    return command


def _use_ports(context: click.Context, option: click.Parameter, ports: str | None) -> None:
    from zmqdist.addresses import VARIABLE, parse_ports

    if ports is not None:
        try:
            parse_ports(ports)
        except ValueError as error:
            raise click.BadParameter(str(error), context, option) from None
        # this process and its child processes read the range from this variable
        os.environ[VARIABLE] = ports


def use_ports_of(config: ClusterConfig) -> None:
    """Have this process choose free ports from the range in a cluster file. A range from --ports or
    the environment wins."""
    from zmqdist.addresses import VARIABLE

    if config.ports is not None:
        os.environ.setdefault(VARIABLE, config.ports)


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


def ticket_options(command: F) -> F:
    """Add the options --ticket-file and --ticket-fd to a command. A role that joins with a ticket
    makes its own keys."""
    for option in (
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
    ):
        command = option(command)
    return command


def target_options(command: F) -> F:
    """Add to a command the options for connecting to a running server: --timeout and the options
    for the secrets."""
    timeout = click.option(
        "--timeout",
        "timeout_s",
        type=Seconds(),
        default=ANSWER_S,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for a reply.",
    )
    return timeout(secret_options(command))


def place(
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

    given = Credentials(token_file, keys_dir, insecure)
    if target is None or target.endswith((".yaml", ".yml")):
        config = ClusterConfig.from_environment() if target is None else running_cluster(target)
        if config is None or config.runtime is None:
            raise click.UsageError(
                f"which {name}? Give the host:port of a dispatcher; {CONFIG_ENV} names no running "
                f"cluster"
            )
        target = config.runtime.dispatcher
        if given == Credentials():
            given = Credentials(config.runtime.token_file, config.runtime.keys_dir)
    address = target.removeprefix("zmq://")
    try:
        split(address)
    except InvalidArgumentError as error:
        raise click.UsageError(error.message) from None
    return address, given


def check_keys(config: ClusterConfig, file: str, keys_dir: str | None) -> None:
    """Raise click.UsageError if a cluster file demands CURVE and no key folder is named, because a
    role must not use the token instead."""
    if config.security.curve is True and not (
        config.security.keys or keys_dir or os.environ.get("ZMQDIST_KEYS_DIR")
    ):
        raise click.UsageError(
            f"{Path(file).name} wants CURVE and names no keys: make keys (zmqdist keygen "
            f"DIR) and pass --keys DIR"
        )


def printable_line(text: str) -> str:
    """Return a text with unprintable characters replaced, because other processes have chosen the
    names in it."""
    return "".join(char if char.isprintable() else "?" for char in text)
