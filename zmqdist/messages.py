"""Every message of the protocol. docs/protocol.md has the same list as a table, made from this file.

Rules
    A message is a header frame, which is one of these structs in MessagePack, and the payload frames after it, which
    only the two ends read. The first message of each side is a hello (wire/hello.py), which is readable across
    versions; the rest is one tagged union. Fields are told by position: new ones go to the end, with a default.
    A class says in `SENT` who sends it to whom; its docstring's first line says what it means.

Words
    work, a number that its coordinator gives; lease, a number that the dispatcher gives to one handing-out of a piece of
    work to one worker: two leases never share a number in one life of a dispatcher, which is what fences late results.
    generation, the span between two errors raised by a coordinator. fn, a number that the coordinator gives to a function.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

import msgspec

from zmqdist.limits import BATCH_ITEMS_MAX

Item: TypeAlias = tuple[int, int, int, int, bytes]
"""One piece of work as submitted: (work, attempt, lost, fn, payload).

`attempt` is the number of the first handing-out; `lost` counts the starts that were lost before this submission.
"""
Leased: TypeAlias = tuple[int, int, int, int, bytes]
"""One piece of work as handed out: (lease, coordinator, attempt, fn, payload)."""
Outcome: TypeAlias = tuple[int, int, bytes]
"""How one lease ended: (lease, kind, payload); kind is one of the constants below."""
Result: TypeAlias = tuple[int, int, int, bytes]
"""How one piece of work ended: (work, attempt, kind, payload)."""

Part: TypeAlias = tuple[int, ...]
"""Where one large part of a payload is: (bytes,) follows in chunks; eight numbers are a handle of shared memory (transport/shm_pool.py)."""

VALUE = 0
"""The payload is the value."""
ERROR = 1
"""The function raised: the payload is the exception with its traceback."""
BULK = 2
"""The payload is a reference: the value is held by the worker until the coordinator has it."""
CANCELLED = 3
"""It was withdrawn before it ended; the payload is empty."""
KEPT = 4
"""As BULK, for a value that stays with its worker. Only inside a process and between a slot and its worker: messages say BULK."""
INPUT_LOST = 5
"""It was not run: one of its inputs is not where it was kept. The payload is from `encode_loss` of scheduling/worker/remote_results.py."""


ALL_NUMBERS = -1
"""In a Forget that goes everywhere: all numbers of that coordinator."""


class Message(msgspec.Struct, array_like=True, gc=False):
    """What all messages share: an array in MessagePack that starts with the tag. Nobody changes one after making it."""

    SENT: ClassVar[str] = ""


# -- questions with answers -----------------------------------------------------------------------------------------


class Call(Message, tag=1):
    """Run a method and answer with Reply; payload frames are large arrays of the arguments, unless `parts` says where they are.

    `incarnation` is the life of the server that is meant: another one refuses with UNAVAILABLE. `left_ms` is the time that
    the caller will still wait, 0 for ever. `held`: the chunks of `parts` are sent after LetIn.
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
    """The answer to Call `id`: code 0 and a value, or an error's code and message. Large arrays travel as those of Call."""

    SENT = "server -> client"
    id: int
    code: int
    message: str
    body: bytes
    parts: tuple[Part, ...] = ()


class CancelCall(Message, tag=3):
    """Nobody waits for Call `id` any more: a function that asks `zmqdist.cancelled()` may end early, and no more chunks are sent."""

    SENT = "client -> server"
    id: int


class Ping(Message, tag=4):
    """Nothing: sent to find out whether the peer is still there. Never answered."""

    SENT = "any -> any"


class Goodbye(Message, tag=5):
    """I am leaving in good order: do not wait for me."""

    SENT = "any -> any"
    reason: str = ""


class Refused(Message, tag=6):
    """What you sent is not allowed; nothing was changed. `final`: nor will it be, whatever its code."""

    SENT = "server -> any"
    code: int
    message: str
    final: bool = False


class Calls(Message, tag=10):
    """Several Calls without payload frames, which were asked while an earlier one was in flight. Each has its own answer."""

    SENT = "client -> server"
    items: Annotated[list[Call], msgspec.Meta(max_length=BATCH_ITEMS_MAX)]


class Replies(Message, tag=11):
    """Several Replies without payload frames, to whichever Calls."""

    SENT = "server -> client"
    items: list[Reply]


class Chunk(Message, tag=12):
    """The bytes of part `part` of Call `id`, or of the answer to it, from `offset` on: one frame. In order, each byte once."""

    SENT = "client -> server, server -> client"
    id: int
    part: int
    offset: int


