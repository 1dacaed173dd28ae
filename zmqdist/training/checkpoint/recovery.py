"""`Recovery`: restores the variables of a parameter server that has crashed and was restarted,
while the program goes on.

Rules
    One thread for each parameter server of a strategy checks, several times a second, whether the
    server still has the strategy's session. A restarted server does not have the session. The
    thread then recreates the server's variables from the newest usable checkpoint, each variable
    atomically with its slots and its version. A variable that this checkpoint lacks gets its first
    value if `from_initial` allows it.

    If the strategy was made with `recovery_s`, accesses to a lost variable wait until the variable
    is restored, on workers as well. Without `recovery_s` these accesses raise PSUnavailableError.
    Other parameter servers keep their values, so after a recovery some shards are older than
    others.

    The log and `strategy.recoveries` report the losses. No two values of a variable have the same
    version, because the high bits of a version are the incarnation of the variable, and each
    recovery begins a new incarnation. This holds even if the server has made updates after the last
    check. With each variable, a checkpoint also stores the keys of the updates that the variable's
    value contains (`schedule(once=True)`), and the number of the variable's last synchronous step.
    So the parameter server recognizes a repeated run of a function after a recovery, too.

Not here: saving (manager.py), and restarting the process, which `zmqdist launch` does if `restarts`
allows it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from types import TracebackType

from zmqdist import clock as time
from zmqdist.errors import FailedPreconditionError, OpError, UnavailableError
from zmqdist.field_types import checked
from zmqdist.limits import PS_VERSION_INCARNATION_SHIFT, RECOVERY_POLL_S
from zmqdist.training.checkpoint.checkpoint_iterator import checkpoints
from zmqdist.training.checkpoint.manager import CheckpointManager
from zmqdist.training.checkpoint.manifest import Part
from zmqdist.training.checkpoint.reader import CheckpointReader
from zmqdist.training.checkpoint.save_restore import check
from zmqdist.training.checkpoint.structure import Leaf, leaves, shards_of
from zmqdist.training.strategy import ParameterServerStrategy
from zmqdist.training.variable_storage import RemoteStorage

log = logging.getLogger("zmqdist.checkpoint")


@dataclass(frozen=True)
class Recovered:
    """The report of one recovery. It says what happened to each variable of a restarted parameter
    server.

    >>> with zd.local_cluster(workers=1, ps=1) as cluster:
    ...     with zd.ParameterServerStrategy(cluster, recovery_s=60) as other, other.scope():
    ...         weights = zd.Variable(np.ones(2))
    ...         checkpoint = zd.checkpoint.Checkpoint(weights=weights)
    ...         manager = zd.checkpoint.CheckpointManager(checkpoint, f"{folder}/lost", 3)
    ...         with zd.checkpoint.Recovery(other, manager):
    ...             path = manager.save(1)
    ...             cluster.kill_ps(0)
    ...             cluster.restart_ps(0)
    ...             print(weights.numpy())
    ...         print(other.recoveries[0])
    [1. 1.]
    ps:0 came back; restored 1 variable ...

    Attributes:
      task: name of the parameter server, such as "ps:1".
      restored: names of the variables and shards that were restored from the checkpoint at `path`.
      began_anew: names of the variables and shards that got their first values again.
      lost: names of the variables and shards that were not recreated, because the newest usable
        checkpoint lacks them.
      path: path of the checkpoint; None if no checkpoint was used.
      age_s: seconds from the save of the newest usable checkpoint to the recovery; 0 if there is
        none.
      updates_lost: lower bound of the number of updates that are lost. Updates between the last
        check and the crash are not counted.
    """

    task: str
    restored: tuple[str, ...]
    began_anew: tuple[str, ...]
    lost: tuple[str, ...]
    path: str | None
    age_s: float
    updates_lost: int

    def __str__(self) -> str:
        clauses = []
        if self.restored:
            clauses.append(
                f"restored {_variables(self.restored)} from {self.path}, {self.age_s:.0f} s old"
            )
        if self.began_anew:
            clauses.append(f"{_variables(self.began_anew)} began anew with the first value")
        if self.lost:
            clauses.append(
                f"lost, because the newest usable checkpoint does not hold them: "
                f"{', '.join(self.lost)}"
            )
        if self.updates_lost:
            updates = "update is" if self.updates_lost == 1 else "updates are"
            clauses.append(f"at least {self.updates_lost:,} later {updates} lost")
        else:
            clauses.append("updates of the last moments may be lost")
        return f"{self.task} came back; " + "; ".join(clauses)


@dataclass(frozen=True)
class RecoverySnapshot:
    """The state of a `Recovery` at one moment.

    >>> checkpoint = zd.checkpoint.Checkpoint(epoch=0)
    >>> manager = zd.checkpoint.CheckpointManager(checkpoint, f"{folder}/figures", 3)
    >>> with zd.checkpoint.Recovery(strategy, manager) as recovery:
    ...     print(recovery.snapshot())
    RecoverySnapshot(...)

    Attributes:
      watching: the parameter servers that are watched, such as "ps:1"; empty after `close` or the
        end of the strategy.
      versions: the last seen version of each variable and shard that has a handle in the program,
        by name.
    """

    watching: tuple[str, ...]
    versions: dict[str, int]


@checked
class Recovery:
    """Watches the parameter servers of a strategy, and restores lost variables. A with-statement
    closes the Recovery.

    >>> with strategy.scope():
    ...     weights = zd.Variable(np.zeros(2))
    >>> checkpoint = zd.checkpoint.Checkpoint(weights=weights)
    >>> manager = zd.checkpoint.CheckpointManager(checkpoint, f"{folder}/recovered", 3)
    >>> with zd.checkpoint.Recovery(strategy, manager) as recovery:
    ...     path = manager.save(1)  # a lost server gets the values of this checkpoint
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        manager: CheckpointManager,
        *,
        from_initial: bool = False,
    ) -> None:
        """Start one thread for each parameter server, to watch the server.

        Args:
          strategy: the strategy. Make it with `recovery_s`, so that accesses to lost variables wait
            for the recovery.
          manager: its directory holds the checkpoints, and its `checkpoint` names the variables.
          from_initial: whether a variable that the newest usable checkpoint lacks gets its first
            value again. This needs a strategy with `recovery_s`, because other strategies do not
            keep first values.

        Raises:
          ValueError: `from_initial` is True, and the strategy was made without `recovery_s`.
        """
        self._session = strategy.ps_session
        if from_initial and not self._session.keeps_initial_values:
            raise ValueError(
                "from_initial=True needs a strategy with recovery_s, which keeps the first values"
            )
        self._manager = manager
        self._from_initial = from_initial
        self._recoveries: list[Recovered] = strategy.recoveries
        self._versions: list[dict[int, int]] = [{} for _ in self._session.addresses]
        self._due = [False] * len(self._session.addresses)
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._watch, args=(ps,), name=f"zmqdist-recovery-{ps}", daemon=True
            )
            for ps in range(len(self._session.addresses))
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            # end the started threads here, because the caller gets no object that it could close
            self._closing.set()
            raise

    def close(self) -> None:
        """Stop watching, and wait until a recovery in progress has ended. A second call does
        nothing.

        >>> checkpoint = zd.checkpoint.Checkpoint(epoch=0)
        >>> manager = zd.checkpoint.CheckpointManager(checkpoint, f"{folder}/closed", 3)
        >>> zd.checkpoint.Recovery(strategy, manager).close()
        """
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def snapshot(self) -> RecoverySnapshot:
        """Return the watched servers and the versions seen so far, without sending a message. Any
        thread may call this.

        >>> checkpoint = zd.checkpoint.Checkpoint(epoch=0)
        >>> manager = zd.checkpoint.CheckpointManager(checkpoint, f"{folder}/looked-at", 3)
        >>> with zd.checkpoint.Recovery(strategy, manager) as recovery:
        ...     print(type(recovery.snapshot()).__name__)
        RecoverySnapshot
        """
        last_versions = {
            number: version
            for versions in list(self._versions)
            for number, version in versions.copy().items()
        }
        names = {storage.ref.number: storage.ref.name for storage in self._session.storages()}
        return RecoverySnapshot(
            watching=tuple(
                f"ps:{ps}" for ps, thread in enumerate(self._threads) if thread.is_alive()
            ),
            versions={
                name: last_versions[number]
                for number, name in names.items()
                if number in last_versions
            },
        )

    def __enter__(self) -> Recovery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _watch(self, ps: int) -> None:
        away, logged = False, ""
        while not self._closing.wait(RECOVERY_POLL_S):
            try:
                self._look(ps)
                away, logged = False, ""
            except UnavailableError as error:
                if not away:
                    log.warning(
                        "ps:%d is lost; its variables are restored when it has been restarted: %s",
                        ps,
                        error,
                    )
                away = True
                if why := self._session.clients[ps].gone():
                    log.error("the variables of ps:%d are not restored: %s", ps, why)
                    return
            except FailedPreconditionError:
                # the strategy was closed, so no variable is needed any more
                return
            except BaseException as error:
                if logged != str(error):
                    # Log a repeated error only once, because the attempts follow each other in
                    # fractions of a second.
                    log.exception(
                        "the variables of ps:%d could not be restored; the attempts go on", ps
                    )
                logged = str(error)

    def _look(self, ps: int) -> None:
        """Check one parameter server. If the server does not have the session, recover its
        variables. Record the versions of the variables.
        Raises UnavailableError if the server is lost.
        """
        if not self._session.open_at(ps) and not self._due[ps]:
            self._due[ps] = True
            # Before this attempt recreates a variable, record the versions that the program has
            # seen. Afterwards the reply to an access that waited may set `last_version` to a
            # version of the new incarnation, even if this attempt fails.
            for storage in self._storages(ps):
                number = storage.ref.number
                self._versions[ps][number] = max(
                    self._versions[ps].get(number, 1), storage.last_version
                )
        if self._due[ps]:
            self._recover(ps)
            self._due[ps] = False
        variables = self._session.clients[ps].status().get_value()["variables"]
        self._versions[ps].update(
            {
                row["number"]: row["version"]
                for row in variables
                if row["session"] == self._session.number
            }
        )

    def _recover(self, ps: int) -> None:
        handles = {
            name: leaf for name, leaf in leaves(self._manager.checkpoint).items() if leaf.is_handle
        }
        shards = self._shards_by_number(handles)
        storages = self._storages(ps)
        names = {
            shards[storage.ref.number][0] for storage in storages if storage.ref.number in shards
        }
        reader = self._reader({name: handles[name] for name in names})
        restored, anew, lost = [], [], []
        updates_lost = 0
        incarnation, versions = next(self._session.incarnations), {}
        for storage in storages:
            ref, changes = storage.ref, 1
            name, start, stop = shards.get(ref.number, ("", 0, 0))
            entry = None if reader is None else reader.manifest.entries.get(name)
            if reader is not None and entry is not None:
                part: Part = reader.rows(name, start, stop)
                # Use the update keys and the version only if this program has saved them, because
                # they mean nothing in another program.
                # keys and counts of another variable mean nothing for this one
                own = part.source == (ref.session, ref.number)
                changes = _changes(part.version) if own else 1
                earlier = _version(incarnation, changes), part.slots, part.once if own else b""
                self._session.clients[ps].create(ref, ref.fit(part.value), earlier).get_value()
                restored.append(ref.name)
            elif self._from_initial:
                self._session.recreate(storage, _version(incarnation, changes))
                anew.append(ref.name)
            else:
                lost.append(ref.name)
            updates_lost += max(0, _changes(self._versions[ps].get(ref.number, 1)) - changes)
            versions[ref.number] = _version(incarnation, changes)
        # Update `_versions` only at the end, because if the recovery fails halfway, the next
        # attempt needs the old versions to count all lost updates.
        self._versions[ps].update(versions)
        age_s = 0.0 if reader is None else max(0.0, time.time() - reader.manifest.saved_at)
        path = reader.path if reader is not None and restored else None
        self._report(
            Recovered(
                f"ps:{ps}", tuple(restored), tuple(anew), tuple(lost), path, age_s, updates_lost
            )
        )

    def _storages(self, ps: int) -> list[RemoteStorage]:
        """Return the storages of the variables and shards on one parameter server."""
        return [storage for storage in self._session.storages() if storage.ref.task == f"ps:{ps}"]

    def _report(self, recovered: Recovered) -> None:
        self._recoveries.append(recovered)
        log.log(logging.ERROR if recovered.lost else logging.WARNING, "%s", recovered)

    def _shards_by_number(self, handles: dict[str, Leaf]) -> dict[int, tuple[str, int, int]]:
        """Return the places of variables in a checkpoint, by the variables' numbers. A place is
        (name, first row, row after the last)."""
        shards = {}
        for name, leaf in handles.items():
            for shard in shards_of(leaf.value):
                storage = shard.variable.storage
                if isinstance(storage, RemoteStorage) and storage.session == self._session.number:
                    shards[storage.ref.number] = (name, shard.start, shard.stop)
        return shards

    def _reader(self, needed: dict[str, Leaf]) -> CheckpointReader | None:
        """Open the newest usable checkpoint whose entries have the shapes and dtypes of `needed`.
        Return None if there is no such checkpoint.
        """
        for path, _ in reversed(checkpoints(self._manager.directory)):
            try:
                reader = CheckpointReader(path)
                for name in needed.keys() & set(reader.manifest.names):
                    check(reader, name, needed[name])
                reader.verify(needed)
                return reader
            except (OpError, ValueError) as error:
                log.error(
                    "a checkpoint cannot be used for the recovery, and an older one is tried: %s",
                    error,
                )
        return None


def _version(incarnation: int, changes: int) -> int:
    return incarnation << PS_VERSION_INCARNATION_SHIFT | changes


def _changes(version: int) -> int:
    """Return how many changes led to this version. The first value counts as one change."""
    return version & (1 << PS_VERSION_INCARNATION_SHIFT) - 1


def _variables(names: tuple[str, ...]) -> str:
    return f"{len(names)} variable{'s' if len(names) != 1 else ''}"
