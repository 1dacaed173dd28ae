"""Joining a dispatcher by a ticket: a process makes a key pair, and the dispatcher admits the
public key in exchange for a token that works once.

A ticket is one line of text: the address and public key of the dispatcher, the name of the process
that joins ("worker:3"), the token, and for a server the address to which programs connect.
A ticket is secret until its token is used or has expired, so it travels on a descriptor or in a
private file, never in arguments or in the environment.

The result of joining is a key folder (keys.py) for this process and its children. This process
makes the secret key, which never leaves this host.

    server.pub        the dispatcher's public key, as it was in the ticket
    worker.key        the key pair, in a file named after its role; the process replaces it when the dispatcher asks for a new key
    joined            lines `name worker:3`, `role worker`, `dispatcher host:port`
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from zmqdist.clock import seconds
from zmqdist.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    from_code,
)
from zmqdist.messages import Join, Joined, Message, Refused
from zmqdist.transport import keys
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.endpoint import split
from zmqdist.transport.keyring_machine import JOINING, role_of
from zmqdist.transport.keys import read_private
from zmqdist.transport.loop import Loop
from zmqdist.transport.security import CURVE, ClientSecurity
from zmqdist.wire.hello import our_hello

FORM: Final = "zmqdist-ticket-1"
TICKET_BYTES_MAX: Final = 1024
JOIN_S: Final = 30.0
"""Seconds for which a process tries to reach the dispatcher that its ticket names."""


@dataclass(frozen=True)
class JoinTicket:
    """The content of a join ticket, with which one process joins a dispatcher as `name`.

    Attributes:
      dispatcher: "host:port".
      server_key: the dispatcher's public key, 40 characters.
      number, secret: the two parts of the join token.
      listens: "host:port" at which the process will listen as a server; "" for a worker or a
        program.
    """

    name: str
    dispatcher: str
    server_key: bytes
    number: str
    secret: str = field(repr=False)
    listens: str = ""

    def encode(self) -> str:
        """Return the ticket as a line of text, which `decode_ticket` reads."""
        words = [
            FORM,
            self.name,
            self.dispatcher,
            self.server_key.decode(),
            self.number,
            self.secret,
        ]
        return " ".join([*words, self.listens] if self.listens else words)


def decode_ticket(text: str) -> JoinTicket:
    """Return the ticket that a line of text encodes. Raises InvalidArgumentError, whose text
    contains no part of the secret."""
    words = text.split()
    if (
        len(words) not in (6, 7)
        or words[0] != FORM
        or keys.decode_key(words[3]) is None
        or not text.isascii()
    ):
        raise InvalidArgumentError(
            f"this is not a join ticket: wanted one line of 6 or 7 words that begins with "
            f"{FORM!r}, as `zmqdist keys token` prints it"
        )
    for address in (words[2], *words[6:]):
        split(address)
    return JoinTicket(words[1], words[2], words[3].encode(), *words[4:])


def read_ticket(file: str | None = None, fd: int | None = None) -> JoinTicket:
    """Read a ticket from a private file (mode 0600), or from a descriptor until end of file; the
    descriptor is then closed.

    Raises:
      FailedPreconditionError: the file cannot be read, or other users can read it.
      InvalidArgumentError: the content is not a ticket.
    """
    if fd is not None:
        try:
            with open(fd, "rb") as stream:
                content = stream.read(TICKET_BYTES_MAX)
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot read the join ticket from descriptor {fd}: {error.strerror}"
            ) from None
    else:
        content = read_private(Path(file or ""), "join ticket")[:TICKET_BYTES_MAX]
    return decode_ticket(content.decode("ascii", "replace"))


def join(
    ticket: JoinTicket,
    folder: str | Path,
    *,
    dispatcher: str | None = None,
    timeout_s: float = JOIN_S,
) -> str:
    """Make a key pair, have the dispatcher admit the public key, and write the key folder of this
    process. This blocks for `timeout_s` at most.

    This function makes the folder, with mode 0700, if it is missing, but no folder above it. It
    replaces keys in the folder only if an earlier process joined the same dispatcher with them,
    under the same name.

    Args:
      dispatcher: "host:port" at which this process reaches its dispatcher; None means the address
        in the ticket. Another address is safe, because the key in the ticket identifies the
        dispatcher: no process without this key can read the token. If the address leads to another
        dispatcher that has the same key, that dispatcher refuses the token, and the ticket stays
        unused.

    Returns:
      The role of the key.

    Raises:
      AlreadyExistsError: the folder has other keys. The ticket was not used.
      UnauthenticatedError: the token was used, has expired, or is not known to this dispatcher; or
        the dispatcher has another public key.
      PermissionDeniedError: the token is for another name.
      DeadlineExceededError: no dispatcher replied within `timeout_s`.
      FailedPreconditionError: the folder above `folder` is missing, or `folder` is a file: the
        ticket was not used. Or the keys cannot be written: the ticket was used.
    """
    limit_s = seconds(timeout_s)
    _check_folder(Path(folder), ticket)
    pair = keys.new_pair()
    address = dispatcher or ticket.dispatcher
    where = f"could not join the dispatcher at {address} as {ticket.name}"
    advice = (
        ""
        if address == ticket.dispatcher
        else f" (the join ticket names the dispatcher at {ticket.dispatcher})"
    )
    security = ClientSecurity(
        CURVE,
        JOINING,
        f"the join ticket for {ticket.name}",
        key=pair,
        server_key=ticket.server_key,
    )
    replies: SimpleQueue[Joined | OpError] = SimpleQueue()

    def handle_message(message: Message, _frames: object) -> None:
        if isinstance(message, Joined):
            replies.put(message)
        elif isinstance(message, Refused):
            replies.put(from_code(message.code, message.message))

    loop = Loop("zmqdist-join")
    try:
        dealer = DealerConnection(
            loop,
            address,
            security,
            our_hello("client", 1, f"{ticket.name} pid {os.getpid()}"),
            on_up=lambda _: dealer.send(Join(ticket.number, ticket.secret.encode(), ticket.name)),
            on_message=handle_message,
            on_down=lambda: None,
            on_refused=replies.put,
        )
        dealer.connect()
        loop.start()
        reply = replies.get(timeout=limit_s)
    except Empty:
        trouble = dealer.trouble or "it does not answer"
        raise DeadlineExceededError(f"{where} within {timeout_s:g} s: {trouble}{advice}") from None
    finally:
        loop.stop()
    if isinstance(reply, OpError):
        raise from_code(reply.error_code, f"{where}: {reply.message}{advice}")
    _write_folder(Path(folder), replace(ticket, dispatcher=address), reply.role, pair)
    return reply.role


def _check_folder(folder: Path, ticket: JoinTicket) -> None:
    """Raise AlreadyExistsError if the folder has keys, unless an earlier process joined this
    dispatcher under this name with them. Raise FailedPreconditionError if there is no place for the
    folder.
    """
    try:
        present = keys.key_files(folder)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot read {folder}: {error.strerror}. The join ticket was not used"
        ) from None
    if not present:
        if folder.exists() and not folder.is_dir():
            raise FailedPreconditionError(
                f"{folder} is no folder for keys, but a file: name another folder. The join "
                f"ticket was not used"
            )
        if not folder.absolute().parent.is_dir():
            raise FailedPreconditionError(
                f"cannot make the folder {folder} for keys: make the folder above it first. The "
                f"join ticket was not used"
            )
        return
    with suppress(FailedPreconditionError):  # a folder with a damaged file keeps its keys
        older = keys.load_joined(folder)
        if (
            older is not None
            and older.name == ticket.name
            and keys.load_server_public(folder) == ticket.server_key
        ):
            return
    raise AlreadyExistsError(
        f"{folder} has keys already ({present[0]}), which the key of {ticket.name} must not "
        f"replace: name another folder. "
        "The join ticket was not used"
    )


def _write_folder(folder: Path, ticket: JoinTicket, role: str, pair: keys.KeyPair) -> None:
    if role != role_of(ticket.name):
        raise FailedPreconditionError(
            f"the dispatcher admitted {ticket.name} with the role {role!r}, not "
            f"{role_of(ticket.name)!r}: no keys were written"
        )
    try:
        # Make no folder above it: the run folder of a killed agent may have been removed meanwhile,
        # and no process would remove it again.
        folder.mkdir(exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        keys.write_public(folder, ticket.server_key)
        keys.write_role(folder, role, pair)
        keys.write_joined(folder, keys.JoinedFolder(ticket.name, role, ticket.dispatcher))
    except OSError as error:
        with suppress(OSError):
            (folder / f"{role}.key").unlink()
        raise FailedPreconditionError(
            f"cannot write the keys of {ticket.name} to {folder}: {error.strerror}. The join "
            f"ticket is used: get a new one"
        ) from None
