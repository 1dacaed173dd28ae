"""Every message of the protocol. docs/protocol.md has the same list as a table, generated from this file.

Rules
    A message is a header frame, which is one of these structs in MessagePack, followed by payload frames, whose content only the
    sender and the receiver interpret. The first message of each side is a hello (wire/hello.py), which every version can read; all others
    form one tagged union. Fields are identified by position, so a new field is added at the end and has a default.
    `SENT` of a class names the sender and the receiver. The first line of its docstring is the meaning of the message.

Words
    work: a work item, by a number that its coordinator chooses. lease: a number that the dispatcher chooses for one attempt of a
      work item at one worker. One incarnation of a dispatcher never uses a lease number twice, so late results of an earlier
      attempt are recognised (fencing).
    round: the number of a coordinator's round, which ends when the coordinator raises an error. fn: a number that the
      coordinator chooses for a function.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

import msgspec

from zmqdist.limits import BATCH_ITEMS_MAX

Item: TypeAlias = tuple[int, int, int, int, bytes]
"""A work item as submitted: (work, attempt, lost, fn, payload).

`attempt` is the number of its first attempt; `lost` counts the attempts that were lost before this submission.
"""
Leased: TypeAlias = tuple[int, int, int, int, bytes]
"""A work item as sent to a worker: (lease, coordinator, attempt, fn, payload)."""
Outcome: TypeAlias = tuple[int, int, bytes]
"""How a lease ended: (lease, kind, payload). `kind` is one of the constants below."""
Result: TypeAlias = tuple[int, int, int, bytes]
"""How a work item ended: (work, attempt, kind, payload)."""

Part: TypeAlias = tuple[int, ...]
"""Where one large part of a payload is. A tuple (bytes,) means that the part follows in chunks; eight numbers are a handle of shared
memory (transport/shm_pool.py).
"""

VALUE = 0
"""The payload is the value."""
ERROR = 1
"""The function raised an exception: the payload is that exception with its traceback."""
BULK = 2
"""The payload is a reference: the worker keeps the value until the coordinator has fetched it."""
CANCELLED = 3
"""The work item was cancelled before it ended; the payload is empty."""
KEPT = 4
"""The payload is a reference, as for BULK, to a value that stays with its worker. Used only inside a process, and between a slot and
its worker; messages use BULK.
"""
INPUT_LOST = 5
"""The function did not run, because the holder no longer has the value of an input. The payload is from `encode_loss`
(scheduling/worker/remote_results.py).
"""


ALL_NUMBERS = -1
"""In a Forget to all workers: every number of that coordinator."""


class Message(msgspec.Struct, array_like=True, gc=False):
    """The base of all messages: an array in MessagePack that starts with the tag. A message is never changed after it was made."""

    SENT: ClassVar[str] = ""


# -- calls and replies -----------------------------------------------------------------------------------------


class Call(Message, tag=1):
    """Run a method and send a Reply. Payload frames are large arrays of the arguments, unless `parts` tells where they are.

    `incarnation` is that of the server for which the call is meant: another incarnation replies UNAVAILABLE. `left_ms` is the
    time for which the caller will still wait, 0 for no limit. `held`: the client sends the chunks of `parts` only after SendParts.
    """

    SENT = "client -> server"
    id: int
    method: str
    incarnation: int
    left_ms: int
    body: bytes
    parts: tuple[Part, ...] = ()
    held: bool = False


class Reply(Message, tag=2):
    """The reply to Call `id`: code 0 and a value, or the code and message of an error. Large arrays are sent as in Call."""

    SENT = "server -> client"
    id: int
    code: int
    message: str
    body: bytes
    parts: tuple[Part, ...] = ()


class CancelCall(Message, tag=3):
    """The client no longer wants the reply to Call `id`: the handler may return early, and the chunks of the call stop.

    The handler sees this by `zmqdist.cancelled()`.
    """

    SENT = "client -> server"
    id: int


class Ping(Message, tag=4):
    """A message without content, sent to find out whether the connection still works. It gets no reply."""

    SENT = "any -> any"


class Goodbye(Message, tag=5):
    """The sender stops in good order: do not wait for it."""

    SENT = "any -> any"
    reason: str = ""


class Refused(Message, tag=6):
    """The receiver's last message is not allowed and had no effect. `final`: repeating it will not help, whatever the code."""

    SENT = "server -> any"
    code: int
    message: str
    final: bool = False


