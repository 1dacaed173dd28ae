"""The keys of a role that joins a cluster with a join ticket. The role makes its keys in the folder
that its launcher or its user has named, or else in a private folder of its own, which it removes
before it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zmqdist.errors import InvalidArgumentError
from zmqdist.launch.folders import RunFolder

if TYPE_CHECKING:
    from zmqdist.transport.join_ticket import JoinTicket


@dataclass(frozen=True)
class JoinedAs:
    """The name under which a process has joined, its dispatcher, and its keys.

    Attributes:
      job, index: the name in the join ticket.
      dispatcher: address of the dispatcher, "host:port".
      keys_dir: the folder with the keys of the process, which its child processes also use.
    """

    job: str
    index: int
    dispatcher: str
    keys_dir: str


def given_ticket(ticket_file: str | None, ticket_fd: int | None) -> JoinTicket | None:
    """Read the join ticket of this process from its private file or descriptor. Return None if both
    arguments are None. Raises the errors of `read_ticket`.
    """
    if ticket_file is None and ticket_fd is None:
        return None
    # imported here, because few roles have a ticket
    from zmqdist.transport.join_ticket import read_ticket

    return read_ticket(ticket_file, ticket_fd)


def check_name(ticket: JoinTicket, job: str, index: int | None) -> None:
    """Raise InvalidArgumentError if a ticket is for another task than JOB:INDEX. If `index` is
    None, every task of the job fits."""
    wanted = f"{job}:{'?' if index is None else index}"
    fits = ticket.name.partition(":")[0] == job if index is None else ticket.name == wanted
    if not fits:
        raise InvalidArgumentError(
            f"the join ticket is for {ticket.name}, and this process was started as {wanted}. The "
            f"ticket was not used"
        )


@contextmanager
def joined(
    ticket: JoinTicket | None, keys_dir: str | None, dispatcher: str | None = None
) -> Iterator[JoinedAs | None]:
    """Return a context manager that joins a cluster with a ticket, and yields a JoinedAs. If
    `ticket` is None, it joins no cluster and yields None.

    Args:
      keys_dir: the folder for the keys. None means a new folder, which is removed at the end of the
        context.
      dispatcher: the address at which this process will connect to its dispatcher. None means the
        address in the ticket.

    Raises:
      OpError: the dispatcher does not admit this process. The text says why.
    """
    if ticket is None:
        yield None
        return
    from zmqdist.transport.join_ticket import join
    from zmqdist.transport.peer_keys import voucher_for

    with ExitStack() as stack:
        if keys_dir is None:
            folder = RunFolder()
            stack.callback(folder.close)
            keys_dir = str(folder.path / "keys")
        address = (dispatcher or ticket.dispatcher).removeprefix("zmq://")
        role = join(ticket, keys_dir, dispatcher=address)
        voucher_for(address, keys_dir, role).own()
        job, _, index = ticket.name.partition(":")
        yield JoinedAs(job, int(index or 0), address, keys_dir)
