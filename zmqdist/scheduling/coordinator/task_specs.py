"""Plans (work with inputs, retries, a timeout or a lineage) between the program and the machine: their payloads and RemoteValues.

dependencies_and_retries.py has the decisions. A plan is what the program scheduled; its attempts are the work items that closures.py
sees. Unless a docstring says otherwise, everything here runs in the coordinator's loop.

Where an input comes from
    A result that is in this process is sent inside the payload, as it is packed; a large one is held by the coordinator's store, for the
    processes that run a plan with this input. A result that the program has already unpacked with `get` is packed again in its
    present state, because the program may have changed it.
    A kept result is sent as its reference, so that the value travels from worker to worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol, TypeAlias
from weakref import ref

from zmqdist import limits
from zmqdist.messages import KEPT
from zmqdist.scheduling.coordinator.affinity import WorkOptions
from zmqdist.scheduling.coordinator.bounds import QueueBytes
from zmqdist.scheduling.coordinator.coordinator_events import PackingFailed
from zmqdist.scheduling.coordinator.dependencies_and_retries import INPUT_FAILED, TIMED_OUT, Planned
from zmqdist.scheduling.coordinator.remote_value import Kept, RemoteValue, ValueOwner, outcome_of
from zmqdist.scheduling.worker.references import INPUTS, KEEP, encode_inputs

Outcome: TypeAlias = "tuple[int, int, Any]"
"""(work, kind, payload), for `CoordinatorRuntime.settle`."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options that make a plan of work without inputs. `until` is on the clock of time.monotonic."""

    retries: int = 0
    timeout: float | None = None
    until: float | None = None
    lineage: bool = False

    @classmethod
    def checked(cls, retries: int, timeout: float | None, lineage: bool) -> PlanOptions:
        """Return checked options. Raises ValueError for a value out of range, TypeError if `retries` is not a whole number."""
        if index(retries) < 0:
            raise ValueError(f"retries is {retries}, wants 0 or more")
        if timeout is not None and not timeout > 0:  # also refuses NaN
            raise ValueError(f"timeout is {timeout}, wants more than 0 s, or None")
        return cls(retries, timeout, None if timeout is None else time.monotonic() + float(timeout), lineage)


NO_OPTIONS = PlanOptions()


class Plan:
    """One plan and the data held for it.

    Attributes:
      packed, fn: the packed arguments; the number of the function.
      input_values: the RemoteValues it needs, by work number. They and the objects in `uses` stay alive as long as the plan.
      inputs: how each input that is available for good is sent, by work number.
      bulks: the numbers of the data held for it in the store.
      position: how many ordinary work items were scheduled before it since the last drain.
      made_at: with a lineage: the reference to its value.
    """

    __slots__ = (
        "bulks",
        "fn",
        "input_values",
        "inputs",
        "keep",
        "made_at",
        "options",
        "packed",
        "plan_options",
        "position",
        "uses",
        "value",
        "work",
    )

    def __init__(
        self,
        packed: bytes,
        bulks: list[int],
        input_values: dict[int, RemoteValue],
        uses: list[Any],
        keep: bool,
        plan_options: PlanOptions,
        options: WorkOptions,
    ) -> None:
        self.packed = packed
        self.bulks = bulks
        self.input_values = dict(input_values)
        self.uses = list(uses)
        self.keep = keep
        self.plan_options = plan_options
        self.options = options
        self.inputs: dict[int, bytes] = {}
        self.work = self.fn = self.position = 0
        self.made_at = b""
        self.value: Callable[[], RemoteValue | None] = lambda: None

    def take(self, held: Callable[[list[Any]], tuple[bytes, list[int]]]) -> None:
        """Pack the inputs whose results are in this process, as they are now. InvalidArgumentError: the program made one unpicklable."""
        for work, value in self.input_values.items():
            if work not in self.inputs:
                value.copied(lambda packed, work=work: self.put(work, packed, held))  # type: ignore[misc]

    def put(self, work: int, packed: Any, held: Callable[[list[Any]], tuple[bytes, list[int]]]) -> None:
        """Store the packed value of an input."""
        if isinstance(packed, list):
            packed, bulks = held(packed)
            self.bulks += bulks
        self.inputs[work] = packed


class PlanOwner(ValueOwner, Protocol):
    """What Plans uses of the coordinator's runtime (runtime.py)."""

    outbox: list[tuple[int, int, bytes]]
    queue_bytes: QueueBytes

    def hold(self, parts: list[Any]) -> tuple[bytes, list[int]]: ...

    def drop(self, bulks: list[int]) -> None: ...

    def expect(self, work: int, value: RemoteValue) -> None: ...