class Calls(Message, tag=10):
    """Several Calls without payload frames, made while an earlier call was in flight. Each Call gets its own reply."""

    SENT = "client -> server"
    items: Annotated[list[Call], msgspec.Meta(max_length=BATCH_ITEMS_MAX)]


class Replies(Message, tag=11):
    """Several Replies without payload frames, in any order."""

    SENT = "server -> client"
    items: list[Reply]


class Chunk(Message, tag=12):
    """Bytes of part `part` of Call `id` or of its reply, from `offset` on, as one frame. Chunks are sent in order, each byte once."""

    SENT = "client -> server, server -> client"
    id: int
    part: int
    offset: int


class Credit(Message, tag=13):
    """The receiver has taken `nbytes` bytes of chunks, of any call, from its queue, so the other side may send as many more."""

    SENT = "client -> server, server -> client"
    nbytes: int


class SharedMemoryAccepted(Message, tag=14):
    """The client has mapped the shared memory in the server's hello and read this nonce in it, so the server may lend it memory."""

    SENT = "client -> server"
    nonce: int


class SendParts(Message, tag=15):
    """The server has room for the chunks of Call `id`, which was `held`: send them."""

    SENT = "server -> client"
    id: int


# -- coordinator and dispatcher -------------------------------------------------------------------------------------


class RegisterCoordinator(Message, tag=20):
    """Register as a coordinator. Repeated on each new connection, with the same id.

    `previous_dispatcher`: the coordinator sent work of the current round to an earlier incarnation of the dispatcher. `watch_members`
    subscribes to Members, `report_starts` to Begun.
    """

    SENT = "coordinator -> dispatcher"
    coordinator: int
    queue_max: int
    round: int
    previous_dispatcher: bool
    watch_members: bool = False
    report_starts: bool = False


class CoordinatorRegistered(Message, tag=21):
    """The coordinator is registered. The dispatcher has dropped work from an earlier connection: submit it again."""

    SENT = "dispatcher -> coordinator"
    attempts_max: int
    workers: int


class Define(Message, tag=22):
    """Pickled functions under the coordinator's numbers, sent before the first work item that uses them."""

    SENT = "coordinator -> dispatcher"
    functions: list[tuple[int, bytes]]


class Forget(Message, tag=23):
    """No unfinished work item uses these functions, and no later one will use them under these numbers.

    `everywhere`: every worker passes this on to all its slots, whether or not they are known to have the functions, also for
    ALL_NUMBERS. Such a number may belong to an object that a function has made.
    """

    SENT = "coordinator -> dispatcher, dispatcher -> worker"
    coordinator: int
    functions: list[int]
    everywhere: bool = False


class Submit(Message, tag=24):
    """Work items to be queued, oldest first.

    `worker`: only this worker ("worker:1") may run them, and they wait until it is registered; empty for any worker. Of the items
    that wait for the same worker, or for any worker, those with the highest `priority` start first. `detached` items belong to no round and
    do not count against the queue's bound; EndRound does not cancel them.
    """

    SENT = "coordinator -> dispatcher"
    round: int
    items: list[Item]
    worker: str = ""
    priority: int = 0
    detached: bool = False


class CancelWork(Message, tag=25):
    """Cancel these work items: drop waiting ones, kill running ones after `grace_s`. Each ends with a Result.

    The Result is CANCELLED unless the item ended otherwise before. `unless_begun`, from a coordinator that subscribed to Begun: items
    that have begun continue, and the coordinator gets CANCELLED, Begun or the Result of each item.
    """

    SENT = "coordinator -> dispatcher"
    works: list[int]
    grace_s: float
    unless_begun: bool = False


class EndRound(Message, tag=26):
    """Cancel all work up to this round. The dispatcher replies with RoundEnded once none of it can be executing."""

    SENT = "coordinator -> dispatcher"
    round: int
    grace_s: float


class ResultReceived(Message, tag=27):
    """The coordinator has received the bulk results of these (work, attempt): the items are finished, and the worker may free the results.

    With `keep`, the worker keeps the results until a ResultReceived without `keep` names them again.
    """

    SENT = "coordinator -> dispatcher"
    items: list[tuple[int, int]]
    keep: bool = False


