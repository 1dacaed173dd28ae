"""Does the simulation find bugs? One bug is planted at a time; within SEEDS_MAX seeds the
simulation must report a broken promise.

A row has the name of the bug, the patch that plants it, and the start of the simulation's report
(or the class of the error).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.planted import Plant, around, events, expect_report, heard, redirected
from tests.sim.simulations.cluster import simulate
from zmqdist.errors import InternalError
from zmqdist.events import Send
from zmqdist.messages import (
    Assign,
    Begun,
    LeasesReturned,
    Members,
    Register,
    Registered,
    SlotsLost,
    StealRequest,
    Submit,
)
from zmqdist.scheduling.dispatcher.demands import Demands
from zmqdist.scheduling.dispatcher.machine import Broker, Dispatch
from zmqdist.scheduling.dispatcher.membership_and_leases import Member, MemberLost, Membership
from zmqdist.scheduling.dispatcher.placement import Placement
from zmqdist.scheduling.dispatcher.records import CoordinatorSession, Lease, LeaseState
from zmqdist.scheduling.dispatcher.resources import Ledger, Stocks
from zmqdist.scheduling.shared.quantities import Grant
from zmqdist.scheduling.worker.machine import WorkerMachine
from zmqdist.scheduling.worker.records import WaitingWork
from zmqdist.scheduling.worker.worker_events import (
    DispatcherConnected,
    SlotFinished,
    SlotReclaimed,
)

pytestmark = pytest.mark.timeout(300)  # some are found after hundreds of seeds

SEEDS_MAX = 1000


def answered_again(former: Any, self: WorkerMachine, event: Any, now: float) -> list[Any]:
    """The reply to a Reclaim comes again after the next outcome of its slot."""
    effects: list[Any] = former(self, event, now)
    replies = vars(self).setdefault("replies", {})
    if isinstance(event, SlotReclaimed):
        replies[event.slot] = event
    elif isinstance(event, SlotFinished) and event.slot in replies:
        effects += former(self, replies.pop(event.slot), now)
    return effects


def all_charged(former: Any, self: Dispatch, loss: MemberLost, now: float) -> Any:
    self.note_starts(loss.member, [*self.loads[loss.member].leases])
    return former(self, loss, now)


def newest_first_at_the_worker(former: Any, self: WaitingWork, *args: Any, **options: Any) -> None:
    former(self, *args, **options)
    self.extendleft([self.popleft() for _ in range(self.pinned_waiting)])


def grown(former: Any, self: Dispatch, member: Member, register: Register) -> list[Send]:
    sent: list[Send] = former(self, member, register)
    member.slots *= 8
    return sent


def back_to_all(former: Any, self: Placement, lease: Lease, *, report_before_start: bool) -> None:
    lease.band = lease.session.queue_for("").band(0)
    former(self, lease, report_before_start=report_before_start)


def only_the_returned(former: Any, self: Placement, lease: Lease, **options: bool) -> None:
    if not options["report_before_start"]:
        former(self, lease, **options)


def newest_first(former: Any, self: Placement, session: Any, *args: Any) -> None:
    former(self, session, *args)
    worker, priority, items, request, *_ = args
    session.queue_for(worker, request).band(priority).items.rotate(len(items))


def all_spare(former: Any, self: Dispatch, now: float) -> list[Send]:
    sent: list[Send] = former(self, now)
    for load in self.loads.values():
        pinned = [n for n, lease in load.leases.items() if lease.band.session_queue.worker]
        for effect in sent:
            if isinstance(effect.message, StealRequest) and effect.to == load.member.peer:
                effect.message.leases.extend(pinned)
    return sent


def unsent(kind: type) -> Callable[..., list[Send]]:
    """Return what drops the messages of this kind that a method returns."""
    return lambda former, *args: [
        effect for effect in former(*args) if not isinstance(effect.message, kind)
    ]


def first_devices(former: Any, self: Ledger, amount: int) -> tuple[int, ...]:
    devices: tuple[int, ...] = former(self, amount)
    return tuple(range(len(devices)))


def granted_twice(former: Any, self: Stocks, worker: str, *args: Any) -> Grant | None:
    grant: Grant | None = former(self, worker, *args)
    if grant is not None:
        self.release(worker, grant)
    return grant


BUGS: list[tuple[str, Plant, str | tuple[str, ...]]] = [
    (
        "what an ended lease has is not free again",
        around(Stocks, "release", lambda *args, **options: None),
        ("dispatch P7", "dispatch P19"),
    ),
    ("resources are granted twice", around(Stocks, "reserve", granted_twice), "dispatch P19"),
    (
        "devices are granted twice",
        around(Ledger, "devices_for", first_devices),
        ("dispatch P19", "worker P11"),
    ),
    (
        "a worker is kept free for ever",
        around(Stocks, "drop_claim", lambda former, self, claimant: None),
        "dispatch P7",
    ),
    (
        "work that no worker could run waits for ever",
        around(Demands, "judge", lambda former, self, now: ([], [])),
        ("dispatch P7", "dispatch P20"),
    ),
    (
        "work waits for the host of its inputs for ever",
        around(Demands, "overdue", lambda former, self, now: []),
        ("dispatch P7", "a machine sets a deadline for the current time again"),
    ),
    (
        "work fails for want of resources that a worker has",
        around(Stocks, "can_ever", lambda former, self, request, worker="": False),
        "dispatch P20",
    ),
    (
        "a worker has all functions see all devices",
        heard(WorkerMachine, Assign, lambda assign: replace(assign, grants=[])),
        "worker P11",
    ),
    (
        "the leases of a lost worker are forgotten",
        around(Placement, "put_back", only_the_returned),
        "dispatch P",
    ),
    (
        "a worker whose connection went is never lost",
        around(
            Membership,
            "__init__",
            lambda former, self, lease_s, _, *rest: former(self, lease_s, 1e9, *rest),
        ),
        "dispatch P",
    ),
    ("work that had not started is charged", around(Dispatch, "lost", all_charged), "dispatch P3"),
    (
        "lost starts are not charged",
        heard(Broker, SlotsLost, lambda lost: LeasesReturned([item[0] for item in lost.items])),
        "dispatch P7",
    ),
    ("the window is ignored", around(Dispatch, "joined", grown), "dispatch P6"),
    (
        "the end of a generation does not wait for leases",
        around(CoordinatorSession, "is_quiet", lambda _, self, now: now >= self.unsettled_until),
        "dispatch P5",
    ),
    (
        "the end of a generation does not wait for what was lost from sight",
        around(CoordinatorSession, "is_quiet", lambda _, self, now: self.outstanding == 0),
        "dispatch P5",
    ),
    (
        "careful work is begun like any other",
        heard(WorkerMachine, Assign, lambda assign: replace(assign, report_before_start=False)),
        "worker P6",
    ),
    (
        "work for this worker is begun newest first",
        around(WaitingWork, "put", newest_first_at_the_worker),
        "worker P9",
    ),
    (
        "work for this worker waits like any other",
        heard(WorkerMachine, Assign, lambda assign: replace(assign, pinned=False)),
        "worker P9",
    ),
    (
        "a slot answers again what it has not begun",
        around(WorkerMachine, "handle", answered_again),
        ("worker P9", "worker P10"),
    ),
    ("work that was returned is lost", heard(Broker, LeasesReturned, lambda _: None), "dispatch P"),
    (
        "a bulk result is forgotten with its worker",
        redirected(Lease, {LeaseState.HELD: LeaseState.KEPT}),
        ("dispatch P7", "dispatch P9"),
    ),
    (
        "a worker without contact goes on",
        heard(WorkerMachine, Registered, lambda accepted: replace(accepted, lease_s=1e6)),
        "dispatch P",
    ),
    (
        "another dispatcher's work goes on",
        events(
            WorkerMachine,
            lambda _, event: (
                DispatcherConnected(1) if isinstance(event, DispatcherConnected) else event
            ),
        ),
        "worker P",
    ),
    (
        "a kept result counts as one that was not received",
        redirected(Lease, {LeaseState.KEPT: None}),
        "dispatch P11",
    ),
    (
        "work for one worker goes to any",
        around(
            Placement,
            "enqueue",
            lambda former, self, session, _, *args: former(self, session, "", *args),
        ),
        "dispatch P12",
    ),
    (
        "work for one worker that comes back goes to any",
        around(Placement, "put_back", back_to_all),
        "dispatch P1",
    ),
    ("work for one worker is called back", around(Dispatch, "assign", all_spare), "dispatch P12"),
    (
        "priorities are ignored",
        heard(Broker, Submit, lambda submit: replace(submit, priority=0)),
        "dispatch P13",
    ),
    ("the newest goes first", around(Placement, "enqueue", newest_first), "dispatch P13"),
    (
        "work apart ends with the generation",
        heard(Broker, Submit, lambda submit: replace(submit, detached=False)),
        ("dispatch P7", "dispatch P14"),
    ),
    (
        "a loss is not told to those who watch",
        around(Dispatch, "lost", unsent(Members)),
        ("dispatch P7", "dispatch P15"),
    ),
    (
        "a cancelled piece of work runs again",
        redirected(Lease, {LeaseState.CANCELLED: None, LeaseState.ABORTED: None}),
        "",
    ),
    (
        "who asks too late is not told so",
        around(Dispatch, "cancel_work", unsent(Begun)),
        "dispatch P17",
    ),
]


def first_complaint(seed: int) -> str | None:
    """Return the report of the simulation for a seed; "" if a machine itself raises."""
    try:
        simulate(seed, works=30, faults=12)
    except (AssertionError, InternalError) as error:
        return str(error)
    except KeyError:
        return ""
    return None


@pytest.mark.parametrize(("bug", "plant", "promise"), BUGS, ids=[bug[0] for bug in BUGS])
def test_simulation_finds_bug(
    bug: str, plant: Plant, promise: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    expect_report(first_complaint, SEEDS_MAX, bug, promise)


def test_simulation_finds_forgotten_resources_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only threads go on with what an earlier dispatcher has assigned."""
    heard(Broker, Register, lambda register: replace(register, grants=[]))(monkeypatch)

    def complaint(seed: int) -> str | None:
        try:
            simulate(seed, works=30, faults=12, can_kill=False)
        except AssertionError as error:
            return str(error)
        return None

    expect_report(complaint, SEEDS_MAX, "what threads still use is forgotten", "dispatch P19")
