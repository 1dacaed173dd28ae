"""The record that the RPC method `facts` returns, from the machine of a dispatcher. No I/O.

docs/facts.md has the keys of the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from operator import itemgetter
from typing import Any, Final

from zmqdist.limits import ACTORS_SHOWN_MAX, COORDINATORS_SHOWN_MAX
from zmqdist.messages import SlotFacts, WorkerFigures
from zmqdist.scheduling.dispatcher.facts import FunctionTotals, percentile
from zmqdist.scheduling.dispatcher.machine import Broker, WorkerRow
from zmqdist.scheduling.dispatcher.membership_and_leases import Member
from zmqdist.scheduling.dispatcher.records import RUNNING, Lease
from zmqdist.scheduling.dispatcher.wait_reasons import waiting_rows

VERSION: Final = 1
"""The version of the record; a change of the meaning of a key raises it."""

COUNTED_PER_S: Final = 100_000
"""Queued items that are counted by function, in each second; a count takes 0.1 us an item."""

_function_of = itemgetter(3)


class FactsRecord:
    """Makes the record of one dispatcher, and remembers the last count of its queues."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._facts = broker.dispatch.facts
        self._queued: Counter[str] = Counter()
        self._count_at = 0.0

    def make(self, since: int, *, timeline: bool, now: float, to_unix_s: float) -> dict[str, Any]:
        """Return the record, without the keys that only the runtime knows.

        Args:
          since: the lowest `seq` of failures, slot deaths, refusals and runs in the record.
          timeline: whether the record has the runs that have ended.
          now, to_unix_s: the machine's time, and what makes it seconds since 1970.
        """
        broker, facts = self._broker, self._facts
        snapshot = broker.snapshot()
        waiting, waiting_more = waiting_rows(broker.dispatch)
        last = snapshot.last_slot_death
        members = broker.membership.members
        names = {member.name: member for member in members.values()}
        workers = [self._worker(row, names[row.name], now) for row in snapshot.workers]
        functions = self._functions(now)

        def since_1970(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{**entry, "at": entry["at"] + to_unix_s} for entry in entries]

        record = {
            "version": VERSION,
            "totals": {
                **asdict(facts.totals),
                "done": broker.dispatch.done,
                "failed": sum(totals.failed for totals in facts.functions.values()),
            },
            "queued": snapshot.queued,
            "workers": workers,
            "functions": functions,
            "waiting": [asdict(row) for row in waiting],
            "waiting_more": waiting_more,
            "coordinators": [asdict(row) for row in snapshot.coordinators[:COORDINATORS_SHOWN_MAX]],
            "coordinators_more": max(0, len(snapshot.coordinators) - COORDINATORS_SHOWN_MAX),
            "actors": [self._actor(row) for row in snapshot.actors[:ACTORS_SHOWN_MAX]],
            "actors_more": max(0, len(snapshot.actors) - ACTORS_SHOWN_MAX),
            "demands": [asdict(row) for row in snapshot.demands],
            "losses_count": snapshot.losses_count,
            "losses": [
                {
                    "name": loss.name,
                    "reason": loss.reason,
                    "exit_code": loss.exit_code,
                    "ago_s": now - loss.at,
                    "last_lines": loss.log,
                }
                for loss in broker.membership.losses
            ],
            "slot_deaths_count": snapshot.slot_deaths,
            "last_slot_death": last
            and {"name": last[0], "exit_code": last[1], "ago_s": now - last[2]},
            "failures": since_1970(facts.failures.since(since)),
            "slot_deaths": since_1970(facts.slot_deaths.since(since)),
            "refusals": since_1970(facts.refusals.since(since)),
            "next": facts.next,
        }
        if timeline:
            record["timeline"] = {
                "dropped": facts.dropped,
                "events": facts.runs_since(since, to_unix_s),
            }
        return record

    def _functions(self, now: float) -> list[dict[str, Any]]:
        facts, dispatch = self._facts, self._broker.dispatch
        running: Counter[str] = Counter()
        for load in dispatch.loads.values():
            for lease in load.leases.values():
                if lease.state in RUNNING:
                    running[facts.name_of(lease)] += 1
        if now >= self._count_at:
            self._count_queued()
            self._count_at = now + dispatch.placement.queued / COUNTED_PER_S
        elif not dispatch.placement.queued:
            self._queued.clear()
        names = dict.fromkeys([*facts.functions, *running, *self._queued])
        none = FunctionTotals()
        rows = [
            {
                **facts.functions.get(name, none).row(name),
                "running": running[name],
                "queued": self._queued[name],
            }
            for name in names
        ]
        rows.sort(key=lambda row: (-row["sum_s"], -row["running"], -row["queued"]))
        return rows

    def _count_queued(self) -> None:
        """Count the waiting items by function."""
        facts = self._facts
        self._queued.clear()
        for session in self._broker.dispatch.sessions.values():
            numbers: Counter[int] = Counter()
            for part in session.with_detached:
                for queue in part.queues.values():
                    for band in queue.bands:
                        numbers.update(map(_function_of, band.items))
                        numbers.update(map(_function_of, band.report_before_start))
            for fn, count in numbers.items():
                self._queued[facts.name(session.coordinator, fn)] += count

    def _worker(self, row: WorkerRow, member: Member, now: float) -> dict[str, Any]:
        report, at = self._facts.reports.get(member, (None, now))
        figures = WorkerFigures() if report is None or report.figures is None else report.figures
        leases = self._broker.dispatch.loads[member].leases
        fields = {key: value for key, value in asdict(row).items() if not key.endswith("_at")}
        return {
            **fields,
            "idle_s": now - row.heard_at,
            "age_s": now - row.joined_at,
            "failed": self._facts.failed_at.get(member, 0),
            **{name: getattr(figures, name) for name in figures.__struct_fields__},
            "slots_now": [
                self._slot(slot, leases, now - at) for slot in (report.slots if report else ())
            ],
        }

    def _slot(self, slot: SlotFacts, leases: Mapping[int, Lease], age_s: float) -> dict[str, Any]:
        lease = leases.get(slot.lease) if slot.lease else None
        row: dict[str, Any] = {
            "slot": slot.slot,
            "pid": slot.pid,
            "state": slot.state[:32],
            "function": "",
            "coordinator": 0,
            "work": 0,
            "attempt": 0,
            "since_s": 0.0,
            "rss_bytes": slot.rss_bytes,
            "cpu_percent": slot.cpu_percent,
        }
        if lease is not None:
            row |= {
                "function": self._facts.name_of(lease),
                "coordinator": lease.session.coordinator,
                "work": lease.work,
                "attempt": lease.attempt,
                "since_s": slot.since_s + age_s,
            }
        elif slot.lease:
            row["state"] = "idle"  # it has ended since the report
        return row

    def _actor(self, row: Any) -> dict[str, Any]:
        fields = asdict(row)
        totals = self._facts.actors.get(row.actor)
        facts = totals and totals.facts
        return {
            **fields,
            "calls": facts.calls if facts else 0,
            "failed": facts.failed if facts else 0,
            "waiting": facts.waiting if facts else 0,
            "calls_per_s": totals.calls_per_s if totals else 0.0,
            "p50_s": percentile(totals.buckets, 0.5) if totals else 0.0,
            "p99_s": percentile(totals.buckets, 0.99) if totals else 0.0,
            "pid": facts.pid if facts else 0,
            "rss_bytes": facts.rss_bytes if facts else 0,
            "cpu_percent": facts.cpu_percent if facts else 0.0,
        }
