"""`zmqdist keygen DIR`: write the CURVE keys of a cluster as files. `zmqdist keys`: list the keys
that a running dispatcher accepts, admit a key with a ticket, and revoke and replace keys."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click

from zmqdist import limits
from zmqdist.errors import FailedPreconditionError, NotFoundError, OpError
from zmqdist.launch.connection import DispatcherClient
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.transport import keys as key_files
from zmqdist_cli.common import Seconds, locate, target_and, target_options, ticket_options


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--force",
    is_flag=True,
    help="Replace existing keys. A server refuses the old keys after its next start.",
)
@click.pass_context
def keygen(context: click.Context, folder: Path, force: bool) -> None:
    """Make the CURVE keys of a cluster in the folder DIR.

    The folder gets mode 0700. Servers need the files server.key and authorized. A process that
    connects to them needs server.pub and the key of its role (client, observe, submit, worker or
    admin); workers, and programs that schedule functions, also need authorized. Copy the files to each
    host, and set ZMQDIST_KEYS_DIR to their folder there.
    """
    try:
        key_files.keygen(folder, force=force)
    except OpError as error:
        click.echo(f"zmqdist keygen: {error}", err=True)
        context.exit(int(ExitCode.CONFIG))
    click.echo(
        f"ok: keys in {folder}; keep them secret, and set {key_files.KEYS_DIR_VARIABLE}={folder.absolute()}"
    )


@click.group(short_help="Manage the keys that a running dispatcher accepts.")
def keys() -> None:
    """Manage the keys that a running dispatcher accepts.

    A dispatcher with keys accepts connections only from processes whose public key it knows. A new
    process makes a key pair and joins with a ticket: `token` makes the ticket, and `join` uses it.
    All commands but `join` need the file admin.key in the folder of --keys or ZMQDIST_KEYS_DIR, or
    in the key folder of the cluster if TARGET is a cluster file.
    """


@keys.command("list", short_help="Show the keys that the dispatcher knows.")
@click.argument("target", required=False)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the keys as JSON; since_s is in seconds since 1970.",
)
@target_options
def list_keys(target: str | None, *, as_json: bool, timeout_s: float, **secrets: Any) -> None:
    """Show each key that the dispatcher TARGET knows: its state, role, name, time and public key.

    The time is that at which the key was admitted or revoked. Keys in the file `authorized` are
    static; all others joined with a ticket. A key is replaced by `zmqdist keys rotate`, or when
    another process joins under the same name. Some seconds later the dispatcher refuses new
    connections with the old key. Ports that a process opened with the old key show this key to
    their clients until the process ends.
    """
    with DispatcherClient(*locate(target, **secrets), "admin", timeout_s) as dispatcher:
        rows = dispatcher.call("keys")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo(
            "this dispatcher has no CURVE keys: its clients show a token, or nothing (insecure)"
        )
    for row in rows:
        since = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["since_s"]))
            if row["since_s"]
            else "-"
        )
        click.echo(
            f"{row['state']:9} {row['role'] or '-':7} {row['name']:12} {since:19}  {row['key']}"
        )


@keys.command("token", short_help="Make a join ticket, with which one process can join.")
@click.argument("target", required=False)
@click.option(
    "--role",
    "name",
    required=True,
    metavar="NAME",
    help="Name under which the process joins: worker:3 or ps:0; for a program its role, which is "
    "submit, client or admin. If several "
    "programs of a role join, add numbers: submit:1, submit:2.",
)
@click.option(
    "--valid-s",
    "valid_s",
    type=Seconds(),
    default=limits.JOIN_VALID_S,
    show_default=True,
    metavar="SECONDS",
    help="How long the ticket can be used.",
)
@click.option(
    "--listens",
    default="",
    metavar="HOST:PORT",
    help="For a ps or another zmqdist server: the address to which programs will connect.",
)
@click.option(
    "--output",
    metavar="FILE",
    help="Write the ticket to a new private file instead of printing it.",
)
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

    A ticket works once, and is a secret until then: pass it to the new process in a private file or
    through a pipe. The ticket contains the address TARGET, at which the process joins; only a
    worker joins at the address of its own option --dispatcher instead.
    """
    address, credentials = locate(target, **secrets)
    with DispatcherClient(address, credentials, "admin", timeout_s) as dispatcher:
        ticket = dispatcher.call("keys_token", name, address, valid_s, listens)
    if output is None:
        click.echo(ticket)
        return
    try:
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as file:
            file.write(f"{ticket}\n")
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write the ticket to {output}: {error.strerror}"
        ) from None
    click.echo(f"ok: the ticket for {name} is in {output}, good for {valid_s:g} s")


