"""The runtime of an iterator over a distributed dataset. It sends requests to the dispatcher and
the workers, and passes elements to the consumer.

Theory
    A delivery machine (the other files of data/service/reader/) decides which task gets the next
    request, what a reply means, and when an element counts as delivered: `PlainDelivery` for plain
    reading, `CoordinatedDelivery` for coordinated reads, `ExactlyOnceDelivery` for portions. The
    runtime carries out the decisions of its machine, and is the same for all three machines.

    The dispatcher lists the tasks. The reader always has one `watch` request pending, to which the
    dispatcher replies when the list changes. Elements from all tasks go into one queue, so that a
    slow or silent worker need not delay the elements of other workers. The consumer takes items out
    of the queue. Each item that it takes makes room for another request.

    The consumer's thread runs only the methods under the heading "the consumer". Everything else
    runs in the reader's own loop thread. The two threads share the queue, which the condition
    `_ready` guards.

End and errors
    When the reading ends, the consumer first gets the items in the queue, and then the end or the
    error that ended the reading. If the dispatcher does not reply, the reader continues with the
    tasks that it knows.

    The reader stores an error and raises a copy of it. The traceback of a raised error refers to
    the consumer's iterator. If the reader stored the raised error itself, it would keep this
    iterator alive, and the deletion of the iterator is what closes the reader.

Not here: the iterator that the consumer uses (source.py), the access to one task (task_clients.py).
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from math import inf
from typing import Any, Final

import msgspec

from zmqdist import clock as time
from zmqdist import platforms
from zmqdist.conditions import Condition
from zmqdist.data.interfaces import Memory
from zmqdist.data.iterators import CloseInterrupts
from zmqdist.data.ops.background import FORKED
from zmqdist.data.service import local_workers
from zmqdist.data.service.elements import check_spec
from zmqdist.data.service.policy import (
    LOCAL_PROTOCOL,
    PROTOCOLS,
    STATIC,
    ShardingPolicy,
    check_local,
    check_shared,
    reads_from,
    target_of,
)
from zmqdist.data.service.reader import delivery
from zmqdist.data.service.reader.coordinated_machine import CoordinatedDelivery
from zmqdist.data.service.reader.delivery import (
    Delivery,
    DispatcherReplied,
    Event,
    News,
    NotifyDispatcher,
    TaskLocation,
    TaskReplied,
)
from zmqdist.data.service.reader.exactly_once_machine import (
    ACKNOWLEDGE,
    Consumed,
    Consumption,
    ExactlyOnceDelivery,
    PortionPiece,
)
from zmqdist.data.service.reader.plain_machine import PlainDelivery
from zmqdist.data.service.reader.task_clients import LocalTask, RemoteTask, open_batch
from zmqdist.data.service.reader.window_machine import TaskWindow
from zmqdist.data.service.retry import RETRIABLE, next_pause_s
from zmqdist.data.service.split_requests import call_until_answered
from zmqdist.data.structure import invalid
from zmqdist.errors import (
    ABORTED,
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    OpError,
    UnavailableError,
    from_code,
)
from zmqdist.events import Ticked
from zmqdist.limits import WAIT_LOG_S
from zmqdist.random import chance
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import StatusOrResult, ZmqClient, channel_of, outcome_of
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import split_key
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.data")

ELEMENT_S_SAMPLES: Final = 16
"""The measured time that the consumer takes for an element is a running mean over about this many
batches."""

WATCH: Final = "zmqdist.data.watch"
RELEASE: Final = "zmqdist.data.release"
RELEASE_S: Final = 1.0
"""Seconds that a closing reader waits until the dispatcher confirms the release. If the release
does not arrive, the dispatcher releases the reader after `client_timeout_s`."""

CLIENTS_KEPT: Final = 4
"""Connections to dispatchers that are kept for the next passes over datasets."""

STATE_VERSION: Final = 1

CONSUMER_BEGAN, TICKED, BATCH_TAKEN = delivery.ConsumerBegan(), Ticked(), delivery.BatchTaken()
CONSUMER_STARVED, CONSUMER_BUSY = delivery.ConsumerStarved(), delivery.ConsumerBusy()


class SavedReader(msgspec.Struct, frozen=True):
    """The state of a reader of portions, from which another reader continues.

    Attributes:
      dispatcher: the random number of the dispatcher's durable state.
      cut: (positions, repetitions, length of a portion) of the iteration.
      done, open: the elements that the consumer has received, in the form of `Consumed`.
    """

    version: int
    dispatcher: int
    iteration: int
    client: int
    cut: tuple[int, ...]
    lanes: int
    done: tuple[tuple[int, int], ...]
    open: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, state: dict[str, Any]) -> SavedReader:
        """Parse a state. Raises InvalidArgumentError when `state` is not the state of a reader, or
        has another version."""
        try:
            saved = msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            raise invalid(f"not the state of a reader in portions: {error}") from error
        if saved.version != STATE_VERSION:
            raise invalid(
                f"the state of the reader has version {saved.version}, but this zmqdist reads "
                f"version {STATE_VERSION}"
            )
        return saved

    def state(self) -> dict[str, Any]:
        """Return the state as a dict of JSON types."""
        return msgspec.json.decode(msgspec.json.encode(self), type=dict[str, Any])

    def as_args(self) -> tuple[Any, ...]:
        """Return the fields that the request `open` to the dispatcher needs, in the order of
        `events.SavedRequest`."""
        return msgspec.structs.astuple(self)[1:]


class ReadRequest(msgspec.Struct, frozen=True):
    """What a reader reads.

    Attributes:
      op: the operator `Distributed` (source.py), which says which data are read, and how.
      repetition: the number of the pass.
      saved: the state from which a reader of portions continues.
      reader, again: those of `events.OpenRequest`.
    """

    op: Any
    repetition: int
    saved: SavedReader | None = None
    reader: int = 0
    again: bool = False

    @property
    def consumed(self) -> Consumed:
        """The elements that the consumer had received when the state was saved."""
        return Consumed() if self.saved is None else Consumed(self.saved.done, self.saved.open)


class TaskLink(msgspec.Struct, eq=False):
    """The connection to one task, in one incarnation of its worker."""

    location: str
    client: LocalTask | RemoteTask
    replies: deque[list[Any]] = msgspec.field(default_factory=deque)
    """A list for each request in flight, in the order of the requests. A list is empty until the
    reply to its request has arrived. The lists are needed because replies may arrive out of order
    from two threads, but the machine needs the replies of one task in order."""


class ServiceReader:
    """Reads one iteration of a distributed dataset for one consumer. The docstring of the module
    says how."""

    def __init__(
        self,
        request: ReadRequest,
        credentials: Credentials,
        interrupts: CloseInterrupts,
        memory: Memory,
    ) -> None:
        """Open the iteration. Blocks until the dispatcher has replied, or until another thread
        closes `interrupts`.

        Args:
          memory: that of the dataset. This reader takes over the connection to the dispatcher of
            the dataset's last reader, if there is one, and leaves its own.

        Raises:
          OpError: the dispatcher refused, or `interrupts` were closed (CancelledError).
        """
        op, terms = request.op, request.op.terms
        if terms.cache:
            check_shared(op.job_name, request.repetition, terms.num_consumers)
        self._request = request
        self._op = op
        self._terms = terms
        self._credentials = credentials
        self._stop_event = threading.Event()
        self._open_cancelled = threading.Event()
        """When this event is set, the thread that opens the iteration stops waiting for the
        dispatcher."""
        self._ready = Condition()
        self._queue: deque[Any] = deque()
        self._over = False
        self._error: OpError | None = None
        self._elements_in_use: list[Any] = []
        """The list of elements over which the consumer iterates now."""
        self._links: dict[tuple[int, int], TaskLink] = {}
        """Maps (task, incarnation of its worker) to a link. Older links are kept because a task may
        return to an incarnation whose replies are still in flight."""
        self._clients: dict[tuple[str, bytes], ZmqClient] = {}
        self._target = ""
        self._element_s = 0.0
        """Seconds that the consumer takes for an element. The dispatcher estimates from this time
        how many workers would be enough."""
        self._tick_at = inf
        self._finished = False
        self._version = 0
        self._watch_number = 0
        self._watch_pause_s = 0.0
        self._dispatcher_error = ""
        """The error of the last request to the dispatcher, for the log. It is empty if the request
        succeeded."""
        self._memory = memory
        self._dispatcher = _kept.take(memory) or self._connect(op.service)
        self._opened = (0, 0)
        """(random number of the dispatcher's durable state, number of this client); zeros until the
        iteration is open."""
        self._lanes = max(1, terms.num_consumers)
        self._consumption = Consumption(self._ready, self._lanes, request.consumed)
        saved = None if request.saved is None else request.saved.as_args()
        args = (
            secrets.randbits(62),
            op.job_name,
            request.repetition,
            msgspec.structs.astuple(terms),
            op.consumer_index,
            saved,
            request.reader,
            request.again,
        )
        self._loop = Loop("zmqdist-reader")
        try:
            self._loop.start()
            _readers.add(self)
            with interrupts.interruptible(self._cancel_open):
                self._target = target_of(terms, self._deployment_mode())
                client, self.iteration, state, self._cut = call_until_answered(
                    self._dispatcher,
                    "open",
                    *args,
                    purpose=f"reading from {op.service}",
                    stop_event=self._open_cancelled,
                )
                self._opened = (state, client)
                if self._target == "LOCAL":
                    check_local(terms, op.service, state)
            if self._open_cancelled.is_set():  # after the reply, and has closed the connection
                raise CancelledError(f"reading from {op.service} was stopped")
            self._delivery = self._delivery_for(client)
            self._run_in_loop(self._watch)
        except BaseException:
            self.close()
            raise

    def _delivery_for(self, client: int) -> Delivery:
        op, terms = self._op, self._terms
        if terms.portioned:
            window = TaskWindow(client, op.trainer, op.max_outstanding)
            first, ordered = self._cut[3], terms.ordered
            return ExactlyOnceDelivery(
                window, self._consumption, self._lanes, first, ordered, self._request.consumed
            )
        if terms.coordinated:
            return CoordinatedDelivery(
                client, op.consumer_index, op.max_outstanding, self._elements_of
            )
        return PlainDelivery(client, op.trainer, op.max_outstanding)

    def _deployment_mode(self) -> str:
        """Ask the dispatcher for its deployment mode. Return "" without asking if the mode has no
        influence on `target_of`."""
        if self._terms.target_workers != "AUTO" or ShardingPolicy(self._terms.mode) not in STATIC:
            return ""
        config = call_until_answered(
            self._dispatcher,
            "config",
            purpose=f"asking {self._op.service}",
            stop_event=self._open_cancelled,
        )
        return str(config["deployment_mode"])

    # -- the consumer ------------------------------------------------------------------------------

    def batches(self) -> Iterator[list[Any]]:
        """Yield lists of elements in the order in which the machine delivers them. Blocks until the
        next list is available.

        An error in place of an element is raised. Call `batches` again to continue after such an
        error.

        Raises:
          OpError: the error of an element, or the error that ended the reading.
        """
        coordinated = self._terms.coordinated
        self._post(CONSUMER_BEGAN)
        while (value := self._take()) is not None:
            self._post(BATCH_TAKEN)
            if isinstance(value, OpError):
                raise copy(value)
            elements = self._elements_in_use = value if coordinated else self._elements_of(value)
            yielded_at = time.monotonic()
            yield elements
            took_s = (time.monotonic() - yielded_at) / max(1, len(elements))
            self._element_s += (
                (took_s - self._element_s) / ELEMENT_S_SAMPLES if self._element_s else took_s
            )

    def pieces(self) -> Iterator[Iterator[Any]]:
        """Yield an iterator for each piece of a portion, in the order in which the machine delivers
        the pieces. The consumer has to exhaust each iterator before it takes the next iterator.
        Raises as `batches` does.
        """
        consumption = self._consumption
        self._post(CONSUMER_BEGAN)
        while True:
            consumption.finish()
            if not self._queue:
                consumption.waits = True
                self._post(CONSUMER_STARVED)
            piece: PortionPiece | None = self._take()
            consumption.waits = False
            if piece is None:
                return
            elements: Any = []
            if piece.error is None:
                elements = self._piece_elements(piece)
            iterator, self._elements_in_use = iter(elements), elements
            consumption.take(piece, iterator, len(elements))
            if piece.last:
                self._post(BATCH_TAKEN)
            if not consumption.due:
                consumption.due = True
                self._post(CONSUMER_BUSY)
            if piece.error is not None:
                consumption.finish()
                raise copy(piece.error)
            yield iterator

    def _piece_elements(self, piece: PortionPiece) -> Any:
        batch = piece.batch
        if batch.value is not None:
            try:
                batch.elements = self._elements_of(batch.value)
            except OpError as error:
                # End the reading, because this piece cannot be decoded, and no later reply will
                # contain it.
                self._end(copy(error))
                raise
            batch.value = None
        if (piece.start, piece.stop) == (0, len(batch.elements)):
            return batch.elements
        return batch.elements[piece.start : piece.stop]

    def _elements_of(self, value: tuple[Any, ...]) -> list[Any]:
        elements = open_batch(value)
        check_spec(elements, self._op.element_spec(()))
        return elements

    def _take(self) -> Any:
        """Wait for an item in the queue, and return it. Return None at the end, or raise the error
        that ended the reading."""
        with self._ready:
            waited_s = 0.0
            while not self._queue and not self._over:
                if not self._ready.wait(WAIT_LOG_S):
                    waited_s += WAIT_LOG_S
                    where = f"(dispatcher {self._op.service}{self._dispatcher_error})"
                    log.warning(
                        "a data reader has waited %.0f s for elements: %s %s",
                        waited_s,
                        self._delivery.describe_wait(),
                        where,
                    )
            if self._queue:
                return self._queue.popleft()
            if self._error is not None:
                raise copy(self._error)
            return None

    def state(self) -> dict[str, Any]:
        """Return the state of a reader of portions, as a dict of JSON types. Call this in the
        consumer's thread."""
        state, client = self._opened
        done_runs, open_ = map(tuple, self._consumption.saved())
        cut = self._cut[:3]
        return SavedReader(
            STATE_VERSION, state, self.iteration, client, cut, self._lanes, done_runs, open_
        ).state()

    def _cancel_open(self) -> None:
        """Have the thread that opens the iteration stop waiting for the dispatcher. Called when the
        iterator is closed meanwhile."""
        self._open_cancelled.set()
        if self._opened == (0, 0):
            self._dispatcher.close()

    def interrupt(self) -> None:
        """Drop the queue, and end the reading, so that a waiting consumer returns."""
        with self._ready:
            self._queue.clear()
            self._over = True
            self._ready.notify_all()

    def close(self) -> None:
        """Stop reading, acknowledge the elements that the consumer has received, and ask the
        dispatcher to release this client. Blocks for up to RELEASE_S. A second call does nothing.
        """
        with self._ready:  # if two threads close, one of them leaves the connection
            if self._stop_event.is_set() or sys.is_finalizing():
                return
            self._stop_event.set()
        self._loop.stop()
        self._end(None)
        # a program that keeps the reader does not keep memory of its workers
        self._elements_in_use = []
        if self._target == "LOCAL":
            for link in self._links.values():
                if isinstance(link.client, LocalTask):
                    link.client.delete()
        # A link refers to this reader. The cycle would keep the memory of the dataset, and with it
        # a connection, until the garbage collector runs.
        self._links.clear()
        if self._opened != (0, 0):
            try:
                self._consumption.finish()
                marks = self._consumption.marks()
                if marks:
                    internal_client.start(
                        self._dispatcher, ACKNOWLEDGE, *self._opened, marks, waits_for_server=False
                    )
                due = time.monotonic() + RELEASE_S
                internal_client.start(
                    self._dispatcher, RELEASE, *self._opened, due=due, waits_for_server=False
                ).is_ok()
            except OpError:
                pass
        for client in self._clients.values():
            client.close()
        if channel_of(self._dispatcher).cancel_all():
            _kept.keep(self._memory, self._dispatcher)
        else:
            self._dispatcher.close()

    def forked(self) -> None:
        """Make this reader unusable in the child of a fork, because the loop thread does not exist
        in the child, and the queue and the client belong to the parent.
        """
        # Create new objects, because a thread of the parent may have held the locks of the old
        # objects at the fork.
        self._stop_event, self._ready = threading.Event(), Condition()
        self._stop_event.set()
        self._elements_in_use.clear()
        self._queue.clear()
        self._consumption.forget()
        self._over, self._error = True, FailedPreconditionError(FORKED)

    def _connect(self, address: str, key: bytes = b"") -> ZmqClient:
        """Return a new client of `address`. `key` is the public key that a worker published with
        its address; empty for the dispatcher."""
        security = self._credentials.client(address, "submit", key)
        return ZmqClient(address, "data reader", security=security)

    # -- in the loop: the machine ------------------------------------------------------------------

    def _run_in_loop(self, fn: Callable[..., object], *args: Any) -> bool:
        """Have the loop call `fn`. Return False if the reader is closed."""
        if self._stop_event.is_set():
            return False
        try:
            self._loop.call_soon(self._guarded, fn, *args)
        except FailedPreconditionError:
            return False
        return True

    def _guarded(self, fn: Callable[..., object], *args: Any) -> None:
        """Call `fn`. If it raises, end the reading with the error, because the consumer would wait
        for ever."""
        try:
            fn(*args)
        except Exception as error:
            self._end(from_code(*code_and_message(error)))
            raise

    def _post(self, event: Event) -> None:
        """Have the machine handle `event` in the loop thread. Call this in the consumer's
        thread.
        """
        self._run_in_loop(self._handle, event)

    def _handle(self, event: Event) -> None:
        for effect in self._delivery.handle(event, self._loop.now()):
            match effect:
                case delivery.RequestElements(source, demand):
                    if not self._over:
                        link = self._links[source.task, source.incarnation]
                        reply: list[Any] = []
                        link.replies.append(reply)
                        link.client.ask(
                            demand, partial(self._run_in_loop, self._replied, source, link, reply)
                        )
                case delivery.Deliver(items):
                    with self._ready:
                        self._queue.extend(items)
                        self._ready.notify_all()
                case NotifyDispatcher(method, payload):
                    then = partial(self._reported, effect)
                    self._start(self._dispatcher, then, method, *self._opened, payload)
                case delivery.RequestNews():
                    self._watch()
                case delivery.ReadingEnded(error):
                    self._end(error)
        deadline = self._delivery.deadline
        if deadline != self._tick_at:
            self._tick_at = deadline
            if deadline < inf:
                self._loop.set_timer("delivery", deadline, partial(self._guarded, self._tick))

    def _tick(self) -> None:
        self._tick_at = inf
        self._handle(TICKED)

    def _replied(
        self, source: Any, link: TaskLink, reply: list[Any], *kind_value_error: Any
    ) -> None:
        reply.append(kind_value_error)
        while link.replies and link.replies[0]:
            self._handle(TaskReplied(source, *link.replies.popleft()[0]))

    def _reported(self, report: NotifyDispatcher, call: StatusOrResult) -> None:
        code, message = call.get_error()
        self._dispatcher_error = f": {message}" if code else ""
        self._handle(DispatcherReplied(report, code, message))

    def _end(self, error: OpError | None) -> None:
        if (
            error is not None
            and self._terms.coordinated
            and self._opened != (0, 0)
            and not self._over
        ):
            # Leave the job, because the dispatcher waits for the watch requests of all consumers:
            # the remaining consumers would stall if it waited for this consumer, which cannot
            # continue.
            self._watch_number += 1
            self._start(self._dispatcher, lambda _: None, RELEASE, *self._opened)
        with self._ready:
            self._over = True
            self._error = self._error or error
            self._ready.notify_all()

    # -- in the loop: the dispatcher's news --------------------------------------------------------

    def _start(
        self, client: ZmqClient, then: Callable[[StatusOrResult], None], method: str, *args: Any
    ) -> None:
        """Send a request to a server. When it has replied or failed, call `then` in the loop thread
        with the finished RPC call."""
        try:
            call = internal_client.start(client, method, *args, waits_for_server=False)
        except OpError:
            return  # the client is closed, so this reader has ended and needs no reply
        call.add_done_callback(partial(self._run_in_loop, then))

    def _watch(self) -> None:
        self._watch_number += 1
        then = partial(self._watched, self._watch_number)
        watch_args = self._delivery.watch_args()
        self._start(
            self._dispatcher,
            then,
            WATCH,
            *self._opened,
            self._version,
            self._element_s,
            *watch_args,
        )

    def _watch_later(self, pause_s: float) -> None:
        self._loop.set_timer(self, self._loop.now() + pause_s, partial(self._guarded, self._watch))

    def _watched(self, number: int, call: StatusOrResult) -> None:
        if number != self._watch_number:
            return  # a later watch request has replaced this one
        news, error = outcome_of(call)
        code, message = (error.error_code, error.message) if error is not None else (0, "")
        # With ABORTED the dispatcher reports that another reader continues this reader's iteration,
        # so this reader ends.
        if code in RETRIABLE and code != ABORTED:
            self._watch_pause_s = next_pause_s(self._watch_pause_s)
            self._watch_later(self._watch_pause_s)
            self._dispatcher_error = f": {message}"
            return
        if code:
            self._end(from_code(code, message))
            return
        self._watch_pause_s, self._dispatcher_error = 0.0, ""
        if news is not None:
            self._version, tasks, self._finished, hold, end_rounds, failed = news
            if failed:
                self._end(UnavailableError(failed))
            try:
                locations, others_exist = self._locations(tasks)
                self._handle(News(locations, others_exist, self._finished, hold, end_rounds))
            except OpError as error:
                # for example, this reader is not allowed to connect to the worker
                self._end(error)
        if not self._finished:
            # With 0 send the next request at once: the dispatcher replies when the list changes.
            if self._op.refresh_ms:
                self._watch_later(self._op.refresh_ms / 1000)
            else:
                self._watch()

    def _locations(self, tasks: list[tuple[Any, ...]]) -> tuple[list[TaskLocation], bool]:
        """Return those of the listed tasks that this reader reads, and whether it leaves tasks to
        other readers. Connect to new workers."""
        chance.shuffle(tasks)
        locations = []
        coordinated = self._terms.coordinated
        for task, _worker, location, incarnation, tags, starting_round in tasks:
            if reads_from(self._target, coordinated, incarnation, tags):
                address = split_key(location)[0] if location else ""
                locations.append(TaskLocation(task, address, location, incarnation, starting_round))
                link = self._links.get((task, incarnation))
                if location and incarnation >= 0 and (link is None or link.location != location):
                    client = self._task_client(task, location, incarnation)
                    self._links[task, incarnation] = TaskLink(location, client)
        # Drop the links to earlier incarnations of a task's worker. Keep the links while the worker
        # is away (its incarnation is negative then) or the task is not listed, because
        # CoordinatedDelivery still sends requests to the incarnation that it knows.
        incarnations = {
            task_location.task: task_location.incarnation for task_location in locations
        }
        for key, link in [*self._links.items()]:
            if not link.replies and 0 <= incarnations.get(key[0], -1) != key[1]:
                del self._links[key]
        return locations, len(locations) < len(tasks)

    def _task_client(self, task: int, location: str, incarnation: int) -> LocalTask | RemoteTask:
        address, key = split_key(location)
        state = self._opened[0]
        protocol, shared = self._op.protocol, bool(self._op.trainer)
        # Several trainers get the elements of a shared task, so its elements are not passed by
        # reference.
        worker = (
            local_workers.find(incarnation)
            if protocol in ("", LOCAL_PROTOCOL) and not shared
            else None
        )
        if worker is not None:
            return LocalTask(worker, address, state, task, self._run_in_loop)
        if protocol and protocol not in PROTOCOLS and not (shared and protocol == LOCAL_PROTOCOL):
            why = (
                "the worker is not in this process"
                if protocol == LOCAL_PROTOCOL
                else f"the protocols are {', '.join(PROTOCOLS)}"
            )
            self._end(
                NotFoundError(
                    f"Protocol '{protocol}' is not available for worker '{address}': {why}"
                )
            )
        client = self._clients.get((address, key))
        if client is None:
            client = self._clients[address, key] = self._connect(address, key)
        return RemoteTask(client, state, task, self._op.compression, self._loop)


class _KeptClients:
    """Connections to dispatchers that no reader uses: at most one for each dataset, until the
    dataset is dropped, and CLIENTS_KEPT in all. Any thread may use this."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: weakref.WeakKeyDictionary[Memory, ZmqClient] = weakref.WeakKeyDictionary()

    def take(self, memory: Memory) -> ZmqClient | None:
        return self._clients.pop(memory, None)

    def keep(self, memory: Memory, client: ZmqClient) -> None:
        with self._lock:
            surplus = [self.take(memory)]
            self._clients[memory] = client
            if len(self._clients) > CLIENTS_KEPT:
                surplus.append(self.take(next(iter(self._clients))))
        for client in filter(None, surplus):
            client.close()


_readers: weakref.WeakSet[ServiceReader] = weakref.WeakSet()
_kept = _KeptClients()


def _forked() -> None:
    global _kept
    _kept = _KeptClients()  # the connections are the parent's
    for reader in list(_readers):
        reader.forked()


platforms.register_at_fork(after_in_child=_forked)
