"""Figures of clients and servers, for operators: the records that `Client.snapshot()` and
`Server.snapshot()` return.

Each record is immutable. Unless an attribute says otherwise, messages and faults are counted since
the client was made or the server was started. All other figures describe the moment of the
snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClientSnapshot:
    """One client at one moment.

    >>> type(client.snapshot()).__name__
    'ClientSnapshot'

    Attributes:
      connected: whether the server's hello has arrived on the current connection, and the server
        has not announced its stop.
      shared_memory: whether arrays above 512 KiB travel to the server through shared memory.
        Otherwise they travel in chunks.
      calls_waiting: calls that have not been sent, because they wait for a server, to be batched,
        or for replies to other calls.
      bytes_waiting: bytes of the calls in `calls_waiting`, without the arrays that travel in
        frames.
      calls_in_flight: calls that were sent and have no reply yet.
      threads_waiting: threads of the program that wait for the end of a call of this client.
      transfers: calls whose large parts are on the way in either direction, or in shared memory
        that the server has not opened yet.
      bytes_unacknowledged: bytes of large arrays that were sent in chunks and that the server has
        not acknowledged.
      messages_sent, messages_received: number of messages since the client was made, including
        messages of the protocol itself.
      strays: messages of the server that were dropped because they were not understood or not
        expected.
      stalls: waits that went on after input had arrived, until a time limit inside the client ended
        them. A value above 0 is a bug of zmqdist.
    """

    connected: bool = False
    shared_memory: bool = False
    calls_waiting: int = 0
    bytes_waiting: int = 0
    calls_in_flight: int = 0
    threads_waiting: int = 0
    transfers: int = 0
    bytes_unacknowledged: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    strays: int = 0
    stalls: int = 0

    @property
    def calls(self) -> int:
        """Number of calls that have not ended."""
        return self.calls_waiting + self.calls_in_flight


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """One server at one moment.

    >>> type(zd.rpc.Server.create("zmq", "127.0.0.1:0").snapshot()).__name__
    'ServerSnapshot'

    Attributes:
      clients: connections that have not ended, and whose hello the server accepted.
      calls: accepted calls that have no reply yet, queued or running. A cancelled call that has
        begun counts until its method has ended; a call of an inline method is never counted.
      calls_queued: items of work that wait for a handler thread. A call is one item, and so is a
        batch of calls.
      calls_running: items of work that handler threads execute now.
      threads: handler threads, busy or idle; at most `threads_max`.
      threads_max: bound on `threads`.
      calls_batched: calls of batched methods that wait for more calls, or for the end of the batch
        before theirs.
      streams: streams that are open at a client, or whose generator still runs.
      transfers: calls whose large parts are on the way in either direction, or in shared memory
        that the client has not opened yet.
      bytes_waiting: bytes of the arguments of calls that have not begun. These arguments have
        arrived, or the server has requested them.
      bytes_unsent: bytes of large replies that have not reached their clients yet.
      bytes_unacknowledged: the part of `bytes_unsent` that was sent in chunks and that the clients
        have not acknowledged.
      messages_received: number of messages since the server was started, including messages of the
        protocol itself.
      messages_dropped: number of messages that the server did not accept, by reason.
      calls_repeated: calls that the server refused because their number was in use: a fault of the
        client.
      transfer_faults: chunks and acknowledgments that broke the protocol, on the current
        connections.
      handshakes_refused: connections that ended before their first message was read.
      faults: errors in the server's own loop, each of which is logged with its traceback. A value
        above 0 is a bug of zmqdist.
    """

    clients: int = 0
    calls: int = 0
    calls_queued: int = 0
    calls_running: int = 0
    threads: int = 0
    threads_max: int = 0
    calls_batched: int = 0
    streams: int = 0
    transfers: int = 0
    bytes_waiting: int = 0
    bytes_unsent: int = 0
    bytes_unacknowledged: int = 0
    messages_received: int = 0
    messages_dropped: Mapping[str, int] = field(default_factory=dict)
    calls_repeated: int = 0
    transfer_faults: int = 0
    handshakes_refused: int = 0
    faults: int = 0
