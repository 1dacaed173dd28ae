"""Figures of the two ends of calls, for operators: the records that `Client.snapshot()` and `Server.snapshot()` return.

Each record is immutable and shows one moment. Messages and faults are counted from the making of the client or server; all other
figures are those of the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClientSnapshot:
    """One client at one moment.

    Attributes:
      connected: the server's hello has arrived on the current connection, and the server has not said that it stops.
      shared_memory: arrays above 512 KiB travel to the server through shared memory; if False, in chunks.
      calls_waiting: calls that have not been sent: they wait for a server, to be sent with others, or for replies to others.
      bytes_waiting: bytes of these calls, without the arrays that travel in frames.
      calls_in_flight: calls that were sent and have no reply yet.
      threads_waiting: threads of the program that wait in this client for the end of a call.
      transfers: calls with large parts on the way in either direction, or in shared memory that the server has not opened yet.
      bytes_unacknowledged: bytes of large arrays that were sent in chunks and that the server has not acknowledged.
      messages_sent, messages_received: since the client was made, including messages of the protocol itself.
      strays: messages of the server that were dropped because they were not understood or not expected.
      stalls: waits that a time limit inside the client ended although there was input. A value above 0 is a bug of zmqdist.
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
        """Calls that have not ended."""
        return self.calls_waiting + self.calls_in_flight


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """One server at one moment.

    Attributes:
      clients: connections whose hello was accepted and that have not ended.
      calls: accepted calls without a reply, wherever they wait. A cancelled call counts until its method has ended; a call of an inline
        method is never counted.
      calls_queued: items of work that wait for a handler thread.
      calls_running: items of work that handler threads execute; a batch is one item.
      threads: handler threads, busy or idle; at most `threads_max`.
      threads_max: bound on `threads`.
      calls_batched: calls of batched methods that wait for more calls, or for the end of the batch before theirs.
      streams: streams that a client has open, or whose generator still runs.
      transfers: calls with large parts on the way in either direction, or in shared memory that the client has not opened yet.
      bytes_waiting: bytes of arguments that have arrived, or were requested, for calls that have not begun.
      bytes_unsent: bytes of large replies that their clients do not have yet.
      bytes_unacknowledged: the part of `bytes_unsent` that was sent in chunks and not acknowledged.
      messages_received: since the server was started, including messages of the protocol itself.
      messages_dropped: number of messages that were not accepted, by reason.
      calls_repeated: calls that were refused because their number was in use: a fault of the client.
      transfer_faults: chunks and acknowledgments that broke the protocol, on the current connections.
      handshakes_refused: connections that ended before their first message was read.
      faults: errors in the server's own loop, each in the log with its traceback. A value above 0 is a bug of zmqdist.
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
