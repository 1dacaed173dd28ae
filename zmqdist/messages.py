"""Every message of the protocol. docs/protocol.md has the same list as a table, generated from this
file.

Rules
    A message is a header frame and the payload frames after it. The header is one of these structs
    in MessagePack. Only the sender and the receiver interpret the payload frames. The first message
    of each side is a hello (wire/hello.py), whose beginning every version can read. All other
    messages form one tagged union. The position of a field identifies it, so a new field is added
    at the end and has a default.
    `SENT` of a class names the sender and the receiver. The first paragraph of the docstring of a
    class says what the message means.

Words
    work: the number of a work item, which its coordinator chooses.
    lease: a number that the dispatcher chooses for one attempt of a work item at one worker. One
      incarnation of a dispatcher never uses a lease number twice, so that it recognizes late
      results of an earlier attempt (fencing).
    round: the number of a coordinator's round. When an error has ended a round, the next round has
      a higher number.
    fn: the number of a function, which the coordinator chooses.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

import msgspec

from zmqdist.limits import BATCH_ITEMS_MAX, BUCKETS, CANCEL_GRACE_S

Item: TypeAlias = tuple[int, int, int, int, bytes]
"""A work item that a coordinator submits: (work, attempt, lost, fn, payload).

`attempt` is the number of the first attempt after this submission. `lost` is the number of attempts
that were lost before it.
"""
SUBMISSION_SHIFT = 16
"""The bits of an attempt number that count within one submission of a work item: each submission,
retry and recomputation begins a new range of 65,536 numbers."""
Leased: TypeAlias = tuple[int, int, int, int, bytes]
"""A work item that the dispatcher sends to a worker: (lease, coordinator, attempt, fn, payload)."""
Granted: TypeAlias = tuple[int, tuple[tuple[str, int], ...], tuple[int, ...]]
"""What a lease has of its worker: (lease, quantities, devices). A quantity is (name, thousandths)
of a resource. Devices are numbers among the GPUs that the worker has."""
Outcome: TypeAlias = tuple[int, int, bytes]
"""The end of a lease: (lease, kind, payload). `kind` is one of the constants VALUE to
OUT_OF_MEMORY.
"""
Result: TypeAlias = tuple[int, int, int, bytes]
"""The end of a work item: (work, attempt, kind, payload)."""

Part: TypeAlias = tuple[int, ...]
"""The place of one large part of a payload: (nbytes,) for a part that is sent in chunks, or the
handle of a block of shared memory.

The handle is a tuple of eight numbers (transport/shm_pool.py).
"""

VALUE = 0
"""The payload is the value."""
ERROR = 1
"""The function raised an exception. The payload is the exception with its traceback."""
BULK = 2
"""The payload is a reference to the value, which the worker keeps until the coordinator has fetched
it."""
CANCELLED = 3
"""The work item was cancelled before it ended. The payload is empty."""
KEPT = 4
"""The payload is a reference, as for BULK, to a value that stays with its worker. This kind is used
only inside a process, and between a slot and its worker. Messages use BULK.
"""
ITEM = 6
"""The payload is one value of a generator, or a reference to it; more outcomes of the call follow.
In the place of the attempt is the number of the value."""
INPUT_LOST = 5
"""The function did not run, because the holder no longer has the value of an input. The payload is
from `encode_loss` (scheduling/shared/remote_results.py).
"""
OUT_OF_MEMORY = 6
"""The function was ended, because its slot used more memory than it may. The payload is the reason
as text."""


SAID_GOODBYE = "said goodbye"
"""The reason in Members for a worker that stopped in good order. Such a loss is not recorded in the
history."""

ALL_NUMBERS = -1
"""In a Forget to all workers this number means every number of the coordinator."""


_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]  # NaN is refused, too
_Figure: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e18)]  # infinity is no JSON
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Buckets: TypeAlias = list[
    tuple[
        Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)], Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    ]
]


class Message(msgspec.Struct, array_like=True, gc=False):
    """The base class of all messages. A message is an array in MessagePack that starts with the
    tag. It is immutable by convention: only transport/transfers.py sets a field, which is the field
    `parts` of a Call or Reply before it is sent.
    """

    SENT: ClassVar[str] = ""


# -- calls and replies -----------------------------------------------------------------------------


class Call(Message, tag=1):
    """Run a method and send a Reply. The payload frames are the large arrays of the arguments,
    unless `parts` describes these arrays.

    `incarnation` is the incarnation of the server for which the call is meant. A server in another
    incarnation replies UNAVAILABLE. `left_ms` is the time for which the caller still waits, and 0
    means no limit. `held` says that the client sends the chunks of `parts` only after SendParts.
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
    """The reply to Call `id`: code 0 and a value, or the code and message of an error. Large arrays
    are sent as in Call."""

    SENT = "server -> client"
    id: int
    code: int
    message: str
    body: bytes
    parts: tuple[Part, ...] = ()


