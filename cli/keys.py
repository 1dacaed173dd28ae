"""`zmqdist keys`: list the keys that a dispatcher accepts, admit a key by a ticket, revoke and replace keys, all while it runs."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click

from zmqdist import limits
from zmqdist_cli.common import Dispatcher, Seconds, place, target_options, ticket_options


@click.group(short_help="List, admit, revoke and replace the keys of a running dispatcher.")
def keys() -> None:
    """List, admit, revoke and replace the keys of a running dispatcher.

    These commands act as admin, so they need admin.key of the dispatcher's key folder (--keys, or ZMQDIST_KEYS_DIR). Only `join` needs a
    ticket instead.
    """


@keys.command("list", short_help="Show the keys that the dispatcher knows.")
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the keys as JSON; since_s is in seconds since 1970.")
@target_options
def list_keys(target: str | None, *, as_json: bool, timeout_s: float, **secrets: Any) -> None:
    """Show role, name, public key and time of each key that the dispatcher TARGET knows.

    A static key is in the file `authorized`; the others joined. A replaced key lets no process in, but a port that was opened
    with it still shows it.
    """
    with Dispatcher(*place(target, **secrets), "admin", timeout_s) as dispatcher:
        rows = dispatcher.call("keys")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["since_s"])) if row["since_s"] else "-"
        click.echo(f"{row['state']:9} {row['role'] or '-':7} {row['name']:12} {since:19}  {row['key']}")


@keys.command("token", short_help="Make a join ticket, with which one process joins.")
@click.argument("target", required=False)
@click.option("--role", "name", required=True, metavar="NAME", help="worker:3, ps:0, submit, client or admin.")
@click.option(
    "--valid-s",
    "valid_s",
    type=Seconds(),
    default=limits.JOIN_VALID_S,
    show_default=True,
    metavar="SECONDS",
    help="How long the ticket can be used.",
)
@click.option("--listens", default="", metavar="HOST:PORT", help="Where a ps will listen, as programs know it.")
@click.option("--output", metavar="FILE", help="Write the ticket to a new private file instead of printing it.")
@target_options
def make_token(
    target: str | None,
    *,
    name: str,
    valid_s: float,
    listens: str,
    output: str | None,
    timeout_s: float,
    **secrets: Any,
) -> None:
    """Make a join ticket for the dispatcher TARGET and print it.

    A ticket can be used once, and is a secret until then: pass it on in a private file or through a pipe. TARGET must be the address
    at which the process that joins reaches the dispatcher.
    """
    from zmqdist.errors import FailedPreconditionError

    address, credentials = place(target, **secrets)
    with Dispatcher(address, credentials, "admin", timeout_s) as dispatcher:
        ticket = dispatcher.call("keys_token", name, address, valid_s, listens)
    if output is None:
        click.echo(ticket)
        return
    try:
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as file:
            file.write(f"{ticket}\n")
    except OSError as error:
        raise FailedPreconditionError(f"cannot write the ticket to {output}: {error.strerror}") from None
    click.echo(f"ok: the ticket for {name} is in {output}, good for {valid_s:g} s")


@keys.command("join", short_help="Make a key pair here, and have it admitted by a ticket.")
@click.argument("folder", metavar="DIR")
@ticket_options
def join_by_ticket(folder: str, *, ticket_file: str | None, ticket_fd: int | None) -> None:
    """Make a key pair in the folder DIR, and have it admitted by the ticket on standard input, in a file, or on a descriptor.

    A program or worker on this host can then use the folder as ZMQDIST_KEYS_DIR. The secret key never leaves this host.
    """
    from zmqdist.transport.ticket import join, read_ticket

    ticket = read_ticket(ticket_file, 0 if ticket_file is None and ticket_fd is None else ticket_fd)
    join(ticket, folder)
    click.echo(f"ok: joined {ticket.dispatcher} as {ticket.name}; set ZMQDIST_KEYS_DIR={os.path.abspath(folder)}")


@keys.command("revoke", short_help="Withdraw keys, and end their connections.")
@click.argument("target_and_key", nargs=-1, metavar="[TARGET] NAME_OR_KEY")
@target_options
def revoke(target_and_key: tuple[str, ...], *, timeout_s: float, **secrets: Any) -> None:
    """Withdraw the keys of a name (worker:3), or one public key: at once at the dispatcher, within seconds at its members.

    A revoked key never becomes valid again. Functions that ran in a process with such a key run again on other workers. Open tickets of
    the name are withdrawn, too.
    """
    target, what = _target_and(target_and_key, "NAME_OR_KEY")
    with Dispatcher(*place(target, **secrets), "admin", timeout_s) as dispatcher:
        revoked = dispatcher.call("keys_revoke", what)
    for key in revoked:
        click.echo(f"revoked {key}")


@keys.command("rotate", short_help="Have members replace their keys.")
@click.argument("target", required=False)
@click.option("--name", default="", metavar="NAME", help="Only this member, as worker:3; by default all that joined.")
@target_options
def rotate(target: str | None, *, name: str, timeout_s: float, **secrets: Any) -> None:
    """Have the members of the dispatcher TARGET that joined make new key pairs. No work is lost.

    Each member proves its identity by its old key, which is dropped some seconds later. Static keys are replaced by hand (zmqdist keygen).
    """
    with Dispatcher(*place(target, **secrets), "admin", timeout_s) as dispatcher:
        count = dispatcher.call("keys_rotate", name)
    click.echo(f"{count} member{'' if count == 1 else 's'} make{'s' if count == 1 else ''} a new key")


def _target_and(words: tuple[str, ...], what: str) -> tuple[str | None, str]:
    if not 1 <= len(words) <= 2:
        raise click.UsageError(f"wanted [TARGET] {what}, as 127.0.0.1:5050 worker:1")
    return (words[0] if len(words) == 2 else None), words[-1]
