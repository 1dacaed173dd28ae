"""The tasks of one worker: what the dispatcher wants done, and who is answered from it.

Rules
    All but the tasks themselves runs in the worker's loop. One question, "work", is always with the dispatcher; its answer says which
    tasks to begin and which to drop. A task's pipeline is made when somebody reads it first.
    A dispatcher that has lost its state (another state number) has none of our tasks: they are dropped.

Methods (after "zmqdist.data.")
    elements(state, task, wanted, compression)   -> (kind, batch, its tag); kinds are below
    profile()                                    -> {task: its figures}
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from zmqdist.core.splits.records import DYNAMIC, Terms
from zmqdist.data.dataset import Dataset
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.sharding import shard_for_worker
from zmqdist.data.splits import open_split, portion_pipeline
from zmqdist.data.tree import deserialize
from zmqdist.data_service import local
from zmqdist.data_service.dealing import Dealer, insist
from zmqdist.data_service.elements import pack
from zmqdist.data_service.policy import ShardingPolicy
from zmqdist.data_service.runners import rounds, shared
from zmqdist.data_service.runners.base import Packed, Reply, Runner, Wanted
from zmqdist.data_service.runners.fcfs import FirstCome
from zmqdist.data_service.runners.portions import Portions
from zmqdist.data_service.squeezing import codec_for, squeeze
from zmqdist.errors import CancelledError, FailedPreconditionError, OpError, UnavailableError
from zmqdist.limits import TRAINER_CACHE_BYTES
from zmqdist.net.credentials import Credentials
from zmqdist.net.loop import Loop
from zmqdist.rpc import asking
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.looped import LoopCalls
from zmqdist.rpc.service import Asked, RpcService
from zmqdist.wire.hello import host_identity

log = logging.getLogger("zmqdist.data")

PROFILE: Final = "zmqdist.data.profile"

ELEMENTS: Final = "zmqdist.data.elements"

SOME, END, SKIP = 0, 1, 2
"""Answer kinds: packed elements and their tag; nothing more; nothing now."""

AGAIN_S: Final = 0.05
"""After a refused question for work."""

REPORT_S: Final = 5.0
"""How often a worker that has tasks tells how they do."""

FLUSH_S: Final = 0.1
"""What was answered last has so long to leave before a worker goes."""

READERS: Final = frozenset({"submit", "worker"})


class Task:
    """One task as the dispatcher defined it."""

    def __init__(self, told: tuple[Any, ...]) -> None:
        self.id, self.iteration, self.dataset, self.fingerprint, terms, self.sources, self.starting_round, *place = told
        self.num_workers, self.index = place
        self.terms = Terms(*terms)
        self.runner: Runner | None = None
        self.pipeline: Dataset | None = None
        """What is run over each portion."""
        self.done = False
        self.deleted = False


class DataWorker:
    """See the module's docstring. Hosted by a WorkerServer."""

    def __init__(
        self,
        loop: Loop,
        service: RpcService,
        calls: LoopCalls,
        dispatcher: str,
        credentials: Credentials,
        life: int,
        dispatcher_timeout_s: float,
    ) -> None:
        """Before the service is attached."""
        self._loop = loop
        self._service = service
        self._calls = calls
        self._dispatcher = dispatcher
        self._credentials = credentials
        self._life = life
        self._timeout_s = dispatcher_timeout_s
        self.address = ""
        self.cache_bytes = TRAINER_CACHE_BYTES
        self._state = 0
        self._tasks: dict[int, Task] = {}
        self._asking = 0
        self._client: ZmqClient | None = None
        self._dealers: dict[int, Dealer] = {}
        self._drained: Callable[[], None] | None = None
        """The worker leaves: to be called when nothing is left to do."""
        self._left = False
        service.register_later(ELEMENTS, self._elements, roles=READERS)
        service.register_later(PROFILE, self._profile, roles=READERS)
        loop.on_stop(self.close)

    @property
    def left(self) -> bool:
        """Whether it was drained, and all answers are on their way."""
        return self._left

    @property
    def num_tasks(self) -> int:
        """Tasks that the dispatcher wants from this worker and that have not ended."""
        return sum(not (task.done or task.deleted) for task in self._tasks.values())

    # -- the dispatcher's wishes ------------------------------------------------------------------------------------------------

    def registered(self) -> None:
        """The dispatcher has taken this worker: now, or again."""
        local.add(self._life, self)
        self._ask()
        if self._drained is not None:
            self._say_leaving()

    def _ask(self) -> None:
        self._asking += 1
        has = dict.fromkeys(self._tasks, self.address)
        done = tuple(number for number, task in self._tasks.items() if task.done)
        question = (self._state, self._life, has, done, self._figures())
        self._calls.ask("zmqdist.data.work", question, partial(self._told, self._asking))
        at_work = any(task.runner is not None and not task.done for task in self._tasks.values())
        self._loop.set_timer((self, "report"), self._loop.now() + REPORT_S if at_work else None, self._ask_again)

    def _figures(self) -> dict[int, tuple[Any, ...]]:
        """What the tasks at work tell of themselves."""
        found = {}
        for number, task in self._tasks.items():
            figures = getattr(task.runner, "figures", None)
            if figures is not None and not task.done:
                found[number] = figures()
        return found

    def _told(self, asking: int, value: Any, error: OpError | None) -> None:
        if asking != self._asking:
            return  # there is a later question
        if error is not None:
            self._loop.set_timer(self, self._loop.now() + AGAIN_S, self._ask_again)
            return
        if value is None:  # one of an earlier connection came behind it
            self._ask()
            return
        state, new, drop = value
        for number in drop:
            self._drop(number)
        self._state = state
        for told in new:
            task = Task(told)
            self._tasks[task.id] = task
        self._ask()
        self._end_if_drained()

    def _ask_again(self) -> None:
        """Only while there is a connection: else `registered` comes."""
        if self._calls.connected:
            self._ask()

    def _drop(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        dealer = self._dealers.pop(number, None)
        if dealer is not None:
            dealer.close()
        if task is not None and task.runner is not None:
            task.runner.close()

    # -- leaving ----------------------------------------------------------------------------------------------------------------

    def drain(self, then: Callable[[], None]) -> None:
        """Take no more positions, hand back what was not begun, have readers take the rest, and call `then`. In the loop.

        A task that has the whole dataset for itself goes on to its end. Whoever has not the time for it just closes.
        """
        self._drained = then
        self._say_leaving()
        for task in self._tasks.values():
            dealer = self._dealers.get(task.id)
            if task.terms.mode == DYNAMIC and not task.done:
                if (
                    dealer is None or task.terms.portioned
                ):  # nobody reads it, or others compute what is not acknowledged
                    task.done = True
                else:
                    name = f"zmqdist-drain-{task.id}"
                    threading.Thread(target=self._hand_back, args=(dealer,), name=name, daemon=True).start()
        self._ask()
        self._end_if_drained()

    def _say_leaving(self) -> None:
        self._calls.ask("zmqdist.data.leave", (self._life,), lambda value, error: None)

    def _hand_back(self, dealer: Dealer) -> None:
        try:
            dealer.drain()
        except OpError as error:
            log.warning("%s leaves, and could not hand back what it has not begun: %s", self.address, error)

    def _end_if_drained(self) -> None:
        if self._drained is not None and not self.num_tasks:
            if self._tasks:
                self._loop.set_timer((self, "drained"), self._loop.now() + FLUSH_S, self._end_if_sent)
            else:
                self._end_if_sent()

    def _end_if_sent(self) -> None:
        assert self._drained is not None
        if self._service.unsent:
            self._loop.set_timer((self, "drained"), self._loop.now() + FLUSH_S, self._end_if_sent)
        else:
            self._left = True
            self._drained()

    def close(self) -> None:
        """In the loop, when it ends."""
        local.remove(self._life)
        for number in list(self._tasks):
            self._drop(number)
        if self._client is not None:
            self._client.close()

    # -- readers ----------------------------------------------------------------------------------------------------------------

    def _profile(self, asked: Asked) -> None:
        found = self._figures()
        if not found:
            raise UnavailableError(
                None, None, f"No trace event was collected: no task of worker {self.address} is at work"
            )
        names = ("elements", "bytes", "buffered", "room", "element_s")
        asked.answer(
            {
                number: {"dataset": self._tasks[number].dataset, **dict(zip(names, told, strict=True))}
                for number, told in found.items()
            }
        )

    def _elements(self, asked: Asked, state: int, number: int, wanted: tuple[Any, ...], compression: str) -> None:
        near = asked.peer.hello is not None and asked.peer.hello.host == host_identity()
        reply = RemoteReply(asked, self._loop, codec_for(compression, near=near))
        self._answer(state, number, Wanted(*wanted), reply)

    def ask(self, state: int, number: int, wanted: Wanted, reply: Reply) -> None:
        """A question of a reader in this process; from any thread."""
        try:
            self._loop.call_soon(self._answer, state, number, wanted, reply)
        except OpError as error:
            reply.fail(
                CancelledError(None, None, f"Local worker {self.address} is no longer available: {error.message}")
            )

    def delete(self, number: int) -> None:
        """A reader in this process was the only one whom this task was for; from any thread."""
        try:
            self._loop.call_soon(self._delete, number)
        except OpError:
            pass  # the worker has ended

    def _delete(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.deleted = True
            if task.runner is not None:
                task.runner.close()

    def _answer(self, state: int, number: int, wanted: Wanted, reply: Reply) -> None:
        task = self._tasks.get(number)
        if task is not None and task.deleted:
            text = f"Got a request for local task {number}, which has been deleted."
            reply.fail(FailedPreconditionError(None, None, text))
            return
        if task is None or state != self._state:
            reply.fail(UnavailableError(None, None, f"worker {self.address} does not have task {number}"))
            return
        if task.runner is None:
            task.runner = self._run(task)
            self._loop.set_timer((self, "report"), self._loop.now() + REPORT_S, self._ask_again)
        task.runner.ask(wanted, reply)
        if wanted.wait_s is not None and not reply.answered:
            runner = task.runner
            self._loop.set_timer(id(reply), self._loop.now() + wanted.wait_s, lambda: runner.expire(reply))

    def _run(self, task: Task) -> Runner:
        if self._client is None:
            security = self._credentials.client(self._dispatcher, "worker")
            self._client = ZmqClient(self._dispatcher, f"data of {self.address}", security=security)
        dealer = self._dealers[task.id] = Dealer(self._client, self._state, task.id, self._life, self._timeout_s)
        if task.terms.portioned:
            return Portions(str(task.id), partial(self._open_portion, task, dealer), dealer.portions)
        opened = partial(self._open, task, dealer)
        if task.terms.coordinated:
            return rounds.Rounds(str(task.id), opened, task.terms.num_consumers)
        if task.terms.cache:
            return shared.Shared(str(task.id), opened, self.cache_bytes)
        return FirstCome(str(task.id), opened, partial(self._finished, task))

    def _definition(self, task: Task, dealer: Dealer) -> Dataset:
        """In a thread of the task."""
        client = self._client
        assert client is not None

        def question() -> Any:
            return asking.start(client, "zmqdist.data.definition", task.fingerprint).get_value()

        return deserialize(insist(question, self._timeout_s, dealer.stopped, f"task {task.id}"))

    def _open_portion(self, task: Task, dealer: Dealer, start: int, length: int) -> DatasetIterator:
        """In a thread of the task."""
        if task.pipeline is None:
            task.pipeline = portion_pipeline(self._definition(task, dealer))
        positions = iter(range(start, start + length))
        return open_split(task.pipeline, lambda source, repetition: next(positions, None))

    def _open(self, task: Task, dealer: Dealer) -> DatasetIterator:
        """In the task's thread."""
        dataset = self._definition(task, dealer)
        if task.terms.coordinated:
            rounds.require_infinite(dataset.cardinality())
        if task.terms.cache:
            shared.require_infinite(dataset.cardinality())
        if task.terms.mode == DYNAMIC:
            return open_split(dataset, dealer.ask)
        policy = ShardingPolicy(task.terms.mode).name
        # Seeds that nobody gave are the same for all workers of an iteration: else their shares would not be parts of one order.
        return iter(shard_for_worker(dataset, policy, task.num_workers, task.index, seed=task.iteration))

    def _finished(self, task: Task) -> None:
        try:
            self._loop.call_soon(self._note_finished, task)
        except OpError:
            pass  # the worker has ended

    def _note_finished(self, task: Task) -> None:
        if task.deleted:
            return  # who asks for it is told so; the dispatcher collects what nobody reads
        task.done = True
        if task.id in self._tasks:
            self._ask()
        self._end_if_drained()


class RemoteReply:
    """An answer that goes out by RPC."""

    def __init__(self, asked: Asked, loop: Loop, codec: str) -> None:
        self._asked = asked
        self._loop = loop
        self._codec = codec
        self.answered = False

    def wanted(self) -> bool:
        return self._asked.wanted()

    def soon(self, fn: Callable[[], None]) -> None:
        try:
            self._loop.call_soon(fn)
        except OpError:
            pass  # the worker has ended: so has the connection

    def elements(self, elements: list[Any], tag: Any = None) -> None:
        self._answer(lambda: squeeze(pack(elements), self._codec), tag)

    def packed(self, batch: Packed) -> None:
        self._answer(lambda: batch.form(self._codec), None)

    def _answer(self, batch: Callable[[], Any], tag: Any) -> None:
        self.answered = True
        try:
            value = (SOME, batch(), tag)
        except BaseException as error:
            self._asked.fail(error)
        else:
            self._asked.answer(value)

    def end(self) -> None:
        self.answered = True
        self._asked.answer((END, None, None))

    def skip(self, tag: Any = None) -> None:
        self.answered = True
        self._asked.answer((SKIP, None, tag))

    def fail(self, error: BaseException) -> None:
        self.answered = True
        self._asked.fail(error)
