"""`zmqdist.Server`: one task of one job of a cluster.

A Server consists of a Node (its port, and its connections to the other tasks) and of parts, each in
a file of its own. The parts register their methods with the node before the node serves. This file
has the public methods, which only call the parts.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from zmqdist import clock as time
from zmqdist.background import in_background
from zmqdist.clock import seconds
from zmqdist.cluster.defs import ClusterDef, ServerDef
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.coordination.client import CoordinationClient, KeyValues, TaskName, TaskState
from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import FailedPreconditionError
from zmqdist.field_types import checked, safe_repr
from zmqdist.limits import GRACE_S, TASK_PROBE_S
from zmqdist.rpc import StatusOrResult
from zmqdist.tasks import options
from zmqdist.tasks.collective_api import CollectiveMethods
from zmqdist.tasks.collectives import Collectives
from zmqdist.tasks.control_methods import ControlMethods
from zmqdist.tasks.coordination import TaskCoordination
from zmqdist.tasks.definition import effective, written_address
from zmqdist.tasks.liveness import Watches
from zmqdist.tasks.mail import Mail
from zmqdist.tasks.named_variables import Variables
from zmqdist.tasks.node import Node, grace_s
from zmqdist.tasks.sessions import Sessions, current_server, current_variables
from zmqdist.tasks.snapshot import TaskSnapshot
from zmqdist.tasks.worker_role import WorkerRole
from zmqdist.transport.credentials import Credentials
from zmqdist.variables.variable_host import VariableHost


class Server(CollectiveMethods):
    """One task of a cluster, which serves in the background.

    >>> with zd.Server.create_local_server() as task:
    ...     print(zd.Session(task.target).run(pow, 2, 3))
    8

    The constructor binds the port, even with `start=False`. The server contacts no other task until
    a method needs one, so the tasks of a cluster may start in any order. Call `stop()`, or use the
    server in a with-statement. If the program drops the last reference to the server, the server
    stops in the background.

    Attributes:
      task: the name of this task, such as "worker:1".
      address: "host:port", with the host as written in the cluster and the port that was bound.
      target: "zmq://host:port", the target for a Session.
      server_def: the definition of this task: the first argument of the constructor, completed by
        the other arguments. A port 0 stays 0, whatever port was bound.
      cluster_spec: the cluster as it was passed to the constructor.
      credentials: the places of this server's keys and token. A Session that takes this server as
        its target uses them, too.
    """

    @checked
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
          server_or_cluster_def: the cluster: a ServerDef, ClusterDef, ClusterSpec, or a dict as for
            ClusterSpec. The task, protocol and config of a ServerDef are used for arguments that
            are left out.
          job_name, task_index: the task that this server is. Both may be left out if the cluster
            has only one task. Port 0 in the task's address binds a free port, which `target` and
            `address` show.
          protocol: "zmq", the default.
          config: the default options of sessions with this server, merged over those of a
            ServerDef. "slots" and "worker_processes" are for a coordinator that recruits this task
            (worker_role.py), "coordination" is for barriers and keys (coordination.py).
          start: whether to serve at once; otherwise call `start()`.
          bind_host: the host to listen on; by default the host in the task's address if it belongs
            to this host, otherwise all interfaces.
          listener: the descriptor of a TCP socket that listens already. The server serves and owns
            it, and binds no port, so that no other process can take the port first.
          keys_dir, token_file: folder of the keys, by default ZMQDIST_KEYS_DIR; file of the token,
            for a server on loopback without keys.
          insecure: if there are no keys, accept every peer.

        Raises:
          TypeError: the first argument does not describe a cluster, or `config` is not a dict.
          ValueError: the cluster has several jobs or tasks, and the arguments do not name one.
          InvalidArgumentError: the cluster has no such task, the task's address has no port, or
            `config` has an unknown option.
          NotFoundError: there is no such protocol.
          UnknownError: the port is in use, or cannot be bound.
          FailedPreconditionError: other hosts can reach the address, and there are no keys.
          ResourceExhaustedError: the limit of this process on open descriptors is too low.
        """
        self.server_def = effective(server_or_cluster_def, job_name, task_index, protocol, config)
        options.check(self.server_def.default_session_config, options.OF_SERVERS, "server")
        me = self.server_def.job_name, self.server_def.task_index
        credentials = Credentials(
            None if token_file is None else os.fspath(token_file),
            None if keys_dir is None else os.fspath(keys_dir),
            insecure or Credentials.from_environment().insecure,
        )
        self.cluster_spec = ClusterSpec(self.server_def.cluster)
        self._life_lock = threading.Lock()
        self._serving = False
        self._stop_event = threading.Event()
        self._node = Node(
            self.cluster_spec,
            me,
            written_address(self.server_def),
            credentials,
            bind_host,
            listener,
        )
        self.task = task_name(me)
        self.address = self._node.address
        self.target = f"zmq://{self.address}"
        self.credentials = credentials
        try:
            self._watches = watches = Watches(self._node)
            self._mail = Mail(self._node, watches)
            self._collectives = Collectives(self._node, watches)
            weak_self = weakref.ref(self)
            ControlMethods(self._node, weak_self)
            VariableHost(self._node.service, self._node.router, self._node.incarnation, self.task)
            self._sessions = Sessions(self._node, self.server_def, weak_self)
            WorkerRole(self._node, self.server_def.default_session_config)
            self._coordination = TaskCoordination(
                self._node, self.server_def.default_session_config
            )
        except BaseException:
            # `_close` frees the port, so that the caller can try again with a corrected config
            _close(self._node, self._stop_event, 0.0)
            raise
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: Mapping[str, Any] | None = None, start: bool = True) -> Server:
        """Return the server of a new cluster with a single task: job "localhost", on a free port of
        loopback.

        >>> with zd.Server.create_local_server() as task:
        ...     print(task.task)
        localhost:0
        """
        return Server({"localhost": ["localhost:0"]}, protocol="zmq", config=config, start=start)

    # -- state -------------------------------------------------------------------------------------

    def check_alive(self, task: str | tuple[str, int]) -> bool:
        """Return whether a task replies now.

        >>> task.check_alive("localhost:0")
        True

        If the task does not reply, this blocks for up to TASK_PROBE_S.

        Args:
          task: "ps:0", ("ps", 0) or "/job:ps/replica:0/task:0".

        Raises:
          InvalidArgumentError: the cluster has no such task.
          CancelledError: this server was stopped meanwhile.
        """
        member = self._node.task(task)
        if member not in self._node.up([member]):
            return False
        with self._node.own_wait:
            replied = self._node.start(
                member, "server.about", due=time.monotonic() + TASK_PROBE_S
            ).is_ok()
            # The stop of this server has ended the call, so the error shows nothing about the other
            # task.
            if not replied and self._node.closed:
                raise self._node.stopped
            return replied

    def snapshot(self) -> TaskSnapshot:
        """Return an immutable record of this moment: messages, collectives, barriers and keys,
        sessions, connections.

        >>> type(task.snapshot()).__name__
        'TaskSnapshot'

        This is cheap. Any thread may call it, but not a method that runs in the loop of this
        server.
        """
        node, operations = self._node, self._collectives
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
            connections=tuple(map(task_name, connections)),
            calls=calls,
            keeper=self._coordination.snapshot(),
            sessions=sessions,
            sessions_refused=refused,
            functions_cached=cached,
            functions_running=running,
            faults=node.loop.faults,
        )

    # -- for functions that a session runs here ----------------------------------------------------

    @staticmethod
    def current() -> Server:
        """Return the server of the task on which the calling function runs.

        >>> zd.Session(task.target).run(lambda: zd.Server.current().task)
        'localhost:0'

        Only functions that `Session.run` runs may call this.

        Raises:
          FailedPreconditionError: the caller is not such a function, or runs in a thread that such
            a function has started.
        """
        server: Server | None = current_server()
        if server is None:
            raise FailedPreconditionError(
                "Server.current() is for functions that Session.run runs on a task"
            )
        return server

    @property
    def variables(self) -> Variables:
        """The named variables of this task. In a function of an isolated session these are the
        session's own variables, elsewhere the shared variables.
        """
        return current_variables(self._sessions)

    # -- with the other tasks ----------------------------------------------------------------------

    @property
    def coordination(self) -> CoordinationClient:
        """The CoordinationClient of this task. `barrier`, `kv` and `task_states` are shortcuts to
        its most used parts.

        The first use connects to the leader of the cluster.

        Raises:
          FailedPreconditionError: this server was stopped, or not started yet.
        """
        return self._coordination.client

    def barrier(
        self, name: str, timeout: float | None = None, tasks: Iterable[TaskName] | None = None
    ) -> None:
        """Wait until all tasks have reached the barrier of this name. `CoordinationClient.barrier`
        documents the arguments.

        >>> task.barrier("ready", timeout=10)
        """
        self._coordination.client.barrier(name, timeout, tasks)

    @property
    def kv(self) -> KeyValues:
        """The key-value store that all tasks share. `KeyValues` documents it."""
        return self._coordination.client.kv

    def task_states(self) -> dict[str, TaskState]:
        """Return the states of the tasks, by name. `CoordinationClient.task_states` documents it.

        >>> sorted(task.task_states())
        ['localhost:0']
        """
        return self._coordination.client.task_states()

    # -- start and stop ----------------------------------------------------------------------------

    def start(self) -> None:
        """Serve in the background. A second call does nothing.

        >>> task.start()  # a second call does nothing

        Raises:
          FailedPreconditionError: the server was stopped, or `join` was called before `start`.
        """
        with self._life_lock:
            if self._stop_event.is_set():
                raise FailedPreconditionError(
                    f"the server of {self.task} was stopped: make a new one"
                )
            if not self._serving:
                self._serving = True
                self._node.serve()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until this server has stopped, for instance because of `stop`, `Session.stop_task`
        or `Session.shutdown`.

        >>> with zd.Server.create_local_server() as other:
        ...     other.stop()
        ...     other.join(timeout=10)
        True

        As in TensorFlow, joining a server that was never started stops it.

        Args:
          timeout: seconds to wait; None waits without a limit.

        Returns:
          False if the server still serves after `timeout`.
        """
        if not self._serving:
            self.stop(0.0)
        return self._stop_event.wait(seconds(timeout))

    def stop(self, grace: float | None = None) -> None:
        """Stop the server: refuse new calls, wait for the running calls and reply to them, and free
        the port. Idempotent.

        >>> other = zd.Server.create_local_server()
        >>> other.stop()

        A function that runs on this server must not call `stop`, because it would wait for itself.
        It can call `Session.stop_task`.

        Args:
          grace: seconds for which running calls may go on; `None` means GRACE_S. After that their
            callers get UNAVAILABLE.

        Raises:
          InvalidArgumentError: `grace` is not a number of seconds, 0 or more. Then the server is
            not stopped.
        """
        limit_s = grace_s(grace)
        with self._life_lock:
            _close(self._node, self._stop_event, limit_s)

    # -- messages (mail.py) ------------------------------------------------------------------------

    def send(
        self, value: Any, dst: str | Task, tag: str, timeout: float | None = None
    ) -> StatusOrResult:
        """Send a value to a task of the cluster, which may be this task. This does not block.

        >>> _ = task.send(np.arange(3), "localhost:0", "numbers")
        >>> task.recv("localhost:0", "numbers")
        array([0, 1, 2])

        Args:
          value: numbers, texts, arrays, and lists, tuples and dicts of them. The caller may change
            the value afterwards, because a snapshot of it is sent.
          dst: "worker:1" or ("worker", 1). The task need not have started yet.
          tag: any text without semicolons, but not "". The receiver passes the same text to `recv`.
          timeout: seconds for which the message waits for the task to appear; `None` means without
            a limit.

        Returns:
          The outcome. Its `get_value()` returns None when the message is in the receiver's mailbox.
          `get_value()` raises UnavailableError if the receiving task has ended,
          DeadlineExceededError after `timeout`, or ResourceExhaustedError if the receiver's mailbox
          is full. If the sender ends before it has the outcome, the message may be lost.

        Raises:
          InvalidArgumentError: there is no such task, the tag is not valid, or the value has a type
            that cannot be sent.
          FailedPreconditionError: this server was stopped.
        """
        return self._mail.send(value, dst, tag, timeout)

    def recv(
        self,
        src: str | Task,
        tag: str,
        timeout: float | None = None,
        out: NDArray[Any] | None = None,
    ) -> Any:
        """Wait for the next value that a task sends to this task under a tag.

        >>> _ = task.send("text", "localhost:0", "words")
        >>> task.recv("localhost:0", "words", timeout=10)
        'text'

        Values of one sender under one tag arrive in the order of sending. If the sender has not
        started yet, this waits for the sender.

        Args:
          src: "worker:1" or ("worker", 1).
          tag: as in `send`.
          timeout: seconds to wait; None waits without a limit, and logs the name of the sender at
            intervals.
          out: a writable array. The value must be one array of the same shape and dtype. It is
            copied into `out`, and `out` is returned.

        Returns:
          The value, which the caller owns. A large array from a task on this host has not been
          copied.

        Raises:
          UnavailableError: the sending task has ended or cannot be reached, and has left no value
            under this tag.
          DeadlineExceededError: no value arrived within `timeout`.
          CancelledError: this server was stopped.
          InvalidArgumentError: there is no such task, or the value does not fit `out`. In the
            second case the next `recv` gets the value.
        """
        return self._mail.recv(src, tag, timeout, out)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __del__(self) -> None:
        # the constructor may have failed before it made a node
        node = self.__dict__.get("_node")
        if node is not None and not self._stop_event.is_set():
            in_background("zmqdist-server-stop", _close, node, self._stop_event, GRACE_S)

    @safe_repr
    def __repr__(self) -> str:
        state = (
            ", stopped" if self._stop_event.is_set() else "" if self._serving else ", not started"
        )
        return f"of {self.task} at {self._node.address}{state}"


def _close(node: Node, stop_event: threading.Event, grace_s: float) -> None:
    try:
        node.close(grace_s)
    finally:
        stop_event.set()
