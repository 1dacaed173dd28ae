"""The launcher's side of the connection to one host agent: the agent's hello, its roles, and the
end of the connection.

One thread reads events and another thread writes orders, so that no caller waits for a host that
does not read. A connection that has ended is never opened again. When the connection ends, the
agent ends its roles, and the launcher reports each of these roles as ended, with the reason why the
connection ended.
"""

from __future__ import annotations

import base64
import itertools
import logging
import queue
import signal
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from zmqdist import errors, limits
from zmqdist.background import logged
from zmqdist.launch.agent_protocol import (
    AgentClosing,
    AgentEvent,
    AgentHello,
    AgentOrder,
    AgentUnfit,
    CloseAgent,
    CodeReady,
    LauncherBeat,
    OfferCode,
    OrderRefused,
    PortReserved,
    ReservePort,
    RoleEnded,
    RoleLine,
    RoleStarted,
    SendCode,
    SignalRole,
    StartRole,
    decode_event,
    encode,
)
from zmqdist.launch.agent_stream import AgentStream
from zmqdist.launch.code_bundle import CodeBundle
from zmqdist.launch.launcher_interface import LineHandler

log = logging.getLogger("zmqdist.launch")

HOST_LOST: Final = -int(signal.SIGKILL)
"""The exit code that is reported for a role whose host is lost, because the agent on that host
kills the role."""
NOT_STARTED: Final = 1
"""The exit code that is reported for a role that its host could not start."""
ANSWER_S: Final = 20.0
CODE_BYTES_PER_S_MIN: Final = 20_000
"""Bytes per second at which the program's code must be sent. If a host receives it more slowly, the
host counts as unreachable."""


class RemoteRole:
    """A role on another host. Its attributes are those of `RunningRole`."""

    def __init__(self, name: str, host: str, on_line: LineHandler | None) -> None:
        self.name = name
        self.host = host
        self.pid = 0
        self.exit_code: int | None = None
        self.tail = ""
        self.ended = threading.Event()
        self.on_line = on_line
        self.send_signal: Callable[[int], object] = lambda number: None

    def signal(self, number: int) -> None:
        if not self.ended.is_set():
            self.send_signal(number)


