"""Does the simulation find bugs? One bug is planted at a time; within SEEDS_MAX seeds the
simulation must report a broken promise.

A row has the name of the bug, the patch that plants it, and the start of the simulation's report
(or the class of the error).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.simulations.cluster import simulate
from zmqdist.events import Send
from zmqdist.messages import Assign, Begun, Members, Submit
from zmqdist.scheduling.dispatcher import placement
from zmqdist.scheduling.dispatcher.machine import Dispatch
from zmqdist.scheduling.dispatcher.membership_and_leases import Membership
from zmqdist.scheduling.dispatcher.placement import Placement
from zmqdist.scheduling.dispatcher.records import CoordinatorSession
from zmqdist.scheduling.worker import machine as worker
from zmqdist.scheduling.worker.machine import WorkerMachine
from zmqdist.scheduling.worker.waiting_work import WaitingWork
from zmqdist.scheduling.worker.worker_events import FreeBulk, Reclaim

pytestmark = pytest.mark.timeout(300)  # some are found after hundreds of seeds

SEEDS_MAX = 1000

Plant = Callable[[pytest.MonkeyPatch], None]


def before(owner: type, name: str, hook: Callable[..., None]) -> Plant:
    """Call `hook` with the arguments of a method before the method."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)

        def spoiled(self: Any, *args: Any, **kwargs: Any) -> Any:
            hook(self, *args, **kwargs)
            return method(self, *args, **kwargs)

        patch.setattr(owner, name, spoiled)

    return plant


