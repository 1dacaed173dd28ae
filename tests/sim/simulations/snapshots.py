"""A data service that writes snapshots, in steps that a seed chooses: the real machine of each
snapshot, models of folder and workers.

Faults: workers die, noticed by the dispatcher or not, and come back; the dispatcher counts a worker
as lost that continues to write; the dispatcher dies between a record and its reply, and restores
the machines from the folders; replies are lost; writing fails; a pipeline raises.

The simulation raises `Broken` if a promise of machine.py is broken, or if the chunks of a complete
snapshot do not hold each position once.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from zmqdist.data.service.snapshots import machine as m
from zmqdist.errors import DataLossError, OpError, ResourceExhaustedError

FAULTY_STEPS_MAX, STEPS_MAX = 400, 6000


class Broken(AssertionError):
    """A promise is broken."""


class Crashed(Exception):
    """The dispatcher has died between a record and its reply."""


@dataclass
class Folder:
    """The files on the disk. `numbers`: (stream, source, repetition) -> its positions, by the
    stream's own indexes."""

    counts: list[int]
    repetitions: list[int]
    records: list[m.Record] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    numbers: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    stream_done: set[int] = field(default_factory=set)
    stream_errors: dict[int, OpError] = field(default_factory=dict)
    done: bool = False
    error: OpError | None = None
    fences: dict[int, int] = field(default_factory=dict)
    checkpoints: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    chunks: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def write(self, record: m.Record) -> None:
        """Write a record, and check that it is allowed."""
        if self.done or (self.error is not None and not isinstance(record, m.SnapshotFailed)):
            raise Broken(f"P3: {record} after the end")
        match record:
            case m.OwnerChanged(stream, worker):
                others = [
                    each
                    for each, owner in self.owners.items()
                    if owner == worker and each not in self.stream_done
                ]
                if others:
                    raise Broken(f"P2: {worker} has stream {others[0]} and gets {stream}")
                self.owners[stream] = worker
            case m.PositionsGiven(stream, source, repetition, run):
                given = sum(
                    len(n) for (_, *key), n in self.numbers.items() if key == [source, repetition]
                )
                mine = self.numbers.setdefault((stream, source, repetition), [])
                if (
                    run.start != given
                    or run.local != len(mine)
                    or run.start + run.count > self.counts[source]
                ):
                    raise Broken(f"P1: {record} where {given} positions were handed out")
                mine += range(run.start, run.start + run.count)
            case m.SnapshotCompleted():
                if self.stream_done < set(self.owners):
                    raise Broken("P3: DONE before all streams are")
                self.done = True
            case m.SnapshotFailed(error):
                self.error = error
        self.records.append(record)

    def read(self) -> tuple[list[m.StreamAssignment], bool, OpError | None, list[OpError]]:
        """Return the content of the folder, as a dispatcher finds it after a restart."""
        streams = []
        for index, owner in sorted(self.owners.items()):
            state = m.StreamState.DONE if index in self.stream_done else m.StreamState.ASSIGNED
            streams.append(m.StreamAssignment(index, owner, state))
        for record in self.records:
            if isinstance(record, m.PositionsGiven):
                streams[record.stream].runs.setdefault(
                    (record.source, record.repetition), []
                ).append(record.run)
        failures = [
            error for index, error in self.stream_errors.items() if index not in self.stream_done
        ]
        return streams, self.done, self.error, failures


@dataclass
class Writer:
    """A worker's stream, from its checkpoint on. `places`: (source, repetition) -> the number of
    positions that it has used."""

    path: str
    stream: int
    incarnation: int
    places: dict[tuple[int, int], int]
    rest: list[tuple[int, int]]
    uncommitted: list[tuple[int, int, int]] = field(default_factory=list)
    left_done: bool = False


@dataclass
class WorkerModel:
    """A worker, and the streams that it writes, by snapshot."""

    address: str
    alive: bool = True
    writing: dict[str, Writer] = field(default_factory=dict)


