"""Names and options of collectives, and the operations of TensorFlow's CrossDeviceOps built on
them.

In TensorFlow a task may have several replicas, and `destinations` chooses the devices that get a
result. In zmqdist each task is one replica and has one value. `destinations` has no effect, because
every member gets the result, in memory. Functions that in TensorFlow take a list with one value for
each local device also take such a list in zmqdist. The list must have one item.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zmqdist.field_types import check_type, checked

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "ReduceOp",
]
__dir__ = __all__.copy  # dir() and completion show no other names


log = logging.getLogger("zmqdist.collectives")


class ReduceOp(enum.Enum):
    """The operation that combines the values of all members. MEAN is the sum divided by the size of
    the group. The mean of integers is float64.

    >>> zd.collectives.ReduceOp.MEAN.value
    'mean'
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "prod"

    @staticmethod
    def of(op: Any) -> ReduceOp:
        """Return the ReduceOp of a name, such as "sum", or of a member of TensorFlow's enum. Case
        does not matter, and "product" is another name for "prod". A ReduceOp is returned unchanged.

        >>> zd.collectives.ReduceOp.of("Mean") is zd.collectives.ReduceOp.MEAN
        True

        Raises ValueError for any other value.
        """
        if isinstance(op, ReduceOp):
            return op
        name = str(getattr(op, "name", op)).upper()
        for member in ReduceOp:
            if name in (member.name, member.value.upper()):
                return member
        raise ValueError(
            f"reduce_op: {op!r} is no ReduceOp: there are "
            f"{', '.join(member.name for member in ReduceOp)}"
        )


class CommunicationImplementation(enum.Enum):
    """TensorFlow's choice of an implementation. It has no effect, because zmqdist has only one
    implementation.

    >>> zd.collectives.CommunicationImplementation.RING.value
    'RING'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation


@dataclass(frozen=True, init=False)
@checked
class CommunicationOptions:
    """Options of collectives.

    >>> zd.collectives.CommunicationOptions(timeout_seconds=60).timeout_seconds
    60

    Attributes:
      bytes_per_pack: neighbouring arrays of a structure are reduced together up to about this
        number of bytes. 0 means the default. Results do not depend on this number, except that sums
        and products of floats may be rounded differently.
      timeout_seconds: how long a collective waits for the other members, and again for each piece
        of a large value. None means the default, limits.COLLECTIVE_TIMEOUT_S.
      implementation: TensorFlow's choice of an implementation. It has no effect.
    """

    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        """Raises ValueError if `bytes_per_pack` is negative, or if `implementation` is unknown."""
        if bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must not be negative, given {bytes_per_pack}")
        if isinstance(implementation, str):
            members = CommunicationImplementation.__members__
            if implementation.upper() not in members:
                raise ValueError(
                    f"implementation {implementation!r}: there are {', '.join(members)}"
                )
            implementation = members[implementation.upper()]
        if not isinstance(implementation, CommunicationImplementation):
            raise ValueError(f"implementation {implementation!r} is no CommunicationImplementation")
        object.__setattr__(self, "bytes_per_pack", bytes_per_pack)
        check_type("timeout_seconds", timeout_seconds, float | None, "a number of seconds or None")
        object.__setattr__(self, "timeout_seconds", timeout_seconds)
        object.__setattr__(self, "implementation", implementation)

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Return the options of this object, replaced by those options of `other` that do not have
        their default value.

        >>> options = zd.collectives.CommunicationOptions(timeout_seconds=60)
        >>> options.merge(zd.collectives.CommunicationOptions(bytes_per_pack=100)).timeout_seconds
        60
        """
        if other is None:
            return self
        default = CommunicationImplementation.AUTO
        return CommunicationOptions(
            other.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if other.timeout_seconds is None else other.timeout_seconds,
            self.implementation if other.implementation is default else other.implementation,
        )