@keys.command("join", short_help="Make a key pair on this host, and join with a ticket.")
@click.argument("folder", metavar="DIR")
@ticket_options
def join_by_ticket(folder: str, *, ticket_file: str | None, ticket_fd: int | None) -> None:
    """Make a key pair in the folder DIR, and have the dispatcher that made the ticket admit it.

    The command makes the folder if it is missing, but no folder above it. If the folder has keys
    already, they must be those of an earlier join at the same dispatcher under the same name. The
    command reads the ticket from standard input, unless an option gives a file or descriptor. When
    the command has ended, set ZMQDIST_KEYS_DIR to DIR for a program or worker on this host. The
    secret key never leaves this host.
    """
    from zmqdist.transport.join_ticket import join, read_ticket

    ticket = read_ticket(ticket_file, 0 if ticket_file is None and ticket_fd is None else ticket_fd)
    join(ticket, folder)
    click.echo(
        f"ok: joined {ticket.dispatcher} as {ticket.name}; set "
        f"ZMQDIST_KEYS_DIR={os.path.abspath(folder)}"
    )


@keys.command("revoke", short_help="Revoke keys, and end their connections.")
@click.argument("target_and_key", nargs=-1, metavar="[TARGET] NAME_OR_KEY")
@click.option(
    "--force",
    is_flag=True,
    help="Revoke the key even if this command itself uses it, and even if no admin key is left "
    "then.",
)
@target_options
def revoke(
    target_and_key: tuple[str, ...], *, force: bool, timeout_s: float, **secrets: Any
) -> None:
    """Revoke the keys of a name (worker:3), or one public key as `list` prints it, and end their
    connections.

    If the name is a role, such as submit, the command revokes the role's static key and the keys
    that joined under exactly this name. It prints each revoked key.

    The dispatcher refuses a revoked key at once, and other members refuse it within seconds. A
    dispatcher that restarts without --work-dir forgets which keys were revoked, and then accepts a
    static key that is still in `authorized`. Functions that ran on a revoked worker run again on
    other workers; those that were scheduled with `worker=` wait for a worker of that name. Unused
    tickets of the name become invalid, too.
    """
    target, name_or_key = target_and(target_and_key, "NAME_OR_KEY", "worker:1")
    with DispatcherClient(*locate(target, **secrets), "admin", timeout_s) as dispatcher:
        revoked = dispatcher.call("keys_revoke", name_or_key, force)
    for row in revoked:
        click.echo(f"revoked {row['key']} ({row['state']} key of {row['name']})")


@keys.command("rotate", short_help="Let members make new keys.")
@click.argument("target", required=False)
@click.option(
    "--name",
    default="",
    metavar="NAME",
    help="Only this member, such as worker:3; by default all members that joined.",
)
@target_options
def rotate(target: str | None, *, name: str, timeout_s: float, **secrets: Any) -> None:
    """Let each process that was started with a ticket of the dispatcher TARGET make a new key pair.
    No work is lost.

    Each process registers its new key over a connection with its old key. The dispatcher refuses
    the old key some seconds later. The command replaces neither static keys (use `zmqdist keygen`)
    nor the keys in a folder that `zmqdist keys join` made (join again with a new ticket).
    """
    with DispatcherClient(*locate(target, **secrets), "admin", timeout_s) as dispatcher:
        count = dispatcher.call("keys_rotate", name)
        if not count:
            member = f"member {name}" if name else "member"
            raise NotFoundError(
                f"no connected {member} can make a new key itself: give its process a new ticket "
                f"(zmqdist keys token)"
            )
    click.echo(
        f"{count} member{'' if count == 1 else 's'} make{'s' if count == 1 else ''} a new key"
    )
