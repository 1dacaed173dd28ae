"""Work with inputs, retries, a time-out or a lineage, between the user and the record of what is scheduled.

The runtime of dependencies_and_retries.py.

A plan is what the user scheduled; its attempts are what machine.py sees. All runs in the coordinator's loop but
what says otherwise.

Where an input comes from
    A result that is here goes along in the payload, as it is packed; a large one is held by the coordinator's store for whoever has it
    as an input. One that the user has already taken with `get` is packed again, as it is then: it may have been changed.
    A kept one goes along as its reference, so that it travels from worker to worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

from zmqdist import limits
from zmqdist.messages import ERROR, INPUT_LOST, KEPT, VALUE
from zmqdist.scheduling.coordinator import coordinator_events as closures
from zmqdist.scheduling.coordinator import dependencies_and_retries as graph
from zmqdist.scheduling.coordinator.coordinator_events import UNAVAILABLE
from zmqdist.scheduling.coordinator.dependencies_and_retries import FIRST_ATTEMPT, INPUT_FAILED, TIMED_OUT
from zmqdist.scheduling.coordinator.pins import PLAIN, WorkOptions
from zmqdist.scheduling.coordinator.values import Kept, RemoteValue
from zmqdist.scheduling.worker.kept import decode_loss
from zmqdist.scheduling.worker.references import INPUTS, KEEP, encode_inputs
from zmqdist.wire import trusted

if TYPE_CHECKING:
    from zmqdist.scheduling.coordinator.shell import Shell

Outcome: TypeAlias = "tuple[int, int, Any]"
"""(work, kind, payload), for `Shell.settle`."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What makes a plan of work that has no inputs. `until` is on the clock of time.monotonic."""

    retries: int = 0
    timeout: float | None = None
    until: float | None = None
    lineage: bool = False

    @classmethod
    def checked(cls, retries: int, timeout: float | None, lineage: bool) -> Wishes:
        """Raises ValueError for what cannot be wished, TypeError for retries that are no whole number."""
        if index(retries) < 0:
            raise ValueError(f"retries is {retries}, wants 0 or more")
        if timeout is not None and not timeout > 0:  # so that NaN is refused, too
            raise ValueError(f"timeout is {timeout}, wants more than 0 s, or None")
        return cls(retries, timeout, None if timeout is None else time.monotonic() + float(timeout), lineage)


NONE = Wishes()


class Plan:
    """One piece of work with options.

    Attributes:
      packed: the packed arguments; `fn` the number of the function.
      given: results that it needs, by the number of their work; they live as long as this does, and so does what is in `uses`.
      inputs: how those travel that are there for good.
      bulks: what is held for it.
      position: how much was scheduled without options before it.
      settled: the user knows how it has ended.
      made_at: with a lineage: the reference to its value.
    """

    __slots__ = (
        "bulks",
        "fn",
        "given",
        "inputs",
        "keep",
        "made_at",
        "options",
        "packed",
        "position",
        "settled",
        "uses",
        "value",
        "wishes",
        "work",
    )

    def __init__(
        self,
        packed: bytes,
        bulks: list[int],
        given: dict[int, RemoteValue],
        uses: list[Any],
        keep: bool,
        wishes: Wishes,
        options: WorkOptions,
    ) -> None:
        self.packed = packed
        self.bulks = bulks
        self.given = dict(given)
        self.uses = list(uses)
        self.keep = keep
        self.wishes = wishes
        self.options = options
        self.inputs: dict[int, bytes] = {}
        self.work = self.fn = self.position = 0
        self.settled = False
        self.made_at = b""
        self.value: Callable[[], RemoteValue | None] = lambda: None

    def take(self, held: Callable[[list[Any]], tuple[bytes, list[int]]]) -> None:
        """Take the results that are here, as they are now. Raises InvalidArgumentError where one was changed into what cannot be packed."""
        for work, value in self.given.items():
            if work not in self.inputs and value._kind == VALUE:
                with value._owner.unpacking:  # who gets it meanwhile could write to it
                    self.put(work, value._packed(), held)

    def put(self, work: int, packed: Any, held: Callable[[list[Any]], tuple[bytes, list[int]]]) -> None:
        """An input is here."""
        if isinstance(packed, list):
            packed, bulks = held(packed)
            self.bulks += bulks
        self.inputs[work] = packed