def CollectiveHints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return CommunicationOptions, and log a warning, because CollectiveHints is their old name in
    TensorFlow.

    >>> zd.collectives.CollectiveHints(timeout_seconds=60).timeout_seconds
    60
    """
    log.warning("CollectiveHints is deprecated: use CommunicationOptions")
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


class CollectiveMember(Protocol):
    """The methods of a zmqdist.Server that CrossDeviceOps uses."""

    def all_reduce(
        self,
        x: Any,
        op: Any = "sum",
        group: Any = None,
        timeout: float | None = None,
        *,
        options: Any = None,
    ) -> Any:
        """Reduce the values of all members, as `Server.all_reduce` does."""

    def all_gather(
        self, x: Any, axis: int = 0, group: Any = None, timeout: float | None = None
    ) -> Any:
        """Concatenate the values of all members, as `Server.all_gather` does."""

    def broadcast(
        self, x: Any, root: int = 0, group: Any = None, timeout: float | None = None
    ) -> Any:
        """Return the value of one member at every member, as `Server.broadcast` does."""


def checked_options(options: CommunicationOptions | None) -> CommunicationOptions | None:
    """Return the argument `options`. Raises TypeError if it is of another class."""
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(f"options is {options!r}, wants CommunicationOptions or None")
    return options


class CrossDeviceOps:
    """TensorFlow's cross-device operations. Each combines the values that the replicas have, one
    value per replica, over a group of tasks.

    >>> with zd.Server.create_local_server() as task:
    ...     operations = zd.collectives.CrossDeviceOps(task)
    ...     print(operations.reduce("sum", np.arange(3), destinations="all"))
    [0 1 2]

    Every method is a collective, so all members of the group must call the methods in the same
    order. A method blocks until this task has the result. `timeout_seconds` of its options limits
    the wait for the other members, and for each piece of a large value.
    """

    def __init__(
        self,
        server: CollectiveMember,
        group: Any = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        """Make the operations of a task and its group.

        Args:
          server: the server of this task.
          group: the group, as in `Server.all_reduce`.
          options: the options of methods that are called without options.
        """
        self._server = server
        self._group = group
        self._options = checked_options(options) or CommunicationOptions()

    def reduce(
        self,
        reduce_op: Any,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce the values of all replicas, and return the result at every member.

        >>> operations = zd.collectives.CrossDeviceOps(task)
        >>> operations.reduce("sum", np.arange(3), destinations="all")
        array([0, 1, 2])

        Raises:
          ValueError: the value is a list that does not have one item, the destinations are missing,
            or `reduce_op` is unknown.
        """
        if destinations is None or (isinstance(destinations, Sequence) and not destinations):
            raise ValueError(
                "destinations is missing: every member gets the result, so pass any value"
            )
        return self._reduced(reduce_op, _own(per_replica_value), options)

    def batch_reduce(
        self,
        reduce_op: Any,
        value_destination_pairs: Any,
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values in one collective, and return the results in order.

        >>> operations = zd.collectives.CrossDeviceOps(task)
        >>> operations.batch_reduce("mean", [(np.ones(2), "all")])
        [array([1., 1.])]

        Raises ValueError if the argument is not a list of pairs (value, destinations), or
        `reduce_op` is unknown.
        """
        pairs = list(value_destination_pairs)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError("wanted a list of pairs (value, destinations)")
        values: list[Any] = self._reduced(reduce_op, [_own(value) for value, _ in pairs], options)
        return values

    def broadcast(self, tensor: Any, destinations: Any = None) -> Any:
        """Return the value of the group's first member, at every member.

        >>> zd.collectives.CrossDeviceOps(task).broadcast(np.arange(3))
        array([0, 1, 2])
        """
        return self._server.broadcast(tensor, 0, self._group, self._options.timeout_seconds)

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenate the values of all replicas along an axis, and return the result at every
        member.

        >>> zd.collectives.CrossDeviceOps(task).gather(np.arange(3), destinations="all", axis=0)
        array([0, 1, 2])

        Raises:
          ValueError: a value is a scalar, or does not have this axis.
          NotImplementedError: a value is IndexedSlices.
        """
        merged = self._options.merge(options)
        return self._server.all_gather(
            _own(per_replica_value), axis, self._group, merged.timeout_seconds
        )

    def _reduced(self, reduce_op: Any, value: Any, options: CommunicationOptions | None) -> Any:
        op, merged = ReduceOp.of(reduce_op), self._options.merge(options)
        return self._server.all_reduce(
            value, op, self._group, merged.timeout_seconds, options=merged
        )


def _own(per_replica_value: Any) -> Any:
    if isinstance(per_replica_value, (list, tuple)):
        if len(per_replica_value) != 1:
            raise ValueError(
                f"a replica is one task and has one value, not {len(per_replica_value)}"
            )
        return per_replica_value[0]
    return per_replica_value
