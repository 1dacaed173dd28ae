"""The payloads and RemoteValues of plans, which are work items with inputs, retries, a timeout or a
lineage.

dependencies_and_retries.py decides when a plan begins and ends. The program schedules plans, and
each attempt of a plan is a work item for closures.py. Unless a docstring says otherwise, the code
of this module runs in the coordinator's loop.

How an input is sent
    An input whose result is in this process is sent inside the payload, still packed. If the result
    is large, the coordinator's store holds it for the processes that run the plan. A result that
    the program has already unpacked with `get` is packed again in its present state, because the
    program may have changed it.
    An input whose value a worker keeps is sent as a reference, so that the value travels from
    worker to worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from weakref import ref

from zmqdist import limits
from zmqdist.clock import deadline, seconds
from zmqdist.messages import KEPT
from zmqdist.scheduling.coordinator.affinity import WorkOptions, whole
from zmqdist.scheduling.coordinator.coordinator_events import PackingFailed
from zmqdist.scheduling.coordinator.dependencies_and_retries import INPUT_FAILED, TIMED_OUT, Planned
from zmqdist.scheduling.coordinator.queue_bounds import QueueBytes
from zmqdist.scheduling.coordinator.remote_value import (
    Kept,
    RemoteValue,
    ValueOwner,
    copied,
    outcome_of,
    settle,
    wake,
)
from zmqdist.scheduling.shared.references import INPUTS, KEEP, encode_inputs

Outcome: TypeAlias = "tuple[int, int, Any]"
"""How a work item has ended, as `CoordinatorRuntime.settle` accepts it: (work, kind, payload)."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options that make a work item a plan even without inputs. `timeout` is in seconds;
    `until` is a time by the clock of time.monotonic."""

    retries: int = 0
    timeout: float | None = None
    until: float | None = None
    lineage: bool = False

    @classmethod
    def checked(cls, retries: int, timeout: float | None, lineage: bool) -> PlanOptions:
        """Return the checked options, or NO_OPTIONS for the defaults.

        Raises ValueError if an option is out of range, TypeError if `retries` is not a whole
        number.
        """
        if whole("retries", retries) < 0:
            raise ValueError(f"retries is {retries}, wants 0 or more")
        if (limit_s := seconds(timeout)) == 0:
            raise ValueError(f"timeout is {timeout}, wants more than 0 s, or None")
        options = cls(retries, limit_s, deadline(limit_s), lineage)
        return NO_OPTIONS if options == NO_OPTIONS else options


NO_OPTIONS = PlanOptions()


class Plan:
    """One plan and the data held for it.

    Attributes:
      packed, fn: the packed arguments; the number of the function.
      input_values: the RemoteValues that the plan needs, by work number. The plan keeps them and
        the objects in `uses` alive.
      inputs: the bytes that represent an input in a message, by work number, for each input whose
        value is available for good.
      bulks: the numbers under which the store holds data for the plan.
      position: the number of ordinary work items in the outbox that were scheduled before the plan.
      made_at: the reference to the value, if the plan has a lineage and has succeeded.
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
        """Pack each input whose result is in this process, in its present state.

        Raises InvalidArgumentError if the program has changed a result in such a way that it cannot
        be pickled any more.
        """
        for work, value in self.input_values.items():
            if work not in self.inputs:
                copied(value, lambda packed, work=work: self.put(work, packed, held))  # type: ignore[misc]

    def put(
        self, work: int, packed: Any, held: Callable[[list[Any]], tuple[bytes, list[int]]]
    ) -> None:
        """Store the packed value of an input, or a reference to the value if `packed` is a list of
        large parts."""
        if isinstance(packed, list):
            packed, bulks = held(packed)
            self.bulks += bulks
        self.inputs[work] = packed


class PlanOwner(ValueOwner, Protocol):
    """The members of the coordinator's runtime (runtime.py) that Plans uses."""

    outbox: list[tuple[int, int, bytes]]
    queue_bytes: QueueBytes

    def hold(self, parts: list[Any]) -> tuple[bytes, list[int]]: ...

    def drop(self, bulks: list[int]) -> None: ...

    def expect(self, work: int, value: RemoteValue) -> None: ...