class SnapshotWorld:
    """One run, in steps."""

    def __init__(self, seed: int, faults: float = 0.15) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.fails = faults > 0 and self.random.random() < 0.2
        self.concurrent_max = self.random.randint(1, 3)
        self.met: Counter[str] = Counter()
        self.trace: list[str] = []
        self._lives = 0
        self.folders: dict[str, Folder] = {}
        for number in range(self.random.randint(1, 4)):
            sources = self.random.randint(1, 2)
            counts = [self.random.randint(0, 40) for _ in range(sources)]
            self.folders[f"s{number}"] = Folder(
                counts, [self.random.randint(1, 2) for _ in range(sources)]
            )
        self.workers = [WorkerModel(f"w{number}") for number in range(self.random.randint(1, 4))]
        self.machines: dict[str, m.SnapshotMachine] = {}
        self.begin_dispatcher()

    # -- the dispatcher ----------------------------------------------------------------------------

    def begin_dispatcher(self) -> None:
        """Restore all machines from the folders. Owners that are dead, or do not come back, count
        as lost."""
        for path, folder in self.folders.items():
            machine = self.machines[path] = m.SnapshotMachine(
                path, folder.counts, folder.repetitions
            )
            self.carry_out(path, machine.restore(*folder.read()), certain=True)
            for address in machine.owners() - {
                worker.address for worker in self.workers if worker.alive
            }:
                machine.worker_lost(address)

    def carry_out(self, path: str, records: list[m.Record], certain: bool = False) -> None:
        """Write and apply records as manager.py does."""
        for record in records:
            if not certain and self.chance(0.1):
                self.met["writing fails"] += 1
                error = ResourceExhaustedError("no space left")
                for each in self.machines[path].not_written(record, error):
                    self.folders[path].write(each)
                raise error
            self.folders[path].write(record)
            if not certain and self.chance(0.05):
                self.met["the dispatcher dies"] += 1
                self.begin_dispatcher()
                raise Crashed
            self.machines[path].apply(record)

    def assign(self, worker: str) -> dict[str, int]:
        """Assign streams to a worker as manager.py does."""
        found = {}
        running = {path: machine for path, machine in self.machines.items() if not machine.over}
        for path, machine in running.items():
            stream, records = machine.assign(worker, may_begin=False)
            self.carry_out(path, records)
            if stream is not None:
                found[path] = stream
        owners = {path: machine.owners() for path, machine in running.items()}
        for path in m.begin_order(owners, found, self.concurrent_max):
            stream, records = self.machines[path].assign(worker)
            self.carry_out(path, records)
            if stream is not None:
                found[path] = stream
                break
        if len(found) > self.concurrent_max:
            raise Broken(f"P2: {worker} writes {len(found)} streams, at most {self.concurrent_max}")
        for path, stream in found.items():
            if self.folders[path].owners.get(stream) != worker:
                raise Broken(
                    f"P4: {worker} is told to write stream {stream} of {path}, of which the "
                    f"folder knows nothing"
                )
        return found

    def chance(self, share: float) -> bool:
        """Return whether a fault of this kind happens now; `share` is its part of all faults."""
        return self.random.random() < share * self.faults

    # -- the workers -------------------------------------------------------------------------------

    def poll(self, worker: WorkerModel) -> None:
        """Have a worker request its streams."""
        found = self.assign(worker.address)
        if self.lost():
            return
        worker.writing = {
            path: each for path, each in worker.writing.items() if found.get(path) == each.stream
        }
        for path, stream in found.items():
            if path not in worker.writing:
                self._lives += 1
                folder = self.folders[path]
                folder.fences[stream] = self._lives
                places = dict(folder.checkpoints.get(stream, {}))
                keys = [(s, r) for s, n in enumerate(folder.repetitions) for r in range(n)]
                worker.writing[path] = Writer(path, stream, self._lives, places, keys)

    def lost(self) -> bool:
        """Return whether a reply is lost on its way."""
        gone = self.chance(0.5)
        self.met["an answer is lost"] += gone
        return gone

    def write(self, worker: WorkerModel, writer: Writer) -> None:
        """Take a step of a stream: request positions, commit, or end."""
        folder = self.folders[writer.path]
        if self.fails and self.random.random() < 0.01:
            folder.stream_errors[writer.stream] = DataLossError("a bad file")
            del worker.writing[writer.path]
            self.carry_out(writer.path, self.failed(worker, writer))
        elif not writer.rest:
            self.end(worker, writer)
        elif self.random.random() < 0.2:
            if not self.commit(writer):
                del worker.writing[writer.path]
        else:
            self.ask(worker, writer)

    def failed(self, worker: WorkerModel, writer: Writer) -> list[m.Record]:
        """Report a failed stream to the dispatcher, which writes its records."""
        self.met["a pipeline raises"] += 1
        return self.machines[writer.path].failed(
            worker.address, writer.stream, DataLossError("a bad file")
        )

    def ask(self, worker: WorkerModel, writer: Writer) -> None:
        """Request positions of the stream's current source and repetition."""
        key = writer.rest[0]
        local, folder = writer.places.get(key, 0), self.folders[writer.path]
        count = self.random.choice((1, 2, 8))
        machine = self.machines[writer.path]
        (start, number), records = machine.hand_out(
            worker.address, writer.stream, *key, local, count
        )
        self.carry_out(writer.path, records)
        if folder.owners[writer.stream] != worker.address:
            raise Broken(
                f"P2: {worker.address} gets positions of stream {writer.stream}, which is not its "
                f"own"
            )
        on_disk = folder.numbers.get((writer.stream, *key), [])[local : local + number]
        if on_disk != list(range(start, start + number)):
            raise Broken(
                f"P1: {worker.address} is told {start}+{number}, the folder says {on_disk}"
            )
        if self.lost():
            return
        if not number:
            writer.rest.pop(0)
        writer.uncommitted += [(*key, position) for position in range(start, start + number)]
        writer.places[key] = local + number

    def commit(self, writer: Writer) -> bool:
        """Publish the computed positions, unless another writer has taken over the stream."""
        folder = self.folders[writer.path]
        if folder.fences[writer.stream] != writer.incarnation:
            self.met["a former writer is refused"] += 1
            return False
        folder.chunks.update(writer.uncommitted)
        folder.checkpoints[writer.stream] = dict(writer.places)
        writer.uncommitted = []
        return True

    def end(self, worker: WorkerModel, writer: Writer) -> None:
        """Leave DONE, and report it until the dispatcher replies."""
        if not writer.left_done:
            if self.commit(writer):
                self.folders[writer.path].stream_done.add(writer.stream)
                writer.left_done = True
            else:
                del worker.writing[writer.path]
            return
        try:
            self.carry_out(
                writer.path, self.machines[writer.path].finished(worker.address, writer.stream)
            )
        except Crashed:
            return  # the worker sends the report again
        except OpError:
            self.met["an end is refused"] += 1
        if not self.lost():
            worker.writing.pop(writer.path, None)

    # -- steps -------------------------------------------------------------------------------------

    def run(self) -> SnapshotWorld:
        """Take steps until all snapshots are over. Raises Broken."""
        faulty_steps = self.random.randint(20, FAULTY_STEPS_MAX)
        for step in range(STEPS_MAX):
            if all(machine.over for machine in self.machines.values()):
                self.check_whole()
                return self
            if step == faulty_steps:
                self.faults = 0.0
                for worker in self.workers[:1]:  # the other workers stay away if they are away
                    worker.alive = True
            self.step()
        raise Broken(
            f"P5: not over after {STEPS_MAX} steps: "
            f"{[machine.mode for machine in self.machines.values()]}"
        )

    def step(self) -> None:
        """Cause a fault, or take a step of a worker."""
        worker = self.random.choice(self.workers)
        if self.chance(0.3):
            self.fault(worker)
        if not worker.alive:
            return
        try:
            if not worker.writing or self.random.random() < 0.1:
                self.poll(worker)
            else:
                self.write(worker, self.random.choice(list(worker.writing.values())))
        except (Crashed, OpError) as error:
            self.trace.append(f"{worker.address}: {error!r}")

    def fault(self, worker: WorkerModel) -> None:
        """Cause a fault of a worker or of the dispatcher."""
        match self.random.randrange(5):
            case 0 if worker.alive:
                self.met["a worker dies"] += 1
                worker.alive, worker.writing = False, {}
                self.lose(worker)
            case 0 | 1:
                worker.alive = True
            case 2:
                self.met["a worker is thought lost"] += 1
                self.lose(worker)
            case 3 | 4 as what:
                if what == 4:  # the host of both fails
                    worker.alive, worker.writing = False, {}
                self.met["the dispatcher dies"] += 1
                self.begin_dispatcher()

    def lose(self, worker: WorkerModel) -> None:
        """Have the dispatcher count a worker as lost."""
        for machine in self.machines.values():
            machine.worker_lost(worker.address)

    def check_whole(self) -> None:
        """Check that the chunks of a complete snapshot hold each position once, and that its
        machine knows of the end, even if writing it into the folder failed.
        """
        for path, folder in self.folders.items():
            whole = {
                (source, repetition, position)
                for source, (count, times) in enumerate(
                    zip(folder.counts, folder.repetitions, strict=True)
                )
                for repetition, position in product(range(times), range(count))
            }
            if folder.done and folder.chunks != Counter(whole):
                raise Broken(
                    f"P1: the chunks of {path} lack {whole - set(folder.chunks)}, or have some "
                    f"twice"
                )
            if folder.error is not None and not self.fails and not self.met["writing fails"]:
                raise Broken(f"P3: {path} has failed without a reason")
            if not (folder.done or folder.error is not None or self.met["writing fails"]):
                raise Broken(f"P3: {path} is over, and its folder does not say so")


def simulate_snapshots(seed: int, **options: Any) -> SnapshotWorld:
    """Run one seed. Raises Broken."""
    return SnapshotWorld(seed, **options).run()


__all__ = ["Broken", "SnapshotWorld", "simulate_snapshots"]