class CancelCall(Message, tag=3):
    """The client does not want the reply to Call `id` any more. The handler may return early, and
    no more chunks of the call are sent.

    In the handler `zmqdist.cancelled()` returns True.
    """

    SENT = "client -> server"
    id: int


class Ping(Message, tag=4):
    """A message without content, sent to find out whether the connection still works. It gets no
    reply."""

    SENT = "any -> any"


class Goodbye(Message, tag=5):
    """The sender stops in good order. The receiver must not wait for the sender to reconnect."""

    SENT = "any -> any"
    reason: str = ""


class Refused(Message, tag=6):
    """The receiver's last message had no effect, or the receiver's session has ended. With `final`
    the receiver must not try again."""

    SENT = "server -> any"
    code: int
    message: str
    final: bool = False


class Calls(Message, tag=10):
    """Several Call messages without payload frames, made while an earlier call of the client was in
    flight. Each one gets a reply."""

    SENT = "client -> server"
    items: Annotated[list[Call], msgspec.Meta(max_length=BATCH_ITEMS_MAX)]


class Replies(Message, tag=11):
    """Several Reply messages without payload frames, in any order."""

    SENT = "server -> client"
    items: list[Reply]


class Chunk(Message, tag=12):
    """Bytes of part `part` of Call `id` or of its reply, from `offset` on, as one frame. Chunks are
    sent in order, each byte once."""

    SENT = "client -> server, server -> client"
    id: int
    part: int
    offset: int


class Credit(Message, tag=13):
    """The sender has read `nbytes` bytes of chunks, of any calls, from its queue, so the peer may
    send as many more bytes."""

    SENT = "client -> server, server -> client"
    nbytes: int


class SharedMemoryAccepted(Message, tag=14):
    """The client has mapped the shared memory that the server's hello names, and read this nonce
    there. The server may lend blocks now."""

    SENT = "client -> server"
    nonce: int


class SendParts(Message, tag=15):
    """Send the chunks of Call `id`, which was `held`, because the server now has room for them."""

    SENT = "server -> client"
    id: int


# -- coordinator and dispatcher --------------------------------------------------------------------


class RegisterCoordinator(Message, tag=20):
    """Register the sender as a coordinator. The sender repeats this message on each new connection,
    with the same `coordinator` number.

    `previous_dispatcher` says that the coordinator has sent work of the present round to an earlier
    incarnation of the dispatcher. `watch_members` subscribes to Members, and `report_starts`
    subscribes to Begun. `parent` is the lease of the function that is the program; 0 if none is.
    The end of this lease ends the session.
    """

    SENT = "coordinator -> dispatcher"
    coordinator: int
    queue_max: int
    round: int
    previous_dispatcher: bool
    watch_members: bool = False
    report_starts: bool = False
    parent: int = 0


class CoordinatorRegistered(Message, tag=21):
    """The coordinator is registered. It submits its work again, because the dispatcher has dropped
    work of earlier connections."""

    SENT = "dispatcher -> coordinator"
    attempts_max: int
    workers: int


class Define(Message, tag=22):
    """Pickled functions with the coordinator's numbers for them. They are sent before the first
    work item that uses them.

    `names` has the name of each function, for status and the other views; it may be shorter.
    """

    SENT = "coordinator -> dispatcher"
    functions: list[tuple[int, bytes]]
    names: list[str] = []