class Results(Message, tag=28):
    """These work items have ended."""

    SENT = "dispatcher -> coordinator"
    items: list[Result]


class StartsLost(Message, tag=29):
    """Attempts whose process crashed: (work, attempt, worker, exit code, last log lines, final).

    `final`: the bound on lost attempts is reached, and the item will not run again. Otherwise the item waits for its next attempt.
    """

    SENT = "dispatcher -> coordinator"
    items: list[tuple[int, int, str, int | None, str, bool]]


class RoundEnded(Message, tag=30):
    """No work item of this or an earlier round can be executing any more."""

    SENT = "dispatcher -> coordinator"
    round: int


class QueueProgress(Message, tag=31):
    """How many of the coordinator's work items have left the queue since it registered. Sent after the queue was full."""

    SENT = "dispatcher -> coordinator"
    left_queue: int


class Workers(Message, tag=32):
    """The number of workers. Sent when it changes from or to zero."""

    SENT = "dispatcher -> coordinator"
    count: int


class Members(Message, tag=33):
    """Workers that have joined or are lost, for coordinators that watch: after CoordinatorRegistered, and at each change.

    The first message has all present workers. `joined`: (name, incarnation, pid, host); `left`: (name, incarnation, reason). Another
    incarnation is another process.
    """

    SENT = "dispatcher -> coordinator"
    joined: list[tuple[str, int, int, str]]
    left: list[tuple[str, int, str]]


class Begun(Message, tag=34):
    """Workers have begun these items, as far as the dispatcher knows. Sent to coordinators that subscribed (`report_starts`).

    An item that ends quickly may not be reported.
    """

    SENT = "dispatcher -> coordinator"
    works: list[int]


class DescribeWork(Message, tag=35):
    """Name these work items, and the per-worker resources of the program. Sent before a worker is drained; the reply is WorkDescribed."""

    SENT = "dispatcher -> coordinator"
    request: int
    works: list[int]


class WorkDescribed(Message, tag=36):
    """The reply to DescribeWork: (work, name, whether a lost value is recomputed) of those that the program still needs."""

    SENT = "coordinator -> dispatcher"
    request: int
    works: list[tuple[int, str, bool]]
    resources: list[str]


# -- dispatcher and worker ------------------------------------------------------------------------------------------


class Register(Message, tag=40):
    """Register as a worker. Repeated on each new connection. `held` are the leases of this dispatcher that the worker still has.

    `index` -1 requests the lowest free index. `index_given`: a dispatcher chose the index, so another worker may get it later.
    `stale_leases` are functions of an earlier dispatcher that run in threads and could not be stopped, as (lease, coordinator); the worker
    sends a LeasesReturned when one of them ends. `address` is the address at which peers reach the worker's own server. `serial` counts the
    registrations over this connection. `threads_per_slot` is how many threads BLAS and OpenMP start in each slot; 0: not known.
    """

    SENT = "worker -> dispatcher"
    incarnation: int
    job: str
    index: int
    slots: int
    held: list[int]
    stale_leases: list[tuple[int, int]]
    pid: int
    host: str
    address: str = ""
    tags: tuple[str, ...] = ()
    index_given: bool = False
    serial: int = 0
    threads_per_slot: int = 0

    @property
    def named(self) -> bool:
        """Whether the index belongs to this worker, so that its next incarnation registers under the same index."""
        return self.index >= 0 and not self.index_given


class Registered(Message, tag=41):
    """The worker is registered: its index, the interval of its heartbeats, its lease and its grace.

    `serial` is the serial of the Register to which this is the reply.
    """

    SENT = "dispatcher -> worker"
    index: int
    beat_s: float
    lease_s: float
    grace_s: float
    serial: int = 0


class Beat(Message, tag=42):
    """Heartbeat. Any other message counts as a heartbeat, too."""

    SENT = "worker -> dispatcher, dispatcher -> worker"


class Assign(Message, tag=43):
    """Work items to run, oldest first, and the functions that they use and that are new to this worker: (coordinator, fn, pickled).

    `report_before_start`: the items were with a worker that crashed, and may have begun on it, so report each start before it happens.
    `workers` is the number of workers. `pinned`: the items were scheduled for this worker, and run before items that any worker may run.
    """

    SENT = "dispatcher -> worker"
    functions: list[tuple[int, int, bytes]]
    items: list[Leased]
    report_before_start: bool = False
    workers: int = 0
    pinned: bool = False