class Plans:
    """The plans of one coordinator.

    Attributes:
      graph: decides.
      planned: what the loop has not seen yet. Behind the coordinator's lock.
      events: what machine.py has to be told next, in order.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._plans: dict[int, Plan] = {}
        self._present: tuple[int, Any] = (VALUE, b"")
        self._roots: dict[int, RemoteValue] = {}
        self._asking: dict[int, RemoteValue] = {}
        """Whose lost values somebody waits for."""
        self.graph = graph.Graph(remakes_max=limits.ATTEMPTS_MAX)
        self.planned: list[Plan] = []
        self.events: list[closures.Event] = []

    def __len__(self) -> int:
        return len(self._plans)

    def user_of(self, number: int) -> int:
        """The number of the user's work for that of an attempt, or of work without options."""
        return number if number < FIRST_ATTEMPT else self.graph.work_of(number)

    def enqueue(self, plan: Plan, work: int, number: int, name: str, alive: object) -> RemoteValue:
        """As `Shell.enqueue`, for a plan. With the coordinator's lock held, in any thread."""
        value = RemoteValue(self._shell, work, name, alive)
        plan.work, plan.fn, plan.position, plan.value = work, number, len(self._shell.outbox), ref(value)
        self._shell.queue_bytes.begin(work, len(plan.packed), plan.bulks)
        self.planned.append(plan)
        self._shell.expect(work, value)
        return value

    def begin(self, plan: Plan) -> None:
        """It was scheduled."""
        self._plans[plan.work] = plan
        inputs: list[int] = []
        failed = 0
        try:
            plan.take(self._shell.held)
        except Exception as error:  # its user changes it in another thread
            self._shell.settle([(plan.work, ERROR, trusted.pack_error(error))])
            self._free(self._plans.pop(plan.work))
            return
        for work, value in plan.given.items():
            if work in plan.inputs:
                continue
            kind, payload = value._kind, value._payload
            if kind is None or (kind == KEPT and payload.lineage):
                inputs.append(work)
            elif kind == KEPT:
                plan.inputs[work] = payload.encoded
            else:
                failed = failed or work
        wishes = plan.wishes
        self.handle(
            graph.Planned(plan.work, plan.fn, tuple(inputs), failed, wishes.retries, wishes.until, wishes.lineage)
        )

    def begin_all(self, planned: list[Plan], outbox: list[Any], staying: list[int], options: Any) -> list[Any]:
        """These were scheduled, in their order among those of the outbox; gives what is left of that."""
        begin = 0
        for plan in planned:
            if plan.position > begin:
                self.events.append(closures.Scheduled(outbox[begin : plan.position], staying, options))
                begin = plan.position
            self.begin(plan)
        return outbox[begin:]

    def make_again(self, value: RemoteValue, lost: Kept, waiter: Any) -> bool:
        """Have a lost value made again, and release `waiter` when its RemoteValue knows better; False when closed. In any thread."""
        shell = self._shell
        with shell.lock:
            if shell.closed:
                return False
            if value._payload is not lost:
                waiter.release()
                return True
            value._waiters = [*(value._waiters or ()), waiter]
            self._asking[value._work] = value
        shell.in_loop(shell.decide, graph.ValueLost(value._work, lost.work))
        return True

    def handle(self, event: graph.Event) -> None:
        """Have the graph decide, and settle what has ended by that."""
        told: list[Outcome] = []
        self._decide(event, told)
        self._settle(told)

    def ended(self, items: Iterable[Outcome]) -> list[Outcome]:
        """What these ends of work and of attempts mean for what the user scheduled."""
        told: list[Outcome] = []
        for number, kind, payload in items:
            if number < FIRST_ATTEMPT:
                if kind == KEPT:
                    payload = Kept(self._shell, number, payload)
                told.append((number, kind, payload))
                if not self.graph.awaits(number):
                    continue
            elif not self.graph.awaits(number):
                if kind == KEPT:
                    Kept(self._shell, number, payload)  # nobody wants it: it goes at once
                continue
            self._end_of(number, kind, payload, told)
        self._roots.clear()
        return told

    def take(self) -> list[closures.Event]:
        """The events, which are forgotten."""
        events, self.events = self.events, []
        return events

    def let_go(self, works: list[int]) -> None:
        """Values that nobody can use any more."""
        for work in works:
            if work >= FIRST_ATTEMPT:
                self.handle(graph.ValueDropped(work))

    def close(self) -> None:
        """Nothing of all this will end any more. With the coordinator's lock held; in any thread, after the loop."""
        plans, self._plans = self._plans, {}
        for plan in plans.values():
            value = plan.value()
            if plan.settled and value is not None:
                value._wake()
            plan.given.clear()
        self._wake_all()

    def clear(self) -> None:
        """Everything was settled by somebody else."""
        attempts = self.graph.attempts
        self.graph = graph.Graph(remakes_max=limits.ATTEMPTS_MAX, first=self.graph.next_attempt)
        if attempts:
            self.events.append(closures.WithdrawAsked(attempts))
        plans, self._plans = self._plans, {}
        for plan in plans.values():
            self._free(plan)
        with self._shell.lock:
            self._wake_all()

    # -- deciding -------------------------------------------------------------------------------------------------

    def _end_of(self, number: int, kind: int, payload: Any, told: list[Outcome]) -> None:
        lost = 0
        work = self.user_of(number)
        plan = self._plans.get(work)
        if kind == INPUT_LOST:
            lost, payload = decode_loss(payload)
        elif kind == KEPT and plan is not None:
            if plan.wishes.lineage:
                plan.made_at = payload
            payload = Kept(self._shell, number, payload, plan.wishes.lineage)
        if kind in (VALUE, KEPT) and not (plan is not None and plan.wishes.lineage):
            for waiting in self.graph.waiting_for(work):
                self._plans[waiting].put(work, payload.encoded if kind == KEPT else payload, self._shell.held)
        self._present = (ERROR if kind == INPUT_LOST else kind, payload)
        self._decide(graph.Ended(number, kind, lost), told)
        self._present = (VALUE, b"")

    def _decide(self, event: graph.Event, told: list[Outcome]) -> None:
        for effect in self.graph.handle(event, time.monotonic()):
            match effect:
                case graph.HandIn(work, attempt):
                    self._hand_in(self._plans[work], attempt)
                case graph.End(work, kind, cause):
                    self._end(self._plans[work], kind, cause, told)
                case graph.Remade(work, new):
                    if new:
                        self._replace(self._plans[work], *self._present)
                    else:
                        self._wake(work)
                case graph.WithdrawAttempts(attempts):
                    self.events.append(closures.WithdrawAsked(attempts))
                case graph.DropFunctions(functions):
                    self.events.append(closures.FunctionsDropped(functions))
                case graph.Free(work):
                    self._free(self._plans.pop(work))

    def _hand_in(self, plan: Plan, attempt: int) -> None:
        payload = plan.packed
        if plan.given:
            inputs = {
                work: self._plans[work].made_at if encoded is None else encoded
                for work in plan.given
                for encoded in (plan.inputs.get(work),)
            }
            payload = encode_inputs(inputs, payload)
            if len(payload) > limits.INLINE_BYTES_MAX:
                payload, bulks = self._shell.held([payload])
                plan.bulks += bulks
            payload = INPUTS + payload
        if plan.keep:
            payload = KEEP + payload
        options = None if plan.options is PLAIN else {attempt: plan.options}
        self.events.append(closures.Scheduled([(attempt, plan.fn, payload)], [attempt] if plan.keep else (), options))

    def _end(self, plan: Plan, kind: int | None, cause: int, told: list[Outcome]) -> None:
        payload: Any = b""
        if kind is None:
            kind, payload = self._present
        elif kind == INPUT_FAILED:
            given = plan.given[cause]
            root = given._payload if given._kind == INPUT_FAILED else self._roots.get(cause, given)
            self._roots[plan.work] = payload = root
        elif kind == TIMED_OUT:
            payload = plan.wishes.timeout
        elif kind == UNAVAILABLE:
            times = limits.ATTEMPTS_MAX
            payload = f"its value was lost with its worker, made again {times} times, and lost again".encode()
        if not plan.settled:
            plan.settled = True
            told.append((plan.work, kind, payload))
        else:
            self._replace(plan, kind, payload)

    def _replace(self, plan: Plan, kind: int, payload: Any) -> None:
        """One that had ended well has another value, or none any more."""
        value = plan.value()
        if value is not None:
            with self._shell.lock:
                self._asking.pop(plan.work, None)
                value._settle(kind, payload)

    def _wake(self, work: int) -> None:
        """Who asks for a lost value has another look."""
        with self._shell.lock:
            if (value := self._asking.pop(work, None)) is not None:
                value._wake()

    def _wake_all(self) -> None:
        """No lost value will be made again. With the coordinator's lock held."""
        asking, self._asking = self._asking, {}
        for value in asking.values():
            value._wake()

    def _settle(self, told: list[Outcome]) -> None:
        self._roots.clear()
        if told:
            self._shell.settle(told)

    def _free(self, plan: Plan) -> None:
        self._shell.drop(plan.bulks)
        plan.given.clear()
        plan.uses = []
