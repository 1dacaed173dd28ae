"""Figures of the two ends of questions and answers, for those who operate them: `Client.snapshot()`, `Server.snapshot()`.

Each is an immutable record of one moment. Messages and faults are counted from when the client or server was made; the other figures say
what is there at that moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClientSnapshot:
    """One client at one moment.

    Attributes:
      connected: the server's hello has arrived on the present connection, and the server has not said that it stops.
      shared_memory: arrays of more than 512 KiB travel to the server through shared memory; else in chunks.
      calls_waiting: calls that have not been sent: they wait for a server to appear, for others to be sent with, or for answers.
      bytes_waiting: of these, without their arrays that travel in frames.
      calls_in_flight: calls that were sent and not answered.
      threads_waiting: threads of the program that wait in this client for the end of a call.
      transfers: calls that have large parts on the way to the server or from it, or in shared memory that the server has yet to open.
      bytes_unacknowledged: bytes of large arrays that were sent in chunks and that the server has not confirmed.
      messages_sent, messages_received: since the client was made, those of the protocol itself included.
      strays: messages of the server that were not understood or not expected, and dropped.
      stalls: waits that ended late, by a time limit inside the client. Other than 0 is a bug of zmqdist.
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
      clients: connections whose hello was taken and that have not ended.
      calls: calls that were taken and not answered, wherever they wait. A call that was cancelled counts until its method has ended, one
        of an inline method never.
      calls_queued: pieces of work that wait for a handler thread.
      calls_running: pieces of work that a handler thread is busy with; a batch is one.
      threads: handler threads, busy or not; there are never more than `threads_max`.
      threads_max: the bound of that.
      calls_batched: calls of batched methods that wait for company, or for the batch before theirs to end.
      streams: streams that a client has open, or whose generator still runs.
      transfers: calls that have large parts on the way from a client or to it, or in shared memory that the client has yet to open.
      bytes_waiting: bytes of arguments that are here, or were let in, for calls that have not begun.
      bytes_unsent: bytes of large answers that their clients do not have yet.
      bytes_unacknowledged: the part of `bytes_unsent` that was sent in chunks and not confirmed.
      messages_received: since the server was started, those of the protocol itself included.
      messages_dropped: messages that were not taken, by reason.
      calls_repeated: calls that were refused because their number was in use: a fault of the client.
      transfer_faults: chunks and confirmations that should not have come, on the present connections.
      handshakes_refused: connections that ended before a first message of theirs was read.
      faults: errors in the server's own loop. Other than 0 is a bug of zmqdist; each is in the log with its traceback.
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