class StealRequest(Message, tag=44):
    """Give back the leases in this list that have not started, because another worker is idle."""

    SENT = "dispatcher -> worker"
    leases: list[int]


class AbortLeases(Message, tag=45):
    """End these leases: give back those that have not started, kill running ones after `grace_s`."""

    SENT = "dispatcher -> worker"
    leases: list[int]
    grace_s: float


class FreeResult(Message, tag=46):
    """The coordinator has received the bulk results of these leases, or does not want them: free them."""

    SENT = "dispatcher -> worker"
    leases: list[int]


class Leave(Message, tag=47):
    """Stop in good order: give back leases that have not started, finish running ones (at most `grace_s`), then say Goodbye.

    From a worker it means that the worker is leaving, so that the dispatcher must send it no more work.
    """

    SENT = "dispatcher -> worker, worker -> dispatcher"
    grace_s: float


class Done(Message, tag=48):
    """Leases that have ended, and leases that have started since the last message.

    busy_us: microseconds for which the worker has had work since its last message. trip_us: round-trip time between worker and
    dispatcher, 0 while unknown.
    """

    SENT = "worker -> dispatcher"
    outcomes: list[Outcome]
    started: list[int]
    busy_us: int = 0
    trip_us: int = 0


class LeasesReturned(Message, tag=49):
    """The worker has not started these leases and will not start them."""

    SENT = "worker -> dispatcher"
    leases: list[int]


class SlotsLost(Message, tag=50):
    """Slot processes that crashed during a lease: (lease, exit code, last log lines)."""

    SENT = "worker -> dispatcher"
    items: list[tuple[int, int | None, str]]


# -- payloads that cannot be fetched from their holder --------------------------------------------------------------


class Read(Message, tag=60):
    """Send a range of a payload that the receiver holds, for a process that cannot connect to the receiver."""

    SENT = "dispatcher -> coordinator, dispatcher -> worker"
    request: int
    bulk: int
    offset: int
    length: int


class ReadDone(Message, tag=61):
    """The reply to Read `request`: code 0 and one payload frame, or the code and message of an error."""

    SENT = "coordinator -> dispatcher, worker -> dispatcher"
    request: int
    code: int
    message: str


# -- keys of members ---------------------------------------------------------------------------------------------


class Join(Message, tag=70):
    """Admit the key of this connection under `name`. `number` and `secret` are those of a join token.

    `name` is "worker:3" or "submit". Only a connection whose key is not known yet sends this.
    """

    SENT = "any -> dispatcher"
    number: str
    secret: bytes
    name: str


class Joined(Message, tag=71):
    """The dispatcher has admitted a key under this name and role. The key works on new connections."""

    SENT = "dispatcher -> any"
    role: str
    name: str


class AskKey(Message, tag=72):
    """Send the state of a public key, or of the key that listens at `address`: now, and after each change.

    `renews`: the sender is the owner of the key, so it makes a new one after RenewKey.
    """

    SENT = "any -> dispatcher"
    key: bytes
    address: str = ""
    renews: bool = False


class KeyState(Message, tag=73):
    """The state of a public key. `role` is "" for an unknown key, and "revoked" for a key that lost its role because of `problem`.

    `listens`: a port that shows the key may be trusted. `address` is the address in the AskKey, if it has one; `key` is then the key of the
    server at that address.
    """

    SENT = "dispatcher -> any"
    key: bytes
    role: str
    name: str = ""
    listens: bool = False
    problem: str = ""
    address: str = ""


class RenewKey(Message, tag=74):
    """Make a new key pair and send its public half."""

    SENT = "dispatcher -> any"


class NewKey(Message, tag=75):
    """The public key that replaces the key of this connection. The dispatcher replies with Joined or Refused."""

    SENT = "any -> dispatcher"
    key: bytes


ALL: tuple[type[Message], ...] = tuple(
    sorted(Message.__subclasses__(), key=lambda cls: cls.__struct_config__.tag)  # type: ignore[arg-type,return-value]
)
"""Every message class, by tag."""
