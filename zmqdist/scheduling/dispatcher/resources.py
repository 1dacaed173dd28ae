"""What the workers have, what of it is in use, and for which request a worker is kept free. No I/O.

The dispatch of work (demands.py) and other parts of the dispatcher that place something at a worker
use one `Stocks`. The caller of `reserve` must call `release` with the grant when nothing of it
can be in use any more.

A *claimant* waits for resources, from `claim` to `drop_claim`. A claimant that has waited for
OVERTAKE_S is *owed*: `keep_free` then reserves for it alone the worker that lacks the least of its
request. A lasting reservation has no foreseeable end, so a worker is kept for a claimant only if the
request fits beside the lasting reservations.

Promises, checked by tests/scheduling/dispatcher/test_resources.py and by the simulation
    P1  the grants of a worker never exceed what it has; a device is granted whole to one lease, or
        in parts that are at most one device together
    P2  what is released is free again, and is in `changed`
    P3  after OVERTAKE_S no other claimant gets anything from the worker that is kept for a claimant

Not here: which claimants there are, and whether a worker may get work (demands.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from zmqdist.limits import OVERTAKE_S
from zmqdist.scheduling.shared.quantities import GPU, UNIT, Grant, Quantities, amounts_text

Claimant: TypeAlias = Hashable

KEPT_MAX = 16
"""The largest number of workers that are kept free at a time, so that a search has a bound."""

TEXT_WORKERS_MAX = 8
"""The largest number of different workers that a text lists."""


class Ledger:
    """What is free of the resources of one worker.

    Attributes:
      free: the free thousandths of each resource. Negative if a worker reports that more is in use
        than it has.
      devices: the free thousandths of each device.
    """

    __slots__ = ("devices", "free")

    def __init__(self, total: Quantities) -> None:
        self.free = dict(total)
        self.devices = [UNIT] * (self.free.get(GPU, 0) // UNIT)

    def fits(self, request: Quantities) -> bool:
        """Return whether the request could be granted now."""
        return all(
            self.free.get(name, 0) >= amount and (name != GPU or bool(self.devices_for(amount)))
            for name, amount in request
        )

    def devices_for(self, amount: int) -> tuple[int, ...]:
        """Return the devices for this many thousandths; () if there are none. A part of a device is
        taken from the device with the least that is enough."""
        if amount < UNIT:
            rest = [(free, device) for device, free in enumerate(self.devices) if free >= amount]
            return (min(rest)[1],) if rest else ()
        idle = [device for device, free in enumerate(self.devices) if free == UNIT]
        count = amount // UNIT
        return tuple(idle[:count]) if count <= len(idle) else ()

    def shortfall(self, request: Quantities) -> int:
        """Return how many thousandths are missing for the request, over all its resources."""
        return sum(max(0, amount - self.free.get(name, 0)) for name, amount in request)

    def change(self, grant: Grant, sign: int) -> None:
        """Add what a grant has (sign 1), or take it (sign -1)."""
        for name, amount in grant.quantities:
            self.free[name] = self.free.get(name, 0) + sign * amount
            if name == GPU:
                for device in grant.devices:
                    self.devices[device] += sign * min(amount, UNIT)


@dataclass(slots=True, eq=False)
class Stock:
    """One worker's resources.

    Attributes:
      now: what is free.
      beside_lasting: what would be free if there were only the lasting reservations.
    """

    total: Quantities
    now: Ledger
    beside_lasting: Ledger


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that waits. `worker` is the only worker that may satisfy it; "" means any."""

    request: Quantities
    since: float
    worker: str