class Plans:
    """The payloads of the plans of one coordinator, and their RemoteValues.

    Attributes:
      planned: the scheduled plans that the loop has not passed to the machine yet. Guarded by the
        coordinator's lock.
    """

    def __init__(self, runtime: PlanOwner) -> None:
        self._runtime = runtime
        self._plans: dict[int, Plan] = {}
        self.planned: list[Plan] = []

    def __len__(self) -> int:
        return len(self._plans)

    def enqueue(self, plan: Plan, work: int, number: int, name: str, alive: object) -> RemoteValue:
        """Hand in a plan and return its RemoteValue. Any thread that holds the coordinator's lock
        may call this."""
        value = RemoteValue(self._runtime, work, name, alive)
        plan.work, plan.fn, plan.position, plan.value = (
            work,
            number,
            len(self._runtime.outbox),
            ref(value),
        )
        self._runtime.queue_bytes.begin(work, len(plan.packed), plan.bulks)
        self.planned.append(plan)
        self._runtime.expect(work, value)
        return value

    def begin(self, plan: Plan) -> Planned | PackingFailed:
        """Pack the inputs of a scheduled plan, and return the event by which the machine learns of
        the plan or of the failed packing."""
        inputs: list[int] = []
        failed = 0
        try:
            plan.take(self._runtime.hold)
        except Exception as error:
            # another thread of the program has changed an input since `schedule` packed it
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
        """Return these outcomes, after giving the outcome of each plan the payload that the plan's
        RemoteValue expects."""
        roots: dict[int, RemoteValue] = {}
        return [self._end(item, roots) if item[0] in self._plans else item for item in items]

    def pack(self, work: int) -> bytes:
        """Return the payload of the next attempt of this plan."""
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
        return self._runtime.form.mark + (KEEP + payload if plan.keep else payload)

    def put(self, work: int, payload: Any, plans: Sequence[int]) -> None:
        """Store the value of an input in each of these plans."""
        for waiting in plans:
            self._plans[waiting].put(work, payload, self._runtime.hold)

    def replace(self, work: int, kind: int, payload: Any) -> None:
        """Settle the RemoteValue of a successful plan again, with the recomputed value or with the
        error that the value is lost."""
        plan = self._plans[work]
        _, kind, payload = self._end((work, kind, payload), {})
        value = plan.value()
        if value is not None:
            with self._runtime.lock:
                self._runtime.lost_values.pop(work, None)
                settle(value, kind, payload)

    def wake(self, work: int) -> None:
        """Wake the threads that wait for this lost value, which was recomputed or was given up."""
        with self._runtime.lock:
            if (value := self._runtime.lost_values.pop(work, None)) is not None:
                wake(value)

    def free(self, work: int) -> None:
        """Release the data held for this plan, because no further attempt needs it."""
        self._free(self._plans.pop(work))

    def close(self) -> None:
        """Drop all plans when the loop has ended. The caller, in any thread, must hold the
        coordinator's lock."""
        plans, self._plans = self._plans, {}
        for plan in plans.values():
            plan.input_values.clear()

    def _end(self, item: Outcome, roots: dict[int, RemoteValue]) -> Outcome:
        """Translate the machine's outcome of a plan into the outcome of its RemoteValue.

        `roots` has, for each failed plan whose RemoteValue is not settled yet, the input whose own
        failure is the root cause.
        """
        work, kind, payload = item
        plan = self._plans[work]
        if kind == KEPT:
            plan.made_at = payload.reference
            payload = Kept(self._runtime, *payload)
        elif kind == INPUT_FAILED:
            failed_input = plan.input_values[payload]
            input_kind, root = outcome_of(failed_input)
            payload = roots[work] = (
                root if input_kind == INPUT_FAILED else roots.get(payload, failed_input)
            )
        elif kind == TIMED_OUT:
            payload = plan.plan_options.timeout
        return work, kind, payload

    def _free(self, plan: Plan) -> None:
        self._runtime.drop(plan.bulks)
        plan.input_values.clear()
        plan.uses = []
