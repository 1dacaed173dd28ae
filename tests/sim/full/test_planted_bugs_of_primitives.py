"""Does the simulation of locks, semaphores, queues and events find bugs? One bug is planted at a
time; within SEEDS_MAX seeds it must report a broken promise."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from tests.sim.planted import Plant, around, expect_report
from tests.sim.simulations.primitives import LEASE_S, simulate_primitives
from zmqdist.coordination.primitives_client_machine import PrimitivesClient
from zmqdist.coordination.primitives_machine import Primitives
from zmqdist.coordination.replies import ReplyValue

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 300


def unconfirmed(
    former: Any, self: Any, ticket: Any, client: int, confirmed: Any, withdrawn: Any, now: float
) -> Any:
    return former(self, ticket, client, (), withdrawn, now)


def not_withdrawn(
    former: Any, self: Any, ticket: Any, client: int, confirmed: Any, withdrawn: Any, now: float
) -> Any:
    return former(self, ticket, client, confirmed, (), now)


def items_vanish(former: Any, self: Any, client: int) -> Any:
    """What a dead client has received counts as confirmed."""
    self.renewed(None, client, range(1, 2000), (), 0.0)
    return former(self, client)


def bounded(former: Any, self: Any, ticket: Any, request: Any, now: float) -> Any:
    return former(self, ticket, request._replace(due=inf), now)


def twice(former: Any, self: Any, ticket: Any, request: Any, now: float) -> Any:
    """A put is carried out a second time under another number."""
    effects = former(self, ticket, request, now)
    if request.verb == "put" and ReplyValue(ticket, True) in effects:
        former(self, None, request._replace(number=-request.number), now)
    return effects


def after_end(former: Any, self: Any, key: Any, now: float) -> Any:
    return former(self, key, now - 10 * LEASE_S)


BUGS: list[tuple[str, Plant, str | tuple[str, ...]]] = [
    (
        "a new keeper does not wait for holders",
        around(
            Primitives,
            "__init__",
            lambda former, self, lease_s, settled_at, **more: former(self, lease_s, -inf, **more),
        ),
        "primitives P1",
    ),
    (
        "a lease is longer for the client than for the keeper",
        around(
            Primitives,
            "__init__",
            lambda former, self, lease_s, settled_at, **more: former(
                self, lease_s / 3, settled_at, **more
            ),
        ),
        "primitives P1",
    ),
    (
        "a new keeper does not restore places",
        around(
            Primitives,
            "opened",
            lambda former, self, ticket, client, holds, *rest: [
                ReplyValue(effect.ticket, [hold.number for hold in holds])
                if effect.ticket is ticket
                else effect
                for effect in former(self, ticket, client, (), *rest)
            ],
        ),
        "primitives P1",
    ),
    (
        "fences begin anew with each keeper",
        around(
            Primitives,
            "__init__",
            lambda former, self, lease_s, settled_at, **more: former(self, lease_s, settled_at),
        ),
        "primitives P1",
    ),
    ("items vanish with their getters", around(Primitives, "lost", items_vanish), "primitives P5"),
    ("places are held after the lease", around(PrimitivesClient, "hold", after_end), "primitives"),
    ("releases are ignored", around(Primitives, "renewed", not_withdrawn), "primitives P4"),
    ("confirmations are ignored", around(Primitives, "renewed", unconfirmed), "primitives P5"),
    (
        "dead clients keep their places",
        around(
            Primitives,
            "ticked",
            lambda former, self, now: former(self, now) if now < 4 * LEASE_S else [],
        ),
        ("primitives P", "a machine sets a deadline"),
    ),
    (
        "dropped requests stay in their lines",
        around(Primitives, "dropped", lambda former, self, client, number: []),
        ("primitives P", "a call is answered twice"),
    ),
    ("a put is carried out twice", around(Primitives, "requested", twice), "primitives P"),
    ("a late request waits on", around(Primitives, "requested", bounded), "primitives P"),
]


def complaint(seed: int) -> str | None:
    try:
        simulate_primitives(seed)
    except (AssertionError, KeyError) as error:
        return str(error).strip("'")
    return None


@pytest.mark.parametrize(("bug", "plant", "promise"), BUGS, ids=[row[0] for row in BUGS])
def test_simulation_finds_bug(
    bug: str, plant: Plant, promise: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    expect_report(complaint, SEEDS_MAX, bug, promise)