class Credit(Message, tag=13):
    """So many bytes of chunks, of whichever call, have been taken out of the queue: as many may follow."""

    SENT = "client -> server, server -> client"
    nbytes: int


class Shares(Message, tag=14):
    """I have opened the shared memory that your hello offers, and read this number in it: lend me yours."""

    SENT = "client -> server"
    nonce: int


class LetIn(Message, tag=15):
    """There is room for the chunks of Call `id`, which was `held`: send them."""

    SENT = "server -> client"
    id: int


# -- coordinator and dispatcher -------------------------------------------------------------------------------------


class Enlist(Message, tag=20):
    """I am a coordinator. Repeated on each new connection, with the same id.

    `former` says that work of the current generation was given to an earlier life of the dispatcher; `watch` asks for Members,
    `starts` for Begun.
    """

    SENT = "coordinator -> dispatcher"
    coordinator: int
    queue_max: int
    generation: int
    former: bool
    watch: bool = False
    starts: bool = False


class Enlisted(Message, tag=21):
    """The dispatcher has a place for you and has dropped what an earlier connection of yours had submitted: submit again."""

    SENT = "dispatcher -> coordinator"
    attempts_max: int
    workers: int


class Define(Message, tag=22):
    """Pickled functions, by the coordinator's own numbers; sent before the first work that uses them."""

    SENT = "coordinator -> dispatcher"
    functions: list[tuple[int, bytes]]


class Forget(Message, tag=23):
    """These functions are used by no unfinished work and will not be used again under these numbers.

    `everywhere`: all workers tell all their slots, whether or not they are known to have them, ALL_NUMBERS included. What stands under
    a number there may be something that a function has made.
    """

    SENT = "coordinator -> dispatcher, dispatcher -> worker"
    coordinator: int
    functions: list[int]
    everywhere: bool = False


class Submit(Message, tag=24):
    """Work to be queued, oldest first.

    `worker`: only that one runs it, "worker:1", and it waits until that one is there; empty for any. A higher `priority` is handed out
    first, of what waits for the same. `apart` work is of no generation and does not count in the queue: EndGeneration leaves it alone.
    """

    SENT = "coordinator -> dispatcher"
    generation: int
    items: list[Item]
    worker: str = ""
    priority: int = 0
    apart: bool = False


class Withdraw(Message, tag=25):
    """Take these back: drop what waits, cut off after `grace_s` what runs. Each ends with a Result (CANCELLED at the latest).

    `unbegun`, from a coordinator that asked for Begun: what has begun goes on. Each is answered by CANCELLED, by Begun or by its Result.
    """

    SENT = "coordinator -> dispatcher"
    works: list[int]
    grace_s: float
    unbegun: bool = False


class EndGeneration(Message, tag=26):
    """Withdraw all work up to this generation; answered by GenerationEnded when none of it can be executing."""

    SENT = "coordinator -> dispatcher"
    generation: int
    grace_s: float


class Taken(Message, tag=27):
    """The bulk results of these (work, attempt) are here: the work is finished, tell its worker to let go.

    With `keep` its worker is to go on holding them, until they are named again without.
    """

    SENT = "coordinator -> dispatcher"
    items: list[tuple[int, int]]
    keep: bool = False


class Results(Message, tag=28):
    """Work that has ended."""

    SENT = "dispatcher -> coordinator"
    items: list[Result]


class StartsLost(Message, tag=29):
    """Starts that ended with the death of their process: (work, attempt, worker, exit code, last log lines, final).

    `final`: the bound on lost starts is reached, the work will not run again. Else it waits for its next start.
    """

    SENT = "dispatcher -> coordinator"
    items: list[tuple[int, int, str, int | None, str, bool]]


class GenerationEnded(Message, tag=30):
    """Nothing of this or an earlier generation can be executing any more."""

    SENT = "dispatcher -> coordinator"
    generation: int


class Progress(Message, tag=31):
    """So many pieces of work of yours have left the queue since you enlisted; sent when the queue was full."""

    SENT = "dispatcher -> coordinator"
    left_queue: int


class Workers(Message, tag=32):
    """How many workers there are; sent when it changes between none and some."""

    SENT = "dispatcher -> coordinator"
    count: int


class Members(Message, tag=33):
    """Which workers have come and which are lost; to those that watch, after Enlisted (all that are there) and at each change.

    `joined`: (name, incarnation, pid, host); `left`: (name, incarnation, reason). Another incarnation is another process.
    """

    SENT = "dispatcher -> coordinator"
    joined: list[tuple[str, int, int, str]]
    left: list[tuple[str, int, str]]