def after(owner: type, name: str, hook: Callable[..., Any]) -> Plant:
    """Replace the result of a method by `hook(self, result)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)
        patch.setattr(
            owner, name, lambda self, *args, **kwargs: hook(self, method(self, *args, **kwargs))
        )

    return plant


def instead(owner: type, name: str, fn: Callable[..., Any]) -> Plant:
    return lambda patch: patch.setattr(owner, name, fn)


def forget_leases(self: Dispatch, loss: Any, now: float) -> None:
    self.loads[loss.member].leases.clear()


def all_started(self: Dispatch, loss: Any, now: float) -> None:
    for lease in self.loads[loss.member].leases.values():
        lease.started = True


def drop_returned(self: Dispatch, member: Any, numbers: list[int], now: float) -> None:
    for number in numbers:
        self.loads[member].leases.pop(number, None)


def never_careful(self: WorkerMachine, message: Any, now: float) -> None:
    if isinstance(message, Assign):
        message.report_before_start = False


def newest_of_own(_: WaitingWork, items: list[Any]) -> list[Any]:
    return sorted(items, reverse=True)


def never_first(self: WorkerMachine, message: Any, now: float) -> None:
    if isinstance(message, Assign):
        message.pinned = False


def no_charge(self: Dispatch, lost: Any, worker: str) -> list[Send]:
    return self._give_back([lease for lease, _, _ in lost], report_before_start=True)


def never_stop(self: WorkerMachine, effects: Any) -> Any:
    self._contact.stop_at = None
    return effects


def asked_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        worker,
        "_reclaim",
        lambda slot: [setattr(slot, "reclaiming", True), Reclaim(slot.index)][1:],
    )


def abandon_without_kill(self: WorkerMachine) -> list[Any]:
    for slot in self._slots:
        slot.given.clear()
    self.queue.empty()
    self._outcomes.clear()
    self._started.clear()
    freed = [FreeBulk(lease) for lease in self._bulk]
    self._bulk.clear()
    return freed


def uncut(self: Dispatch, leases: list[Any], **kwargs: Any) -> None:
    for lease in leases:
        lease.cancelled = False


def not_kept(self: Dispatch, leases: Any) -> None:
    for lease in leases:
        lease.kept = False


def none_kept(self: Dispatch, session: CoordinatorSession, *args: Any) -> None:
    for load, number in session.held.values():
        load.held[number].kept = False


def pinned_to_nobody(
    self: Placement, session: CoordinatorSession, worker: str, priority: int, items: list[Any]
) -> None:
    ENQUEUE(self, session, "", priority, items)


def of_no_priority(
    self: Placement, session: CoordinatorSession, worker: str, priority: int, items: list[Any]
) -> None:
    ENQUEUE(self, session, worker, 0, items)


def newest_first(
    self: Placement, session: CoordinatorSession, worker: str, priority: int, items: list[Any]
) -> None:
    ENQUEUE(self, session, worker, priority, items)
    session.queue_for(worker).band(priority).items.rotate(len(items))


def back_to_all(self: Placement, lease: Any, *, report_before_start: bool) -> None:
    lease.band = lease.session.queue_for("").band(0)
    PUT_BACK(self, lease, report_before_start=report_before_start)


def nothing_apart(self: Dispatch, session: CoordinatorSession, submit: Submit, now: float) -> None:
    submit.detached = False


def losses_untold(self: Dispatch, effects: list[Send]) -> list[Send]:
    return [effect for effect in effects if not isinstance(effect.message, Members)]


def all_spare(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        placement,
        "_stealable",
        lambda load: [n for n, lease in load.leases.items() if not lease.started][1:],
    )


ENQUEUE, PUT_BACK = Placement.enqueue, Placement.put_back


def greedy(patch: pytest.MonkeyPatch) -> None:
    give = Placement._hand_out  # reach: the planted bug changes what it does
    patch.setattr(
        Placement,
        "_hand_out",
        lambda self, load, count, *args: give(self, load, 3 * count + 5, *args),
    )


def endless_grace(self: Membership, peer: Any, now: float) -> None:
    self.reconnect_grace_s = 1e9


def nothing_begun(self: Dispatch, effects: list[Send]) -> list[Send]:
    return [effect for effect in effects if not isinstance(effect.message, Begun)]


BUGS: list[tuple[str, Plant, str | tuple[str, ...]]] = [
    (
        "the leases of a lost worker are forgotten",
        before(Dispatch, "lost", forget_leases),
        "dispatch P",
    ),
    (
        "a worker whose connection went is never lost",
        before(Membership, "_peer_gone", endless_grace),
        "dispatch P",
    ),
    ("work that had not started is charged", before(Dispatch, "lost", all_started), "dispatch P3"),
    (
        "lost starts are not charged",
        instead(Dispatch, "_charge_lost_starts", no_charge),
        "dispatch P7",
    ),
    ("the window is ignored", greedy, "dispatch P6"),
    (
        "the end of a generation does not wait for leases",
        instead(CoordinatorSession, "is_quiet", lambda self, now: now >= self.unsettled_until),
        "dispatch P5",
    ),
    (
        "the end of a generation does not wait for what was lost from sight",
        instead(CoordinatorSession, "is_quiet", lambda self, now: self.outstanding == 0),
        "dispatch P5",
    ),
    (
        "careful work is begun like any other",
        before(WorkerMachine, "_handle_message", never_careful),
        "worker P6",
    ),
    (
        "work for this worker is begun newest first",
        instead(WaitingWork, "_in_order", lambda self, items: sorted(items, reverse=True)),
        "worker P9",
    ),
    (
        "work for this worker waits like any other",
        before(WorkerMachine, "_handle_message", never_first),
        "worker P9",
    ),
    (
        "a slot is asked again what it has not begun before it has answered",
        asked_again,
        "worker P10",
    ),
    (
        "work that was returned is lost",
        before(Dispatch, "leases_returned", drop_returned),
        "dispatch P",
    ),
    (
        "a bulk result is forgotten with its worker",
        instead(Dispatch, "_lose_results", lambda self, leases: []),
        "dispatch P7",
    ),
    ("a worker without contact goes on", after(WorkerMachine, "_apply", never_stop), "dispatch P"),
    (
        "another dispatcher's work goes on",
        instead(WorkerMachine, "_abandon", abandon_without_kill),
        "worker P",
    ),
    (
        "a kept result is made again when its worker is lost",
        before(Dispatch, "_lose_results", not_kept),
        "dispatch P11",
    ),
    (
        "a kept result is released with its round",
        before(Dispatch, "end_round", none_kept),
        "dispatch P11",
    ),
    (
        "work for one worker goes to any",
        instead(Placement, "enqueue", pinned_to_nobody),
        "dispatch P12",
    ),
    (
        "work for one worker that comes back goes to any",
        instead(Placement, "put_back", back_to_all),
        "dispatch P1",
    ),
    ("work for one worker is called back", all_spare, "dispatch P12"),
    ("priorities are ignored", instead(Placement, "enqueue", of_no_priority), "dispatch P13"),
    ("the newest goes first", instead(Placement, "enqueue", newest_first), "dispatch P13"),
    (
        "work apart ends with the generation",
        before(Dispatch, "submit", nothing_apart),
        ("dispatch P7", "dispatch P14"),
    ),
    (
        "a loss is not told to those who watch",
        after(Dispatch, "lost", losses_untold),
        ("dispatch P7", "dispatch P15"),
    ),
    ("a cancelled piece of work runs again", before(Dispatch, "_give_back", uncut), ""),
    (
        "who asks too late is not told so",
        after(Dispatch, "_cancel_unbegun", nothing_begun),
        "dispatch P17",
    ),
]


def first_complaint(seed: int) -> str | None:
    """Return the report of the simulation for a seed; "" if a machine itself raises."""
    try:
        simulate(seed, works=30, faults=12)
    except AssertionError as error:
        return str(error)
    except KeyError:
        return ""
    return None


@pytest.mark.parametrize(("what", "plant", "said"), BUGS, ids=[bug[0] for bug in BUGS])
def test_the_simulation_finds_that(
    what: str, plant: Plant, said: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = next(
        (found for seed in range(SEEDS_MAX) if (found := first_complaint(seed)) is not None), None
    )
    assert found is not None, f"{SEEDS_MAX} seeds did not find that {what}"
    assert found.startswith(said), "the simulation reports another promise"