class Forget(Message, tag=23):
    """No unfinished work item uses these functions, and no later work item will use them under
    these numbers.

    With `everywhere`, every worker passes this message on to all its slots, even to those that are
    not known to have the functions. This is needed for ALL_NUMBERS (every number of the
    coordinator), and for numbers of objects that a function has made in a slot.
    """

    SENT = "coordinator -> dispatcher, dispatcher -> worker"
    coordinator: int
    functions: list[int]
    everywhere: bool = False


class Submit(Message, tag=24):
    """Work items to be queued, oldest first.

    If `worker` is a name such as "worker:1", only this worker may run the items, and they wait
    until it is registered. "" means any worker. Among items that wait for one worker, or among
    those that wait for any worker, items with the highest `priority` start first. `detached` items
    belong to no round, do not count against the bound of the queue, and are not cancelled by
    EndRound. `resources` is what each item needs, as (name, thousandths). The worker `near` holds
    about `near_bytes` of the inputs of each item, so that the items preferably run on its host.
    `waited` has the seconds that items have waited in the program for their inputs.
    """

    SENT = "coordinator -> dispatcher"
    round: int
    items: list[Item]
    worker: str = ""
    priority: int = 0
    detached: bool = False
    resources: tuple[tuple[str, int], ...] = ()
    near: str = ""
    near_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    waited: dict[int, _Figure] = {}


class CancelWork(Message, tag=25):
    """Cancel these work items, each (work, attempt), where the attempt is one of the submission that
    is cancelled. Waiting items are dropped, and running items are killed after `grace_s`. Each item
    ends with a Result.

    The kind of the Result is CANCELLED, unless the item has ended in another way before. With
    `unless_begun`, items that have begun continue. The coordinator, which has subscribed to Begun,
    then gets one message for each item: a Result of kind CANCELLED if the item was waiting, a Begun
    if it was running, or its Result if it had ended.
    """

    SENT = "coordinator -> dispatcher"
    works: list[tuple[int, int]]
    grace_s: _Seconds
    unless_begun: bool = False


class EndRound(Message, tag=26):
    """Cancel all work of this and earlier rounds. The dispatcher replies with RoundEnded when none
    of this work can run any more."""

    SENT = "coordinator -> dispatcher"
    round: int
    grace_s: _Seconds


class ResultReceived(Message, tag=27):
    """The coordinator has received the large results of these (work, attempt), so the items are
    finished. Unless `keep` is set, workers free the results.

    With `keep`, the worker keeps the results until a ResultReceived without `keep` names them
    again.
    """

    SENT = "coordinator -> dispatcher"
    items: list[tuple[int, int]]
    keep: bool = False


class Results(Message, tag=28):
    """These work items have ended."""

    SENT = "dispatcher -> coordinator"
    items: list[Result]


class StartsLost(Message, tag=29):
    """These attempts had started, and their slot process or their worker is lost: (work, attempt,
    worker, exit code, last log lines, whether the item has reached the bound on lost starts and
    does not run again).
    """

    SENT = "dispatcher -> coordinator"
    items: list[tuple[int, int, str, int | None, str, bool]]


class RoundEnded(Message, tag=30):
    """No work item of this or an earlier round can run any more."""

    SENT = "dispatcher -> coordinator"
    round: int


class QueueProgress(Message, tag=31):
    """The number of work items that have left the queue since the coordinator registered. It is
    sent when a full queue has room again."""

    SENT = "dispatcher -> coordinator"
    left_queue: int


class Workers(Message, tag=32):
    """The number of workers. This is sent when the number changes from zero or to zero."""

    SENT = "dispatcher -> coordinator"
    count: int


class Members(Message, tag=33):
    """Workers that have registered or are lost. This is sent to coordinators that have subscribed
    (`watch_members`), after CoordinatorRegistered and at each change.

    The first message has all registered workers. `joined` has (name, incarnation, pid, host,
    slots), and `left` has (name, incarnation, reason). A restarted worker has another incarnation.
    """

    SENT = "dispatcher -> coordinator"
    joined: list[tuple[str, int, int, str, int]]
    left: list[tuple[str, int, str]]