class Plans:
    """The payloads of the plans of one coordinator, and their RemoteValues.

    Attributes:
      planned: plans that the loop has not seen yet. Guarded by the coordinator's lock.
    """

    def __init__(self, runtime: PlanOwner) -> None:
        self._runtime = runtime
        self._plans: dict[int, Plan] = {}
        self.planned: list[Plan] = []

    def __len__(self) -> int:
        return len(self._plans)

    def enqueue(self, plan: Plan, work: int, number: int, name: str, alive: object) -> RemoteValue:
        """As `CoordinatorRuntime.enqueue`, for a plan. Any thread, with the coordinator's lock held."""
        value = RemoteValue(self._runtime, work, name, alive)
        plan.work, plan.fn, plan.position, plan.value = work, number, len(self._runtime.outbox), ref(value)
        self._runtime.queue_bytes.begin(work, len(plan.packed), plan.bulks)
        self.planned.append(plan)
        self._runtime.expect(work, value)
        return value

    def begin(self, plan: Plan) -> Planned | PackingFailed:
        """Take over a scheduled plan; return the event for the machine."""
        inputs: list[int] = []
        failed = 0
        try:
            plan.take(self._runtime.hold)
        except Exception as error:  # another thread of the program has changed an input since `schedule` packed it
            self._free(plan)
            return PackingFailed(plan.work, self._runtime.form.pack_error(error))
        self._plans[plan.work] = plan
        for work, value in plan.input_values.items():
            if work in plan.inputs:
                continue
            kind, payload = outcome_of(value)
            if kind is None or (kind == KEPT and payload.lineage):
                inputs.append(work)
            elif kind == KEPT:
                plan.inputs[work] = payload.encoded
            else:
                failed = failed or work
        plan_options = plan.plan_options
        return Planned(
            plan.work,
            plan.fn,
            tuple(inputs),
            failed,
            plan_options.retries,
            plan_options.until,
            plan_options.lineage,
            plan.keep,
            plan.options,
        )

    def ended(self, items: list[Outcome]) -> list[Outcome]:
        """Return the outcomes with the payloads of plans replaced by those that RemoteValues expect."""
        roots: dict[int, RemoteValue] = {}
        return [self._end(item, roots) if item[0] in self._plans else item for item in items]

    def pack(self, work: int) -> bytes:
        """Return the payload of an attempt of this plan."""
        plan = self._plans[work]
        payload = plan.packed
        if plan.input_values:
            inputs = {
                work: self._plans[work].made_at if encoded is None else encoded
                for work in plan.input_values
                for encoded in (plan.inputs.get(work),)
            }
            payload = encode_inputs(inputs, payload)
            if len(payload) > limits.INLINE_BYTES_MAX:
                payload, bulks = self._runtime.hold([payload])
                plan.bulks += bulks
            payload = INPUTS + payload
        return self._runtime.form.marked(KEEP + payload if plan.keep else payload)

    def put(self, work: int, payload: Any, plans: Sequence[int]) -> None:
        """Store an input of these plans."""
        for waiting in plans:
            self._plans[waiting].put(work, payload, self._runtime.hold)

    def replace(self, work: int, kind: int, payload: Any) -> None:
        """Give the RemoteValue of a plan that had succeeded another outcome: a recomputed value, or the error of its final loss."""
        plan = self._plans[work]
        _, kind, payload = self._end((work, kind, payload), {})
        value = plan.value()
        if value is not None:
            with self._runtime.lock:
                self._runtime.lost_values.pop(work, None)
                value.settle(kind, payload)

    def wake(self, work: int) -> None:
        """Wake the threads that wait for a lost value, so that they try again."""
        with self._runtime.lock:
            if (value := self._runtime.lost_values.pop(work, None)) is not None:
                value.wake()

    def free(self, work: int) -> None:
        """Release the data held for this plan."""
        self._free(self._plans.pop(work))

    def close(self) -> None:
        """Drop all plans, because none will end any more. With the coordinator's lock held; any thread, after the loop has ended."""
        plans, self._plans = self._plans, {}
        for plan in plans.values():
            plan.input_values.clear()

    def _end(self, item: Outcome, roots: dict[int, RemoteValue]) -> Outcome:
        """Convert the outcome of a plan. `roots`: by plan, the input at the root of its failure, for failures that are not settled yet."""
        work, kind, payload = item
        plan = self._plans[work]
        if kind == KEPT:
            plan.made_at = payload.reference
            payload = Kept(self._runtime, *payload)
        elif kind == INPUT_FAILED:
            failed_input = plan.input_values[payload]
            input_kind, root = outcome_of(failed_input)
            payload = roots[work] = root if input_kind == INPUT_FAILED else roots.get(payload, failed_input)
        elif kind == TIMED_OUT:
            payload = plan.plan_options.timeout
        return work, kind, payload

    def _free(self, plan: Plan) -> None:
        self._runtime.drop(plan.bulks)
        plan.input_values.clear()
        plan.uses = []
