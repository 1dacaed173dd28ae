"""The keys of a role that joins a cluster with a join ticket. The role makes its keys in a private folder, which it removes at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from zmqdist.launch.folders import RunFolder


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


@contextmanager
def joined(
    ticket_file: str | None, ticket_fd: int | None, keys_dir: str | None, dispatcher: str | None = None
) -> Iterator[JoinedAs | None]:
    """Return a context manager that joins a cluster with the ticket in a private file or on a file descriptor, and yields a JoinedAs. If
    both `ticket_file` and `ticket_fd` are None, it joins no cluster and yields None.

    Args:
      keys_dir: the folder for the keys. None means a new folder, which is removed at the end of the context.
      dispatcher: the address at which this process will connect to its dispatcher. None means the address in the ticket.

    Raises:
      OpError: the ticket cannot be read, or the dispatcher does not admit this process. The text says why.
    """
    if ticket_file is None and ticket_fd is None:
        yield None
        return
    from zmqdist.transport.ticket import join, read_ticket  # imported here, because few roles have a ticket
    from zmqdist.transport.voucher import voucher_for

    ticket = read_ticket(ticket_file, ticket_fd)
    with ExitStack() as stack:
        if keys_dir is None:
            folder = RunFolder()
            stack.callback(folder.close)
            keys_dir = str(folder.path / "keys")
        role = join(ticket, keys_dir)
        voucher_for(dispatcher or ticket.dispatcher, keys_dir, role).own()
        job, _, index = ticket.name.partition(":")
        yield JoinedAs(job, int(index or 0), ticket.dispatcher, keys_dir)