class Begun(Message, tag=34):
    """The dispatcher knows that workers have begun these items, each (work, attempt). This is sent
    to coordinators that have subscribed (`report_starts`).

    An item that ends quickly may be missing in all such messages.
    """

    SENT = "dispatcher -> coordinator"
    works: list[tuple[int, int]]


class DescribeWork(Message, tag=35):
    """Send the names of these work items and of the program's per-worker resources, which the
    dispatcher needs to report what a drain would lose. The reply is WorkDescribed.
    """

    SENT = "dispatcher -> coordinator"
    request: int
    works: list[int]


class WorkDescribed(Message, tag=36):
    """The reply to DescribeWork: (work, name, whether a lost value is recomputed) of each work item
    that the program still needs."""

    SENT = "coordinator -> dispatcher"
    request: int
    works: list[tuple[int, str, bool]]
    resources: list[str]


class ProgramFacts(Message, tag=37):
    """How many work items of the program wait for their inputs, and the bytes of arguments and
    values that the program holds: at most once a second, after a change."""

    SENT = "coordinator -> dispatcher"
    waits_for_input: _Count
    held_bytes: _Count


# -- dispatcher and worker -------------------------------------------------------------------------


class Register(Message, tag=40):
    """Register the sender as a worker, on each new connection. `held` has the leases of this
    dispatcher that the worker still has.

    `index` -1 requests the lowest free index. `index_given` says that a dispatcher has chosen the
    index, so that another worker may get it later. `stale_leases` has (lease, coordinator) of each
    function that an earlier dispatcher assigned and that a thread still runs. When such a function
    ends, the worker sends LeasesReturned. `address` is the address at which peers reach the
    worker's own server. `serial` counts the registrations over this connection. `threads_per_slot`
    is the number of threads of BLAS and OpenMP in each slot, and 0 means that this number is not
    known. `resources` is what the worker has, as (name, thousandths), and `grants` has what the
    functions in `held` and `stale_leases` use of it. `actors_max` is the number of actors that the worker may
    have, and `actors` has their processes. `nested_slots_max` is the number of extra slots that the
    worker may start while functions in its slots wait for results.
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
    resources: tuple[tuple[str, int], ...] = ()
    grants: list[Granted] = []
    actors_max: int = 0
    actors: list[HostedActor] = []
    nested_slots_max: int = 0

    @property
    def named(self) -> bool:
        """Whether the index belongs to this worker, so that its next incarnation registers under
        the same index."""
        return self.index >= 0 and not self.index_given


class Registered(Message, tag=41):
    """The worker is registered. The message has its index, the interval of its heartbeats, the
    length of its leases, and its grace.

    `serial` is the serial of the Register to which this is the reply.
    """

    SENT = "dispatcher -> worker"
    index: int
    beat_s: float
    lease_s: float
    grace_s: _Seconds
    serial: int = 0


class Beat(Message, tag=42):
    """A heartbeat. Any other message counts as a heartbeat, too.

    In the dispatcher's echo `idle_beat_s` is the interval of heartbeats while the worker has no work,
    result or actor; 0 if it is the same as with work.
    """

    SENT = "worker -> dispatcher, dispatcher -> worker"
    idle_beat_s: _Seconds = 0.0


class Assign(Message, tag=43):
    """Run these work items, the oldest first. Functions that are new to this worker are sent along
    as (coordinator, fn, pickled).

    `report_before_start` has the worker report each start before it happens, because the items were
    with a worker that crashed and may have begun there. `workers` is the number of workers.
    `pinned` says that the items run before other items, because they were scheduled for this worker
    or have resources. `grants` has the resources of items that need some. `depth` is 0 for work of
    programs, and otherwise says how many functions have scheduled each other down to these items.
    """

    SENT = "dispatcher -> worker"
    functions: list[tuple[int, int, bytes]]
    items: list[Leased]
    report_before_start: bool = False
    workers: int = 0
    pinned: bool = False
    grants: list[Granted] = []
    depth: int = 0


class StealRequest(Message, tag=44):
    """Give back each of these leases that has not started, because another worker is idle."""

    SENT = "dispatcher -> worker"
    leases: list[int]


class AbortLeases(Message, tag=45):
    """End these leases. The worker gives back those that have not started, and kills running
    functions after `grace_s`."""

    SENT = "dispatcher -> worker"
    leases: list[int]
    grace_s: _Seconds


class FreeResult(Message, tag=46):
    """Free the large results of these leases, because the coordinator has received them or does not
    want them."""

    SENT = "dispatcher -> worker"
    leases: list[int]


class Leave(Message, tag=47):
    """The worker leaves, whichever side sends this message: it gives back leases that have not
    started, finishes running ones within its grace, and sends Goodbye. The dispatcher sends it no
    more work. When a worker sends this message, `grace_s` is 0 and has no effect.
    """

    SENT = "dispatcher -> worker, worker -> dispatcher"
    grace_s: _Seconds


class TaskEvent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A run that has ended: the lease of a function, or the call (coordinator, work, attempt) of an
    actor's method; `ago_s` and `took_s` say when it ended and how long it ran.
    """

    lease: int
    slot: int
    ago_s: _Figure
    took_s: _Figure
    kind: int
    method: str = ""
    coordinator: int = 0
    work: int = 0
    attempt: int = 0