class Begun(Message, tag=34):
    """A worker has begun these, as far as is known. To those that asked for it; work that ended quickly may never be in one."""

    SENT = "dispatcher -> coordinator"
    works: list[int]


# -- dispatcher and worker ------------------------------------------------------------------------------------------


class Register(Message, tag=40):
    """I am a worker. Repeated on each new connection; `held` are the leases of this dispatcher that it still has.

    `index` -1 asks for the lowest free one; `index_given`: a dispatcher gave it, so it is not this worker's own. `leftover` are
    functions of an earlier dispatcher that run in threads and so could not be stopped: (lease, coordinator); each is Returned when
    it ends. `address` is where others find its own server. `serial` counts the registrations of this connection.
    """

    SENT = "worker -> dispatcher"
    incarnation: int
    job: str
    index: int
    slots: int
    held: list[int]
    leftover: list[tuple[int, int]]
    pid: int
    host: str
    address: str = ""
    tags: tuple[str, ...] = ()
    index_given: bool = False
    serial: int = 0

    @property
    def named(self) -> bool:
        """Whether the index is the worker's own, so that another life of it comes under the same one."""
        return self.index >= 0 and not self.index_given


class Registered(Message, tag=41):
    """Welcome: your index, how often to say something, and when you are taken for lost. `serial` is that of the registration."""

    SENT = "dispatcher -> worker"
    index: int
    beat_s: float
    lease_s: float
    grace_s: float
    serial: int = 0


class Beat(Message, tag=42):
    """I am alive. Any other message says the same."""

    SENT = "worker -> dispatcher, dispatcher -> worker"


class Assign(Message, tag=43):
    """Work to be run, oldest first, and the functions that this worker has not seen: (coordinator, fn, pickled).

    `careful` work was with a worker that died, and nobody knows whether it had begun: report each start before it happens.
    `workers` is how many there are. `first`: it was scheduled for this worker, and goes before what waits there for any.
    """

    SENT = "dispatcher -> worker"
    functions: list[tuple[int, int, bytes]]
    items: list[Leased]
    careful: bool = False
    workers: int = 0
    first: bool = False


class Recall(Message, tag=44):
    """Give back what has not been started of these leases: somebody else is idle."""

    SENT = "dispatcher -> worker"
    leases: list[int]


class CutOff(Message, tag=45):
    """End these leases: give back what has not been started, cut off what runs after `grace_s`."""

    SENT = "dispatcher -> worker"
    leases: list[int]
    grace_s: float


class Release(Message, tag=46):
    """The bulk results of these leases were taken, or are no longer wanted."""

    SENT = "dispatcher -> worker"
    leases: list[int]


class Leave(Message, tag=47):
    """End yourself in good order: give back what has not been started, finish what runs (at most `grace_s`), say Goodbye.

    From a worker: I am doing so, send nothing more.
    """

    SENT = "dispatcher -> worker, worker -> dispatcher"
    grace_s: float


class Done(Message, tag=48):
    """Leases that have ended, and leases that have begun since the last message.

    busy_us: so long the worker has had work since its last message. trip_us: the round trip between the two; 0 while it is not known.
    """

    SENT = "worker -> dispatcher"
    outcomes: list[Outcome]
    started: list[int]
    busy_us: int = 0
    trip_us: int = 0


class Returned(Message, tag=49):
    """Leases that were not started here and will not be."""

    SENT = "worker -> dispatcher"
    leases: list[int]


class SlotsLost(Message, tag=50):
    """Slot processes that died with a started lease: (lease, exit code, last log lines)."""

    SENT = "worker -> dispatcher"
    items: list[tuple[int, int | None, str]]


# -- payloads that cannot be fetched from their holder --------------------------------------------------------------


class Read(Message, tag=60):
    """Send me a piece of a payload that you hold: somebody wants it who cannot reach you."""

    SENT = "dispatcher -> coordinator, dispatcher -> worker"
    ask: int
    bulk: int
    offset: int
    length: int


class ReadDone(Message, tag=61):
    """The answer to Read `ask`: code 0 and one payload frame, or an error's code and message."""

    SENT = "coordinator -> dispatcher, worker -> dispatcher"
    ask: int
    code: int
    message: str


ALL: tuple[type[Message], ...] = tuple(
    sorted(Message.__subclasses__(), key=lambda cls: cls.__struct_config__.tag)  # type: ignore[arg-type,return-value]
)
"""Every message class, by tag."""
