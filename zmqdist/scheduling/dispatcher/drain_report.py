"""What becomes of everything that a worker has when it is drained: a record, and the sentences about it. No I/O.

A drain is refused where it would lose what no other worker can make again: kept values without a lineage, work that waits for this worker
alone, and data tasks whose rest no other worker reads. What the programs did not say counts as lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from zmqdist.data.service.dispatcher.machine.snapshot import DataTaskRow, SnapshotStreamRow
from zmqdist.events import Peer
from zmqdist.limits import DESCRIBED_S
from zmqdist.messages import WorkDescribed
from zmqdist.scheduling.dispatcher.records import WorkerHoldings

NAMES_SHOWN_MAX: Final = 10
"""How many names a sentence has."""


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a worker has, by names such as "sum-12": function and number of the work item.

    Attributes:
      recomputed: kept values with a lineage.
      lost: kept values without one.
      unknown: how many kept values there are about which their programs said nothing in time.
      running: functions that run.
      pinned: functions that wait for this worker alone.
      resources: per-worker resources of the programs.
      data: tasks of the data service.
      streams: streams of distributed snapshots that it writes.
    """

    worker: str
    recomputed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    unknown: int = 0
    running: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    data: tuple[DataTaskRow, ...] = ()
    streams: tuple[SnapshotStreamRow, ...] = ()

    @property
    def losses(self) -> list[str]:
        """The sentences for which the drain is refused."""
        stranded = [f"{each.job} ({each.mode})" for each in self.data if not each.moves]
        sentences = []
        if self.lost:
            sentences.append(_listed(self.lost, "kept value that has no lineage", "kept values that have no lineage"))
        if self.unknown:
            silent = f"about which their programs said nothing within {DESCRIBED_S:g} s"
            sentences.append(f"{_count(self.unknown, 'kept value')} {silent}, so they may have no lineage")
        if self.pinned:
            only = f"that only {self.worker} may run"
            sentences.append(_listed(self.pinned, f"function {only}", f"functions {only}"))
        if stranded:
            nobody_else = "whose rest no other worker reads"
            sentences.append(_listed(stranded, f"data task {nobody_else}", f"data tasks {nobody_else}"))
        return sentences

    @property
    def lines(self) -> list[str]:
        """What becomes of everything, one sentence each; empty if the worker has nothing."""
        moved = [f"{each.job} ({each.mode})" for each in self.data if each.moves]
        kept = "kept value with a lineage, computed again when it is needed"
        every = "kept values with a lineage, computed again when they are needed"
        sentences = [f"lost: {each}" for each in self.losses]
        if self.recomputed:
            sentences.append("recomputed: " + _listed(self.recomputed, kept, every))
        if self.running:
            sentences.append("finished within the grace, else run elsewhere: " + _listed(self.running, "function"))
        if self.resources:
            sentences.append(
                "built again elsewhere, without its state: " + _listed(self.resources, "per-worker resource")
            )
        if moved:
            sentences.append("read on by other workers: " + _listed(moved, "data task"))
        for moves, who in ((True, "other workers"), (False, "the next worker that joins")):
            if streams := [f"{each.path} (stream {each.stream})" for each in self.streams if each.moves == moves]:
                sentences.append(f"continued by {who}: " + _listed(streams, "snapshot stream"))
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return the record for a reply, with its sentences."""
        return {
            "worker": self.worker,
            "lines": self.lines,
            "losses": self.losses,
            "lost": list(self.lost),
            "unknown": self.unknown,
            "recomputed": list(self.recomputed),
            "running": list(self.running),
            "pinned": list(self.pinned),
            "resources": list(self.resources),
            "data": [[each.job, each.mode, each.moves] for each in self.data],
            "streams": [[each.path, each.stream, each.moves] for each in self.streams],
        }


def report_of(
    holdings: WorkerHoldings,
    data: Sequence[DataTaskRow],
    streams: Sequence[SnapshotStreamRow],
    in_question: Mapping[Peer, Collection[int]],
    replies: Mapping[Peer, WorkDescribed],
) -> DrainReport:
    """Put together what the dispatcher knows and what the programs replied. A value that a program was asked about and does not name is not
    needed any more.

    Args:
      in_question: by program, the work items that it was asked to name.
    """
    described = {peer: {work: (name, again) for work, name, again in reply.works} for peer, reply in replies.items()}
    order = sorted(holdings.kept, key=lambda item: item[1])
    kept = [described[peer][work] for peer, work in order if peer in described and work in described[peer]]

    def names(items: Sequence[tuple[Peer, int]]) -> tuple[str, ...]:
        return tuple(described.get(peer, {}).get(work, (f"work item {work}", False))[0] for peer, work in items)

    return DrainReport(
        worker=holdings.worker,
        recomputed=tuple(name for name, again in kept if again),
        lost=tuple(name for name, again in kept if not again),
        unknown=sum(peer not in described or work not in in_question[peer] for peer, work in holdings.kept),
        running=names(holdings.running),
        pinned=names(holdings.pinned),
        resources=tuple(name for reply in replies.values() for name in reply.resources),
        data=tuple(data),
        streams=tuple(streams),
    )


def _listed(names: Sequence[str], one: str, many: str = "") -> str:
    """Return "3 kept values: sum-1, sum-2, sum-3", with the first names."""
    more = "" if len(names) <= NAMES_SHOWN_MAX else f" and {len(names) - NAMES_SHOWN_MAX} more"
    return f"{_count(len(names), one, many)}: {', '.join(names[:NAMES_SHOWN_MAX])}{more}"


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
