"""`zmqdist.Server`: one task of one job of a cluster.

It is made of a Node (its port, and its connections to the other tasks) and of parts, one file each, which add their methods to that
port before it serves. What users call is here, and only passed on.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from zmqdist.background import in_background
from zmqdist.cluster.defs import ClusterDef, ServerDef
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.collectives import CommunicationOptions
from zmqdist.coordination.answers import Task, named
from zmqdist.coordination.client import CoordinationClient, KeyValues, TaskName, TaskState
from zmqdist.errors import FailedPreconditionError
from zmqdist.limits import GRACE_S, TASK_PROBE_S
from zmqdist.rpc import StatusOrResult
from zmqdist.tasks import options
from zmqdist.tasks.collective_api import Group, Operations, Tasks
from zmqdist.tasks.collectives import Collectives
from zmqdist.tasks.control_methods import ControlMethods
from zmqdist.tasks.coordination import TaskCoordination
from zmqdist.tasks.definition import effective, written_address
from zmqdist.tasks.liveness import Watches
from zmqdist.tasks.mail import Mail
from zmqdist.tasks.named_variables import Variables
from zmqdist.tasks.node import Node, grace_s
from zmqdist.tasks.reachability import ReachabilityProbe
from zmqdist.tasks.sessions import Sessions, current_server, current_variables
from zmqdist.tasks.snapshot import TaskSnapshot
from zmqdist.tasks.worker_role import WorkerRole
from zmqdist.transport.credentials import Credentials
from zmqdist.variables.variable_host import VariableHost


class Server:
    """One task of a cluster, serving in the background.

    Its port is bound when it is made, also with `start=False`. It waits for no other task before it is asked to, so the tasks of
    a cluster may start in any order. Stop it, use it in a with-statement, or drop it: that stops it in the background.
    """

    def __init__(
        self,
        server_or_cluster_def: ServerDef | ClusterDef | ClusterSpec | Mapping[str, Any],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Mapping[str, Any] | None = None,
        start: bool = True,
        *,
        bind_host: str | None = None,
        listener: int | None = None,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        """Bind the port of a task.

        Args:
          server_or_cluster_def: the cluster: a ServerDef, ClusterDef, ClusterSpec, or a dict as for ClusterSpec. What a ServerDef says of
            the task, the protocol and the config holds where the arguments say nothing.
          job_name, task_index: which task this is; may be left out where there is only one. Port 0 of its address takes a free port, which
            only those learn who are told the `target`.
          protocol: "zmq", the default.
          config: what sessions of this server do unless they say otherwise; added to that of a ServerDef. "slots" and "worker_processes"
            are for a coordinator that invites this task (worker_role.py), "coordination" is for barriers and keys (coordination.py).
          start: serve at once; else `start()` does.
          bind_host: where to listen, in place of the host in the cluster; by default that one if it is of this machine, else everywhere.
          listener: the descriptor of a TCP socket that listens already, in place of binding: a port that was reserved without a race.
            It is the server's from then on.
          keys_dir, token_file: as in `zmqdist.transport.security`; by default the user's token on loopback, and ZMQDIST_KEYS_DIR.
          insecure: without keys, let everybody in.

        Raises:
          TypeError: the first argument is no cluster, or `config` no dict.
          ValueError: the job or the task must be named.
          InvalidArgumentError: no such task, its address has no port, or `config` has an option that there is not.
          NotFoundError: no such protocol.
          UnknownError: the port is in use, or cannot be bound.
          FailedPreconditionError: other machines can reach the address, and there are no keys.
          ResourceExhaustedError: the process may not have enough descriptors.
        """
        self._definition = effective(server_or_cluster_def, job_name, task_index, protocol, config)
        options.check(self._definition.default_session_config, options.OF_SERVERS, "server")
        me = self._definition.job_name, self._definition.task_index
        credentials = Credentials(
            None if token_file is None else os.fspath(token_file),
            None if keys_dir is None else os.fspath(keys_dir),
            insecure or Credentials.of_environment().insecure,
        )
        self._spec = ClusterSpec(self._definition.cluster)
        self._life_lock = threading.Lock()
        self._started = False
        self._stopped = threading.Event()
        self._node = Node(self._spec, me, written_address(self._definition), credentials, bind_host, listener)
        try:
            self._watches = watches = Watches(self._node)
            self._mail = Mail(self._node, watches)
            self._operations = Operations(self._node, Collectives(self._node, watches))
            ReachabilityProbe(self._node)
            weak_self = weakref.ref(self)
            ControlMethods(self._node, weak_self)
            VariableHost(self._node.service, self._node.router, self._node.loop, self._node.incarnation, self.task)
            self._sessions = Sessions(self._node, self._definition, weak_self)
            WorkerRole(self._node, self._definition.default_session_config)
            self._coordination = TaskCoordination(self._node, self._definition.default_session_config)
        except BaseException:  # a wrong config: whoever mends it wants the same port
            _close(self._node, self._stopped, 0.0)
            raise
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: Mapping[str, Any] | None = None, start: bool = True) -> Server:
        """The only task of a cluster of its own: job "localhost", a free port on loopback."""
        return Server({"localhost": ["localhost:0"]}, protocol="zmq", config=config, start=start)

    @property
    def target(self) -> str:
        """ "zmq://host:port", what a Session is given: the host as in the cluster, the real port."""
        return f"zmq://{self._node.address}"

    @property
    def address(self) -> str:
        """ "host:port", the same without the scheme."""
        return self._node.address

    @property
    def task(self) -> str:
        """Its own name, as "worker:1"."""
        return named(self._node.me)

    @property
    def server_def(self) -> ServerDef:
        """What it was made from, with the arguments put in; a port 0 stays one."""
        return self._definition

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster as it was given."""
        return self._spec

    @property
    def credentials(self) -> Credentials:
        """Where its secrets are, for a Session that is given this server as its target."""
        return self._node.credentials

    # -- the others --------------------------------------------------------------------------------------------------------

    def check_alive(self, task: str | tuple[str, int]) -> bool:
        """Whether a task answers now: "ps:0", ("ps", 0) or "/job:ps/replica:0/task:0". Takes TASK_PROBE_S where it does not.

        Raises:
          InvalidArgumentError: the cluster has no such task.
          CancelledError: this server was stopped meanwhile.
        """
        found = self._node.task(task)
        if found not in self._node.up([found]):
            return False
        with self._node.own_wait:
            answers = self._node.start(found, "server.about", due=time.monotonic() + TASK_PROBE_S).is_ok()
            if not answers and self._node.closed:  # that ended the question, and says nothing of the task
                raise self._node.stopped
            return answers

    def snapshot(self) -> TaskSnapshot:
        """An immutable record of now: messages, collectives, barriers and keys, sessions, connections. Cheap; from any thread.

        Not to be called by a method that runs in the loop of this server.
        """
        node, operations = self._node, self._operations.collectives
        items, nbytes, waits = self._mail.counts()
        connections, calls = node.connections()
        sessions, refused, cached, running = self._sessions.figures()
        return TaskSnapshot(
            task=self.task,
            address=self.address,
            incarnation=node.incarnation,
            mail_items=items,
            mail_bytes=nbytes,
            mail_waits=waits,
            mail_unconfirmed=self._mail.unconfirmed,
            groups=operations.led(),
            collective_calls=operations.unanswered,
            watched=self._watches.rows(),
            connections=tuple(map(named, connections)),
            calls=calls,
            keeper=self._coordination.snapshot(),
            sessions=sessions,
            sessions_refused=refused,
            functions_cached=cached,
            functions_running=running,
            faults=node.loop.faults,
        )

    # -- for functions that a session runs here -----------------------------------------------------------------------------

    @staticmethod
    def current() -> Server:
        """Inside a function that `Session.run` runs on a task: the server of that task.

        Raises:
          FailedPreconditionError: called elsewhere, also in a thread that such a function has started.
        """
        server: Server | None = current_server()
        if server is None:
            raise FailedPreconditionError("Server.current() is for functions that Session.run runs on a task")
        return server

    @property
    def variables(self) -> Variables:
        """The named variables that live here: inside a function of an isolated session its own, else those that all share."""
        return current_variables(self._sessions)

    # -- with the other tasks ----------------------------------------------------------------------------------------------

    @property
    def coordination(self) -> CoordinationClient:
        """This task among those of the cluster: all of coordination, of which the next methods are the most used."""
        return self._coordination.client

    def barrier(self, name: str, timeout: float | None = None, tasks: Iterable[TaskName] | None = None) -> None:
        """Wait until all tasks have called the barrier of this name: see `CoordinationClient.barrier`."""
        self._coordination.client.barrier(name, timeout, tasks)

    @property
    def kv(self) -> KeyValues:
        """Values by key, which all tasks share: see `KeyValues`."""
        return self._coordination.client.kv

    def task_states(self) -> dict[str, TaskState]:
        """What is known of every task, by name: see `CoordinationClient.task_states`."""
        return self._coordination.client.task_states()

    # -- life ------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve in the background. A second start does nothing.

        Raises:
          FailedPreconditionError: it was stopped, or joined before it was started.
        """
        with self._life_lock:
            if self._stopped.is_set():
                raise FailedPreconditionError(f"the server of {self.task} was stopped: make a new one")
            if not self._started:
                self._started = True
                self._node.serve()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it was stopped: by `stop`, or from elsewhere.

        A server that was never started is stopped by it, as in TensorFlow.

        Args:
          timeout: in seconds; None waits as long as it takes.

        Returns:
          False: it still serves after `timeout`.
        """
        if not self._started:
            self.stop(0.0)
        return self._stopped.wait(timeout)

    def stop(self, grace: float | None = None) -> None:
        """End it: take no new calls, wait for those that run, answer them, free the port. Idempotent.

        Not to be called by a function that runs on it, which would wait for itself: `Session.stop_task` is for those.

        Args:
          grace: seconds that running calls have; None: GRACE_S. After that their callers get UNAVAILABLE.

        Raises:
          InvalidArgumentError: `grace` is no number of seconds, 0 or more; the server goes on.
        """
        limit_s = grace_s(grace)
        with self._life_lock:
            _close(self._node, self._stopped, limit_s)

    # -- messages (mail.py) ------------------------------------------------------------------------------------------------

    def send(self, value: Any, dst: str | Task, tag: str, timeout: float | None = None) -> StatusOrResult:
        """Send a value to a task of the cluster, this one included. Waits for nothing.

        Args:
          value: what calls take: numbers, texts, arrays, and lists, tuples and dicts of them. As it is now; it may be changed at once.
          dst: "worker:1" or ("worker", 1). It need not have started yet.
          tag: any text without semicolons; the receiver asks for it.
          timeout: in seconds; None: the message waits for the task as long as it takes.

        Returns:
          The outcome, later: get_value() returns None when the message is in the other's mailbox, or raises UnavailableError when that
          task went, DeadlineExceededError, ResourceExhaustedError when too much lies there unread. Who ends before may lose it.

        Raises:
          InvalidArgumentError: no such task, no tag, or a value that does not travel.
          FailedPreconditionError: this server was stopped.
        """
        return self._mail.send(value, dst, tag, timeout)

    def recv(self, src: str | Task, tag: str, timeout: float | None = None, out: NDArray[Any] | None = None) -> Any:
        """Wait for the next value that a task has sent here under a tag; those of one task and tag come in the order of sending.

        A task that was never there yet is waited for.

        Args:
          timeout: in seconds; None waits as long as it takes, and logs whom it waits for.
          out: a writable array: the value, one array of its shape and dtype, is copied there, and `out` is returned.

        Returns:
          The value, private to the caller. An array of this host has not been copied.

        Raises:
          UnavailableError: that task has ended, or cannot be reached any more, and nothing of it is left under this tag.
          DeadlineExceededError: nothing came within the time.
          CancelledError: this server was stopped.
          InvalidArgumentError: no such task; or the value does not fit `out`: then it is still the next one.
        """
        return self._mail.recv(src, tag, timeout, out)

    # -- collectives (collective_api.py) -----------------------------------------------------------------------------------------

    def group(self, tasks: Tasks = None, name: str = "") -> Group:
        """Tasks that do collectives together.

        Args:
          tasks: in the order of their ranks; all members name the same. None: all of the own job.
          name: groups of different names are independent; by default that is the list of tasks.

        Raises:
          InvalidArgumentError: no such task, one twice, this one is missing, or the name has other members.
        """
        return self._operations.group(tasks, name)

    def all_reduce(
        self,
        x: Any,
        op: Any = "sum",
        group: Tasks = None,
        timeout: float | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Everybody's values put together, at everybody, with the same bits. All members of the group call it.

        Args:
          x: an array, a number, IndexedSlices, or a structure of them; of the same shapes and dtypes at all members (IndexedSlices may
            have different numbers of rows: the result has all of them).
          op: "sum", "mean" (of whole numbers as float64), "min", "max", "prod", or a ReduceOp.
          group: tasks, by rank, or what `group` returned; None: all tasks of the own job.
          timeout: seconds to wait for the others, and for each piece of a large value; None: limits.COLLECTIVE_TIMEOUT_S;
            math.inf for ever.
          options: bytes_per_pack and, without `timeout`, timeout_seconds.

        Raises:
          InvalidArgumentError: the members have brought different things; at all of them. The next collective works.
          DeadlineExceededError: members were absent; it names them.
          UnavailableError: a member has ended; it names it.
          CancelledError: a member has cancelled its part, or this server was stopped.
          TypeError, ValueError: not numbers or bools; no such op.
        """
        if options is None:
            return self._operations.all_reduce(x, op, group, timeout)
        timeout = options.timeout_seconds if timeout is None else timeout
        return self._operations.all_reduce(x, op, group, timeout, options.bytes_per_pack)

    def reduce_scatter(
        self, x: Any, op: Any = "sum", group: Tasks = None, timeout: float | None = None
    ) -> NDArray[Any]:
        """Everybody's arrays put together, and of the result the part of the own rank: rows of the first axis.

        Where they cannot be divided evenly, the first ranks get one more. All else as in `all_reduce`.
        """
        return self._operations.reduce_scatter(x, op, group, timeout)

    def all_gather(self, x: Any, axis: int = 0, group: Tasks = None, timeout: float | None = None) -> Any:
        """Everybody's arrays one after the other, by rank, at everybody.

        Args:
          x: an array or a structure of arrays. Members may differ in the sizes along `axis` only.
          axis: 0 or more.

        Raises:
          ValueError: a scalar, or no such axis.
          NotImplementedError: IndexedSlices.
          OpError: as `all_reduce`.
        """
        return self._operations.all_gather(x, axis, group, timeout)

    def gather(self, x: Any, root: int = 0, axis: int = 0, group: Tasks = None, timeout: float | None = None) -> Any:
        """`all_gather` for the member of rank `root`; the others get None."""
        return self._operations.gather(x, root, axis, group, timeout)

    def broadcast(self, x: Any = None, root: int = 0, group: Tasks = None, timeout: float | None = None) -> Any:
        """The value of the member of rank `root`, at everybody: an array, or any structure that calls take.

        What the others give does not matter.

        Raises:
          OpError: as `all_reduce`; InvalidArgumentError also for no such rank.
        """
        return self._operations.broadcast(x, root, group, timeout)

    def all_to_all(self, x: Any, group: Tasks = None, timeout: float | None = None) -> NDArray[Any]:
        """Item i goes to rank i: the result has item `rank` of rank i in place i. As many items as members. Raises as `all_reduce`."""
        return self._operations.all_to_all(x, group, timeout)

    def broadcast_object(
        self, value: Any = None, root: int = 0, group: Tasks = None, timeout: float | None = None
    ) -> Any:
        """`broadcast` of anything that can be pickled. Raises as `broadcast`."""
        return self._operations.broadcast_object(value, root, group, timeout)

    def all_gather_object(self, value: Any, group: Tasks = None, timeout: float | None = None) -> list[Any]:
        """Everybody's value, by rank, at everybody; anything that can be pickled. Raises as `all_reduce`."""
        return self._operations.all_gather_object(value, group, timeout)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __del__(self) -> None:
        node = self.__dict__.get("_node")
        if node is not None and not self._stopped.is_set():
            in_background("zmqdist-server-stop", _close, node, self._stopped, GRACE_S)

    def __repr__(self) -> str:
        return f"<Server of {self.task} at {self._node.address}>"


def _close(node: Node, stopped: threading.Event, grace_s: float) -> None:
    try:
        node.close(grace_s)
    finally:
        stopped.set()