class Done(Message, tag=48):
    """Leases that have ended, and leases that have started since the last message.

    `busy_us` is the microseconds for which the worker has had work since its last message.
    `trip_us` is the round-trip time between worker and dispatcher, and 0 means that it is not
    known. `runs` are runs of these leases, and of later ones, for a watcher (Observe).
    """

    SENT = "worker -> dispatcher"
    outcomes: list[Outcome]
    started: list[int]
    busy_us: Annotated[int, msgspec.Meta(ge=0)] = 0
    trip_us: Annotated[int, msgspec.Meta(ge=0)] = 0
    runs: list[TaskEvent] = []


class LeasesReturned(Message, tag=49):
    """The worker has not started these leases and will not start them."""

    SENT = "worker -> dispatcher"
    leases: list[int]


class SlotsLost(Message, tag=50):
    """Slot processes have crashed during these leases: (lease, exit code, last log lines)."""

    SENT = "worker -> dispatcher"
    items: list[tuple[int, int | None, str]]


class SlotsWaiting(Message, tag=51):
    """The functions of the leases in `waiting` wait for results of other work, so that their slots
    count as free. Those in `resumed` run again."""

    SENT = "worker -> dispatcher"
    waiting: list[int]
    resumed: list[int]


class SlotFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one slot of a worker does.

    Attributes:
      state: as in `SlotRow` (scheduling/worker/records.py).
      lease: the lease of the function that runs; 0 if none runs.
      since_s: the seconds for which it has run.
      rss_bytes, cpu_percent: memory in RAM, and processor time, of its process; 0 for a thread.
    """

    slot: _Count
    pid: _Count
    state: str
    lease: int = 0
    since_s: _Figure = 0.0
    rss_bytes: _Count = 0
    cpu_percent: _Figure = 0.0


class FunctionFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What runs of one function, or calls of one method of an actor, have added since the last
    report.

    Attributes:
      coordinator, fn: the numbers of a function; (0, 0) for all functions beyond those that a slot
        can tell apart, and for methods.
      method: "Class.method" of an actor, or "".
      buckets: (bucket, count) of the durations: bucket b has those up to
        `BUCKET_MIN_S * 2 ** (b / 4)`.
    """

    coordinator: int
    fn: int
    method: str
    count: _Count
    failed: _Count
    sum_s: _Figure
    max_s: _Figure
    cpu_s: _Figure
    bytes_in: _Count
    bytes_out: _Count
    buckets: _Buckets


class FailureFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An error of a function, or of a method of an actor, with its traceback as text.

    Attributes:
      lease: the lease of the function; for a method 0, and `coordinator`, `work` and `attempt` are
        those of the call.
    """

    lease: int
    pid: _Count
    error: str
    message: str
    traceback: str
    method: str = ""
    coordinator: int = 0
    work: int = 0
    attempt: int = 0


class ActorFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The process of an actor: its pid, memory in RAM and processor time, and its calls since it
    began: all, failed ones, and those that wait or run. `buckets` as in FunctionFacts, of calls
    since the last report.
    """

    actor: int
    pid: _Count
    rss_bytes: _Count
    cpu_percent: _Figure
    calls: _Count
    failed: _Count
    waiting: _Count
    buckets: _Buckets