@dataclass(slots=True)
class Stocks:
    """The resources of all workers; the module's docstring has the rules.

    Attributes:
      changed: the names of the workers that may satisfy more requests than before, until the owner
        clears it.
      kept: the claimant for which each worker is kept free.
      final_at: the time from which a request fails that no worker could satisfy, because no worker
        has joined or was lost for long enough.
    """

    changed: dict[str, None] = field(default_factory=dict)
    kept: dict[str, Claimant] = field(default_factory=dict)
    final_at: float = 0.0
    _stocks: dict[str, Stock] = field(default_factory=dict)
    _totals: Counter[Quantities] = field(default_factory=Counter)
    """How many workers have each total, because most workers of a cluster have the same."""
    _claims: dict[Claimant, Claim] = field(default_factory=dict)

    def add_worker(self, worker: str, total: Quantities) -> None:
        self._stocks[worker] = Stock(total, Ledger(total), Ledger(total))
        self._totals[total] += 1
        self.changed[worker] = None

    def remove_worker(self, worker: str) -> None:
        """Forget a worker that is lost, and all its grants."""
        total = self._stocks.pop(worker).total
        self._totals -= Counter([total])
        self.kept.pop(worker, None)
        self.changed.pop(worker, None)

    def fits(self, worker: str, request: Quantities) -> bool:
        """Return whether the worker could satisfy the request now, kept free or not."""
        return worker in self._stocks and self._stocks[worker].now.fits(request)

    def free(self, worker: str) -> Mapping[str, int]:
        """Return the free thousandths of each resource of a worker."""
        return self._stocks[worker].now.free

    def can_ever(self, request: Quantities, worker: str = "") -> bool:
        """Return whether a worker, or this one, has enough if nothing of it is in use. True as well
        if no worker is here that could be asked."""
        totals: Collection[Quantities] = self._totals
        if worker:
            totals = [self._stocks[worker].total] if worker in self._stocks else ()
        return not totals or any(Ledger(total).fits(request) for total in totals)

    def count_ever(self, request: Quantities, worker: str, most: int) -> int:
        """Return how many times a worker that is here could have this if nothing of it is in use,
        up to `most`."""
        ledger = Ledger(self._stocks[worker].total)
        for count in range(most):
            if not ledger.fits(request):
                return count
            ledger.change(Grant(request, ledger.devices_for(dict(request).get(GPU, 0))), -1)
        return most

    def reserve(
        self, worker: str, request: Quantities, claimant: Claimant = None, *, lasting: bool = False
    ) -> Grant | None:
        """Take what is requested from a worker. Return None if this does not fit, or if the worker
        is kept free for another claimant."""
        stock = self._stocks.get(worker)
        if stock is None or self.kept.get(worker, claimant) != claimant:
            return None
        if not stock.now.fits(request):
            return None
        gpus = dict(request).get(GPU)
        grant = Grant(request, () if gpus is None else stock.now.devices_for(gpus))
        self.occupy(worker, grant, lasting=lasting)
        return grant

    def occupy(self, worker: str, grant: Grant, *, lasting: bool = False) -> None:
        """Record a grant of an earlier dispatcher, which the worker reports as being in use."""
        self._change(worker, grant, -1, lasting)

    def release(self, worker: str, grant: Grant, *, lasting: bool = False) -> None:
        """Give back a grant. If the worker was lost since, its grants are forgotten already: then
        the caller must not call this."""
        self._change(worker, grant, 1, lasting)
        self.changed[worker] = None

    def claim(self, claimant: Claimant, request: Quantities, now: float, worker: str = "") -> None:
        """Record that a claimant begins to wait. No effect if it waits already."""
        if claimant not in self._claims:
            self._claims[claimant] = Claim(request, now, worker)

    def drop_claim(self, claimant: Claimant) -> None:
        """Record that a claimant no longer waits."""
        if self._claims.pop(claimant, None) is not None:
            for worker in [name for name, keeper in self.kept.items() if keeper == claimant]:
                del self.kept[worker]
                self.changed[worker] = None

    def keep_free(self, now: float) -> None:
        """Keep a worker free for each claimant that is owed and has none, in the order in which
        they began to wait."""
        for claimant, claim in self._claims.items():
            if now < claim.since + OVERTAKE_S or len(self.kept) >= KEPT_MAX:
                break  # the others wait for a shorter time
            if claimant in self.kept.values():
                continue
            names = (claim.worker,) if claim.worker else self._stocks
            able = [
                (self._stocks[name].now.shortfall(claim.request), name)
                for name in names
                if name in self._stocks
                and name not in self.kept
                and self._stocks[name].beside_lasting.fits(claim.request)
            ]
            if able:
                self.kept[min(able)[1]] = claimant

    def figures(self, worker: str) -> dict[str, tuple[float, float]]:
        """Return (what is in use, what there is) of each resource of a worker, in units."""
        stock = self._stocks[worker]
        return {
            name: ((amount - stock.now.free[name]) / UNIT, amount / UNIT)
            for name, amount in stock.total
        }

    def lack_text(self, request: Quantities, worker: str = "") -> str:
        """Return what to say of a request that no worker, or not this one, could satisfy."""
        where = f"{worker}, to which it is pinned, has" if worker else "a worker has"
        return (
            f"it needs {amounts_text(request)}, which is more than {where} in all "
            f"({self.text()}): ask for less, or start a worker with resources= for it"
        )

    def text(self) -> str:
        """Return what the workers have, such as "worker:0 has gpu 2; 3 others have nothing"."""
        totals = self._totals
        first: dict[Quantities, str] = {}
        for name, stock in self._stocks.items():
            first.setdefault(stock.total, name)
        parts = []
        for total, name in [*first.items()][:TEXT_WORKERS_MAX]:
            subject = name if totals[total] == 1 else f"{totals[total]} workers such as {name}"
            verb = "has" if totals[total] == 1 else "have"
            parts.append(f"{subject} {verb} {amounts_text(total) or 'nothing'}")
        more = len(first) - len(parts)
        return "; ".join([*parts, *([f"{more} more kinds of workers"] if more else [])])

    def _change(self, worker: str, grant: Grant, sign: int, lasting: bool) -> None:
        stock = self._stocks[worker]
        stock.now.change(grant, sign)
        if lasting:
            stock.beside_lasting.change(grant, sign)
