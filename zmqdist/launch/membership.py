"""The keys of a role that joins by a ticket: made here, in a private folder that goes with the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from zmqdist.launch.folders import RunFolder


@dataclass(frozen=True)
class JoinedAs:
    """What a process has joined as.

    Attributes:
      job, index: from the name in its ticket.
      dispatcher: "host:port".
      keys_dir: folder of its keys, for itself and its children.
    """

    job: str
    index: int
    dispatcher: str
    keys_dir: str


@contextmanager
def joined(ticket_file: str | None, ticket_fd: int | None, keys_dir: str | None) -> Iterator[JoinedAs | None]:
    """Join by the ticket of a private file or of a descriptor; without either there is nothing to do.

    Args:
      keys_dir: where to keep the keys; None: in a folder that is removed on exit.

    Raises:
      OpError: the ticket cannot be read, or the dispatcher does not admit it; the text says why.
    """
    if ticket_file is None and ticket_fd is None:
        yield None
        return
    from zmqdist.transport.ticket import join, read_ticket  # here, because most roles have keys or a token already
    from zmqdist.transport.voucher import voucher_for

    ticket = read_ticket(ticket_file, ticket_fd)
    with ExitStack() as stack:
        if keys_dir is None:
            folder = RunFolder()
            stack.callback(folder.close)
            keys_dir = str(folder.path / "keys")
        role = join(ticket, keys_dir)
        voucher_for(ticket.dispatcher, keys_dir, role).own()
        job, _, index = ticket.name.partition(":")
        yield JoinedAs(job, int(index or 0), ticket.dispatcher, keys_dir)
