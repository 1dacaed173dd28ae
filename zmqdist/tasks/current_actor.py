"""`current_actor`: what the code of an actor may know of its actor, and the collectives of its
group.

The members of a group find each other through the dispatcher's keys: each member listens, sets its
address, and waits for those of the others. Each then has a `Server`, a task of a cluster that
consists of the group.
"""

from __future__ import annotations

import functools
import threading
from typing import Final

from zmqdist.clock import deadline, left
from zmqdist.coordination.service import PREFIX
from zmqdist.errors import DeadlineExceededError, FailedPreconditionError
from zmqdist.messages import ActorSpec
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient
from zmqdist.scheduling.shared import actor_class, own_cluster
from zmqdist.tasks.server import Server
from zmqdist.transport.own_address import listen, own_host

JOB: Final = "member"
"""The job of the members in the cluster of their group."""

GROUP_S: Final = 60.0
"""Seconds for which a member waits for the others at its first collective."""

_lock = threading.Lock()


class CurrentActor:
    """The actor in whose process the code runs.

    Attributes:
      cls: the name of its class.
      name: the name by which programs find it; "" without one.
      rank, size: its place in its group, and the number of members; 0 and 1 without a group.
    """

    def __init__(self, spec: ActorSpec) -> None:
        self.cls, self.name, self.rank, self.size = spec.cls, spec.name, spec.rank, spec.size
        self._group = spec.group

    def __repr__(self) -> str:
        place = f", {self.rank} of {self.size}" if self._group else ""
        return f"<current actor {self.cls}{place}>"

    @functools.cached_property
    def group(self) -> Server:
        """The group as a cluster of tasks, with its collectives and barriers: `group.all_reduce(x)`,
        `group.barrier("step")`. The first use waits for all members, which must use it, too.

        Raises:
          FailedPreconditionError: the actor has no group.
          DeadlineExceededError: not all members have used it within a minute.
        """
        if not self._group:
            raise FailedPreconditionError(
                f"the actor {self.cls} has no group: make it by coordinator.actors()"
            )
        with _lock:
            return _join(self._group, self.rank, self.size)


def current_actor() -> CurrentActor:
    """Return the actor whose method, or `__init__`, calls this.

    >>> class Member:
    ...     def place(self):
    ...         me = zd.current_actor()
    ...         return me.rank, me.size
    ...     def sum(self, x):
    ...         return float(zd.current_actor().group.all_reduce(x))
    >>> team = coordinator.actors(Member, 2)
    >>> team.place().result(), team.sum(1.5).result()
    ([(0, 2), (1, 2)], [3.0, 3.0])

    Raises FailedPreconditionError in a process that is no actor.
    """
    if actor_class.own is None:
        raise FailedPreconditionError("current_actor() is for methods of an actor")
    return _current()


@functools.cache
def _current() -> CurrentActor:
    assert actor_class.own is not None
    return CurrentActor(actor_class.own)


def _join(group: int, rank: int, size: int) -> Server:
    own = own_cluster.present()
    assert own is not None
    until = deadline(GROUP_S)
    listener = listen(own_host(own.dispatcher))
    host, port = listener.getsockname()[:2]
    security = own.credentials.client(own.dispatcher, "worker")
    client = ZmqClient(own.dispatcher, security=security)
    try:
        key = f"zmqdist/actors/{group}/"
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        internal_client.start(client, f"{PREFIX}kv_set", f"{key}{rank}", address, True).get_value()
        addresses = []
        for other in range(size):
            call = internal_client.start(client, f"{PREFIX}kv_get", f"{key}{other}", left(until))
            try:
                addresses.append(call.get_value())
            except DeadlineExceededError:
                raise DeadlineExceededError(
                    f"member {other} of the group has not called its first collective within "
                    f"{GROUP_S:g} s: all members must call it"
                ) from None
    except BaseException:
        listener.close()
        raise
    finally:
        client.close()
    return Server({JOB: addresses}, JOB, rank, listener=listener.detach())