class AgentLink:
    """The connection to one agent.

    Args:
      host: the name of the agent's host, as the user wrote it.
      stream: the byte stream to the agent. The link owns and closes it.
      on_note: a function that is called with each line that is not an event, such as the output of
        a login shell.

    Attributes:
      on_role_end: a function that the reader thread calls with each role that has ended.
      on_end: a function that the reader thread calls with the link when the connection has ended,
        and before `on_role_end` for the roles that ran then.
      greeting: the agent's first event, or None if the agent has not sent one.
      greeted: an event that is set when `greeting` has arrived or the connection has ended.
      answered_close: an event that is set when the agent has received a CloseAgent, or the
        connection has ended.
      end_reason: a sentence with the name of the host and the reason why the connection has ended.
        "" until the connection has ended.
    """

    def __init__(self, host: str, stream: AgentStream, on_note: Callable[[str], object]) -> None:
        self.host = host
        self.on_role_end: Callable[[RemoteRole], object] = lambda role: None
        self.on_end: Callable[[AgentLink], object] = lambda link: None
        self.end_reason = ""
        self._stream = stream
        self._on_note = on_note
        self.greeting: AgentHello | AgentUnfit | None = None
        self.greeted = threading.Event()
        self.answered_close = threading.Event()
        self._end_event = threading.Event()
        self._order_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._roles: dict[int, RemoteRole] = {}
        self._requests: dict[int, queue.SimpleQueue[AgentEvent | None]] = {}
        self._orders: queue.SimpleQueue[AgentOrder | None] = queue.SimpleQueue()
        self._reader = threading.Thread(
            target=logged, args=(self._read,), name=f"zmqdist-from-{host}", daemon=True
        )
        self._writer = threading.Thread(
            target=logged, args=(self._write,), name=f"zmqdist-to-{host}", daemon=True
        )
        self._reader.start()
        self._writer.start()

    # -- roles -------------------------------------------------------------------------------------

    def start(self, role: RemoteRole, order: StartRole) -> bool:
        """Send the order that starts a role. The link calls `on_role_end` when the role has
        ended. If the connection has ended, return False and report nothing.
        """
        with self._lock:
            if self._end_event.is_set():
                return False
            order_id = next(self._order_ids)
            role.send_signal = lambda number: self._orders.put(SignalRole(order_id, number))
            self._roles[order_id] = role
            self._orders.put(msgspec.structs.replace(order, order_id=order_id))
        return True

    def reserve(self, host: str, port: int = 0, ports: str = "") -> str:
        """Have the agent reserve a port on its host, and return the address of the port.

        Raises:
          UnavailableError: the connection has ended, or the agent does not answer.
          UnknownError: the agent cannot bind the port, for example because the port is in use.
        """
        event = self._request(lambda order_id: [ReservePort(order_id, host, port, ports)], ANSWER_S)
        assert isinstance(event, PortReserved)
        return event.address

    def send_code(self, bundle: CodeBundle, on_sending: Callable[[], object]) -> None:
        """Give the agent the code for the roles that it starts from now on. If the host has equal
        files at the same path, no code is sent.

        Args:
          on_sending: a function that is called before the code is sent, if it has to be sent.

        Raises:
          UnavailableError: the connection has ended, or the agent does not answer.
          UnknownError: the agent cannot unpack the code.
        """
        root, paths, imports = str(bundle.root), list(bundle.paths), list(bundle.imports)
        event = self._request(
            lambda order_id: [
                OfferCode(order_id, bundle.digest, root, paths, imports, bundle.working)
            ],
            ANSWER_S,
        )
        if isinstance(event, CodeReady):
            return
        on_sending()
        data = zlib.compress(bundle.archive)
        offsets = range(0, len(data), limits.CODE_PART_BYTES)
        parts = [
            base64.b64encode(data[at : at + limits.CODE_PART_BYTES]).decode() for at in offsets
        ]
        self._request(
            lambda order_id: [SendCode(order_id, part, part is parts[-1]) for part in parts],
            ANSWER_S + len(data) / CODE_BYTES_PER_S_MIN,
        )

    def _request(
        self, orders: Callable[[int], Sequence[AgentOrder]], timeout_s: float
    ) -> AgentEvent:
        """Send orders that together get one answer, and return the answer. Raises UnavailableError
        if the agent does not answer within `timeout_s`, and UnknownError if the agent refuses an
        order.
        """
        answer: queue.SimpleQueue[AgentEvent | None] = queue.SimpleQueue()
        with self._lock:
            if self._end_event.is_set():
                raise errors.UnavailableError(self.end_reason)
            order_id = next(self._order_ids)
            self._requests[order_id] = answer
            for order in orders(order_id):
                self._orders.put(order)
        try:
            event = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise errors.UnavailableError(
                f"{self.host}: its agent has not answered for {timeout_s:.0f} s"
            ) from None
        if event is None:
            raise errors.UnavailableError(self.end_reason)
        if isinstance(event, OrderRefused):
            raise errors.UnknownError(f"{self.host}: {event.reason}")
        return event

    def request_close(self, grace_s: float) -> None:
        """Send CloseAgent, so that the agent stops its roles and ends. This method does not wait
        for the agent."""
        self._orders.put(CloseAgent(grace_s))

    def close(self) -> None:
        """Close the connection, so that the agent kills the roles that still run. Return when the
        ends of all roles were reported. A second call does nothing.
        """
        self._stream.close()
        self._orders.put(None)
        self._reader.join()
        self._writer.join()

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the connection has ended and all roles were reported as
        ended."""
        self._reader.join(timeout_s)

    # -- threads -----------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=limits.AGENT_BEAT_S)
            except queue.Empty:
                order = LauncherBeat()
            if order is None:
                return
            try:
                self._stream.send(encode(order))
            except OSError:  # the connection has ended, which the reader thread reports
                return

    def _read(self) -> None:
        try:
            while line := self._stream.receive():
                self._handle(line)
        except OSError as error:
            log.debug("%s: the stream of its agent cannot be read: %s", self.host, error)
        finally:
            self._end()

    def _handle(self, line: bytes) -> None:
        try:
            event = decode_event(line)
        except msgspec.DecodeError:
            self._on_note(line.decode(errors="replace").rstrip("\r\n"))
            return
        if isinstance(event, AgentHello | AgentUnfit):
            self.greeting = event
            self.greeted.set()
            return
        if isinstance(event, AgentClosing):
            self.answered_close.set()
            return
        # no number is used twice, so an event belongs either to a request or to a role
        if (answer := self._requests.pop(event.order_id, None)) is not None:
            answer.put(event)
            return
        role = self._roles.get(event.order_id)
        if role is None:  # the role has ended, so its late events are ignored
            return
        match event:
            case RoleStarted():
                role.pid = event.pid
            case RoleLine():
                _pass_on(role, event.text)
            case RoleEnded():
                role.pid = event.pid
                self._report_end(event.order_id, event.exit_code, event.tail)
            case OrderRefused():
                self._report_end(event.order_id, NOT_STARTED, f"{self.host}: {event.reason}")

    def _report_end(self, order_id: int, exit_code: int, tail: str) -> None:
        with self._lock:
            role = self._roles.pop(order_id)
        role.exit_code, role.tail = exit_code, tail
        role.ended.set()
        try:
            self.on_role_end(role)
        except BaseException:  # the thread must go on reading events
            log.exception("the exit handler of %s failed", role.name)

    def _end(self) -> None:
        self._stream.close()
        why = self._stream.end_reason()
        with self._lock:
            self.end_reason = f"{self.host}: {why}"
            self._end_event.set()
            order_ids = list(self._roles)
            answers = list(self._requests.values())
        self.greeted.set()
        self.answered_close.set()
        self._orders.put(None)
        # `None` wakes the callers that still wait for an answer
        for answer in answers:
            answer.put(None)
        self.on_end(self)
        for order_id in order_ids:
            self._report_end(order_id, HOST_LOST, self.end_reason)


def _pass_on(role: RemoteRole, line: str) -> None:
    if role.on_line is None:
        print(line, flush=True)
        return
    try:
        role.on_line(line)
    except BaseException:
        # `on_line` fails if the terminal was closed, for example. Go on reading: a role whose
        # output is not read blocks in a write.
        log.exception("a line of output of %s could not be passed on", role.name)