class WorkerFigures(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The figures of a worker: memory in RAM and processor time of its process, its slots and its
    actors together; the memory of its host; the bytes of results and arguments that it holds, and
    those of them in shared memory; the bytes of arguments and results of its functions.
    """

    rss_bytes: _Count = 0
    cpu_percent: _Figure = 0.0
    host_memory_bytes: _Count = 0
    host_memory_free_bytes: _Count = 0
    kept_bytes: _Count = 0
    shm_bytes: _Count = 0
    bytes_in: _Count = 0
    bytes_out: _Count = 0


class WorkerFacts(Message, tag=52):
    """What the worker knows about its slots, functions and actors, at most once a second and only
    after a change; a failure is reported at once, with no `figures`.

    `events` are calls of actors, sent while a watcher asks for them (Observe); `events_dropped` of
    all runs were left out.
    """

    SENT = "worker -> dispatcher"
    figures: WorkerFigures | None = None
    slots: list[SlotFacts] = []
    functions: list[FunctionFacts] = []
    failures: list[FailureFacts] = []
    actors: list[ActorFacts] = []
    events: list[TaskEvent] = []
    events_dropped: _Count = 0


class Observe(Message, tag=53):
    """A watcher asks for the timeline: report runs that end within the next `within_s`, at most
    `runs_per_s`."""

    SENT = "dispatcher -> worker"
    within_s: _Seconds
    runs_per_s: _Count


class MethodFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The calls of one RPC method since its server began: those that have ended, those of them that
    have failed, those that wait or run now, and the durations from the arrival of a call to its
    reply (`buckets` as in FunctionFacts)."""

    method: str
    count: _Count
    failed: _Count
    in_flight: _Count
    sum_s: _Figure
    max_s: _Figure
    buckets: _Buckets


class VariableFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A variable of a parameter server: its bytes with the slots of optimizers, the updates since
    it was made, and the seconds that these have waited for each other."""

    session: int
    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: _Count
    updates: _Count
    waits_s: _Figure


class ServerFacts(Message, tag=57):
    """The figures of a server in the sender's process, or of a parameter server that the sender
    uses, since that server began: at most once a second and only after a change. Without a `name`
    the server has ended. `variables_more` are not in the list.
    """

    SENT = "coordinator -> dispatcher, worker -> dispatcher"
    incarnation: int
    name: str = ""
    methods: list[MethodFacts] = []
    variables: list[VariableFacts] = []
    variables_more: _Count = 0


class AskWorker(Message, tag=54):
    """Answer a question about the inside of the worker: with `kind` "stack" the stacks of its
    processes, with "profile" their samples over `seconds`, with "logs" the lines after the one
    numbered `after`; LogLines has those of the next `seconds`."""

    SENT = "dispatcher -> worker"
    request: int
    kind: str
    seconds: _Seconds = 0.0
    after: int = 0


class WorkerAnswer(Message, tag=55):
    """The answer to AskWorker `request`: a payload that depends on the kind, in MessagePack, or the
    text of an error."""

    SENT = "worker -> dispatcher"
    request: int
    payload: bytes
    error: str = ""


class LogLine(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A line that a process of a worker has written.

    Attributes:
      number: counts the lines of the worker.
      at: seconds since 1970.
      process: what the process is, such as "slot 0".
      stream: 1 for its standard output, 2 for its standard error.
    """

    number: int
    at: float
    process: str
    stream: int
    text: str


class LogLines(Message, tag=56):
    """Lines that the processes of the worker have written, for programs that follow them."""

    SENT = "worker -> dispatcher"
    lines: list[LogLine]


# -- payloads that cannot be fetched from their holder ---------------------------------------------


class Read(Message, tag=60):
    """Request a range of a payload from its holder, for a process that cannot connect to the
    holder."""

    SENT = "dispatcher -> coordinator, dispatcher -> worker"
    request: int
    bulk: int
    offset: int
    length: int


class ReadDone(Message, tag=61):
    """The reply to Read `request`: code 0 and one payload frame, or the code and message of an
    error."""

    SENT = "coordinator -> dispatcher, worker -> dispatcher"
    request: int
    code: int
    message: str


# -- keys of members -------------------------------------------------------------------------------


class Join(Message, tag=70):
    """Admit the key of this connection under `name`. `number` and `secret` are those of a join
    token.

    `name` is, for example, "worker:3" or "submit". Only a peer whose key the dispatcher does not
    know yet sends this.
    """

    SENT = "any -> dispatcher"
    number: str
    secret: bytes
    name: str


class Joined(Message, tag=71):
    """The dispatcher has admitted a key under this name and role. The key works on new
    connections.
    """

    SENT = "dispatcher -> any"
    role: str
    name: str


class Unsatisfied(Message, tag=77):
    """No worker has the resources that these items, each (work, attempt), need; `text` names the
    request and what the workers have. With `final` the items have ended; else they wait for a
    worker that has enough, and `works` names only some of them.
    """

    SENT = "dispatcher -> coordinator"
    works: list[tuple[int, int]]
    text: str
    final: bool = False


class AskKey(Message, tag=72):
    """Send the state of a public key, or of the key of the server at `address`, now and after each
    change.

    `renews` says that the sender owns the key, and therefore makes a new key after RenewKey.
    """

    SENT = "any -> dispatcher"
    key: bytes
    address: str = ""
    renews: bool = False


class KeyState(Message, tag=73):
    """The state of a public key. `role` is "" for an unknown key, and "revoked" for a key that lost
    its role because of `problem`.

    `listens` says that a server whose port shows this key may be trusted. If the AskKey has an
    `address`, this message has it, too, and `key` is the key of the server at this address.
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
    """The public key that replaces the key of this connection. The dispatcher replies with Joined
    or Refused."""

    SENT = "any -> dispatcher"
    key: bytes


# -- actors ----------------------------------------------------------------------------------------


class ActorSpec(msgspec.Struct, array_like=True, frozen=True):
    """What an actor is. Programs, the dispatcher and the actor's worker have the same spec.

    Attributes:
      actor: the actor's number, a random number of 62 bits.
      cls: the name of the class, for errors and status.
      call: the packed class and arguments, from which its process makes the object.
      owner: the number of the coordinator that has made the actor; 0 for a detached one, which
        outlives its program.
      restarts: how often its process may be replaced.
      concurrency: how many calls of `async` methods run at a time.
      methods: the kinds of its public methods by name (scheduling/shared/actor_class.py).
      group, rank, size: the number of its group, 0 without one, and its place there.
    """

    actor: int
    cls: str
    call: bytes
    owner: int
    name: str = ""
    worker: str = ""
    restarts: int = 0
    concurrency: int = 1
    methods: dict[str, int] = {}
    resources: dict[str, int] = {}
    group: int = 0
    rank: int = 0
    size: int = 1


class HostedActor(msgspec.Struct, array_like=True, frozen=True):
    """A process of an actor that a worker has, for Register.

    Attributes:
      restarts_left: how often it may be replaced yet.
      is_kept: whether it lives on without contact to a dispatcher.
      address, key: where it serves calls; "" while it makes its object.
      devices: the numbers of the worker's devices that it uses.
    """

    spec: ActorSpec
    incarnation: int
    restarts_left: int
    is_kept: bool = False
    address: str = ""
    key: bytes = b""
    devices: tuple[int, ...] = ()


class CreateActor(Message, tag=80):
    """Place this actor, unless it has been placed. Sent on each new connection until the actor has
    ended.

    `incarnation` and `restarts_left` are those that the coordinator knows, 0 and -1 at first.
    `may_live` says that an earlier dispatcher was asked for this actor.
    """

    SENT = "coordinator -> dispatcher"
    spec: ActorSpec
    incarnation: int = 0
    restarts_left: int = -1
    may_live: bool = False


class ActorsOwned(Message, tag=81):
    """All actors of this coordinator that have not ended. Any other actor of it ends."""

    SENT = "coordinator -> dispatcher"
    actors: list[int]


class DropActor(Message, tag=82):
    """End this actor, for this reason. Its process has `grace_s` to end its calls."""

    SENT = "coordinator -> dispatcher"
    actor: int
    reason: str
    grace_s: _Seconds = CANCEL_GRACE_S


class FindActor(Message, tag=83):
    """Answer with ActorFound: is there an actor of this name?"""

    SENT = "coordinator -> dispatcher"
    request: int
    name: str


class ActorKnown(Message, tag=84):
    """The owner of an actor knows this incarnation of it, so that its worker may keep the process
    without contact to a dispatcher."""

    SENT = "coordinator -> dispatcher"
    actor: int
    incarnation: int


class WatchActor(Message, tag=85):
    """Send ActorChanged about this actor, now and after each change; with `stop`, no more."""

    SENT = "coordinator -> dispatcher"
    actor: int
    stop: bool = False


class ActorChanged(Message, tag=86):
    """The state of an actor: `state` is an ActorState (scheduling/shared/actors.py), `reason` says
    why its last process has ended, or why it waits. `error` is the packed error of its `__init__`.
    """

    SENT = "dispatcher -> coordinator"
    actor: int
    state: int
    incarnation: int = 0
    restarts_left: int = 0
    address: str = ""
    key: bytes = b""
    worker: str = ""
    reason: str = ""
    error: bytes = b""


class ActorFound(Message, tag=87):
    """The answer to FindActor: the actor's number, class and methods; 0 if there is none of this
    name. The coordinator then watches it."""

    SENT = "dispatcher -> coordinator"
    request: int
    actor: int
    cls: str = ""
    methods: dict[str, int] = {}


class StartActor(Message, tag=88):
    """Start a process for this incarnation of an actor, which uses these devices of the worker."""

    SENT = "dispatcher -> worker"
    spec: ActorSpec
    incarnation: int
    restarts_left: int
    devices: tuple[int, ...] = ()


class StopActor(Message, tag=89):
    """End the process of this incarnation of an actor, which is killed after `grace_s`."""

    SENT = "dispatcher -> worker"
    actor: int
    incarnation: int
    grace_s: _Seconds = 0.0


class KeepActor(Message, tag=90):
    """Keep the process of this incarnation without contact to a dispatcher, because the actor is
    never replaced."""

    SENT = "dispatcher -> worker"
    actor: int
    incarnation: int


class ActorReady(Message, tag=91):
    """The process of an actor has made its object, and serves calls at this address."""

    SENT = "worker -> dispatcher"
    actor: int
    incarnation: int
    address: str
    key: bytes = b""


class ActorExited(Message, tag=92):
    """The process of an actor has ended. `final` says that the next would end the same way, because
    `__init__` has raised `error`. Without `has_begun` the worker has started no process, because it
    leaves.
    """

    SENT = "worker -> dispatcher"
    actor: int
    incarnation: int
    reason: str
    final: bool = False
    error: bytes = b""
    has_begun: bool = True


class CallActor(Message, tag=93):
    """Run these calls, each (work, attempt, method, payload), in this order."""

    SENT = "coordinator -> actor"
    actor: int
    incarnation: int
    calls: list[tuple[int, int, str, bytes]]


class CancelActorCalls(Message, tag=94):
    """Drop these calls, or end them early if they have begun. No results are expected."""

    SENT = "coordinator -> actor"
    calls: list[tuple[int, int]]


class ActorResults(Message, tag=95):
    """The results of calls."""

    SENT = "actor -> coordinator"
    incarnation: int
    items: list[Result]


class StreamCredit(Message, tag=96):
    """The reader of a generator has taken so many more values, so that the actor may free them and
    make more."""

    SENT = "coordinator -> actor"
    work: int
    count: int


ALL: tuple[type[Message], ...] = tuple(
    sorted(Message.__subclasses__(), key=lambda cls: cls.__struct_config__.tag)  # type: ignore[arg-type,return-value]
)
"""Every message class, by tag."""
