"""Does the simulation of recruitment find bugs? One is planted at a time; within SEEDS_MAX seeds a
promise must be seen broken."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from tests.sim.simulations.recruitment import simulate_recruitment
from zmqdist.training import recruitment_machine
from zmqdist.training.recruitment_machine import DropInvitation, InviteWorker, Recruitment

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 300

DROP = Recruitment.drop
ENDED = Recruitment.invitation_ended
TICKED = Recruitment.ticked
WANT = Recruitment.want


def leaves_the_invitation(self: Recruitment, index: int) -> list[Any]:
    return [effect for effect in DROP(self, index) if not isinstance(effect, DropInvitation)]


def wanted_twice(self: Recruitment, index: int, address: str, now: float) -> list[Any]:
    effects = WANT(self, index, address, now)
    again = [
        InviteWorker(-1 - each.invitation, index, address)
        for each in effects
        if isinstance(each, InviteWorker)
    ]
    return effects + again


def once_only(self: Recruitment, invitation: int, code: int, message: str, now: float) -> list[Any]:
    effects = ENDED(self, invitation, code, message, now)
    for task in self._tasks.values():  # reach: plants bugs
        task.retry_at = inf if task.retry_at > now else task.retry_at
    return effects


def any_reply_counts(
    self: Recruitment, invitation: int, code: int, message: str, now: float
) -> list[Any]:
    if invitation not in self._invitations:  # reach: plants bugs
        for task in self._tasks.values():  # reach: plants bugs
            task.accepted = True
    return ENDED(self, invitation, code, message, now)


def present_is_enough(self: Recruitment, index: int, task: Any) -> bool:
    return index in self._present  # reach: plants bugs


def accepted_is_enough(self: Recruitment, index: int, task: Any) -> bool:
    return bool(task.accepted)


def never_works(self: Recruitment, index: int, task: Any) -> bool:
    return False


def nothing(self: Recruitment, *args: Any) -> list[Any]:
    return []


def no_refusal(self: Recruitment, now: float) -> None:
    return None


BUGS: list[tuple[str, Any, str, Any, str]] = [
    (
        "a dropped worker keeps its invitation",
        Recruitment,
        "drop",
        leaves_the_invitation,
        "recruitment R1",
    ),
    ("a worker is invited twice at a time", Recruitment, "want", wanted_twice, "recruitment R1"),
    (
        "no invitation follows a failed one",
        Recruitment,
        "invitation_ended",
        once_only,
        "recruitment R2",
    ),
    (
        "a dropped invitation has an effect",
        Recruitment,
        "invitation_ended",
        any_reply_counts,
        "recruitment R",
    ),
    (
        "a worker that is present is not invited",
        Recruitment,
        "_works",
        present_is_enough,
        "recruitment R",
    ),
    (
        "a worker that has ended counts as recruited",
        Recruitment,
        "_works",
        accepted_is_enough,
        "recruitment R",
    ),
    ("a worker that works is invited again", Recruitment, "_works", never_works, "recruitment R"),
    (
        "a change of the members is not heard",
        Recruitment,
        "members_changed",
        nothing,
        "recruitment R",
    ),
    ("a refusal is never reported", Recruitment, "refusal", no_refusal, "recruitment R5"),
    (
        "a worker of another program refuses at once",
        recruitment_machine,
        "INVITE_PATIENCE_S",
        0.0,
        "recruitment R5",
    ),
    ("every error passes", recruitment_machine, "PASSING", tuple(range(17)), "recruitment R5"),
]


def first_complaint(seed: int) -> str | None:
    """What the simulation says of a seed; "" where the machine itself stumbles."""
    try:
        simulate_recruitment(seed)
    except AssertionError as error:
        return str(error)
    except KeyError:
        return ""
    return None


@pytest.mark.parametrize(
    ("what", "owner", "name", "bug", "said"), BUGS, ids=[bug[0] for bug in BUGS]
)
def test_simulation_finds_bug(
    what: str, owner: Any, name: str, bug: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    found = next(
        (found for seed in range(SEEDS_MAX) if (found := first_complaint(seed)) is not None), None
    )
    assert found is not None, f"{SEEDS_MAX} seeds did not find that {what}"
    assert found.startswith(said) or not found, "found, but by another promise"
