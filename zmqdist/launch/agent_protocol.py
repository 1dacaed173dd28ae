"""The lines between a launcher and the agent of a host: orders to the agent's standard input, events from its standard output.

Each line is one JSON object; its key `is` names the struct of this file that it encodes. A new order or event needs a struct here and a
branch in `HostAgent.obey` (agent.py) or in `AgentLink` (agent_link.py). Launcher and agent have the same version of zmqdist, because the
launcher refuses an agent whose hello names another version.

Each order with an answer has a number, `order_id`, which the launcher never uses again. A role is known by that of its StartRole, so that a
line of an ended role is not taken for one of its successor.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec


class AgentMessage(msgspec.Struct, frozen=True, tag_field="is", tag=True, omit_defaults=True):
    """The base of all orders and events."""


# -- orders ----------------------------------------------------------------------------------------------------------


class StartRole(AgentMessage, frozen=True):
    """Start a role.

    Attributes:
      name: the task, such as "worker:0".
      kind, fields: the class of its config, and the fields of the config as JSON (roles.py).
      environment: variables that are added to the environment of the agent, and replace variables of the same name.
      files: text by path. The agent writes them below its folder before the role starts, each with mode 0600. Secrets are sent in this way
        only.
    """

    order_id: int
    name: str
    kind: str
    fields: str
    environment: dict[str, str]
    files: dict[str, str] = {}


class SignalRole(AgentMessage, frozen=True):
    """Send a signal to a role. It has no effect after the role has ended."""

    order_id: int
    number: int


class ReservePort(AgentMessage, frozen=True):
    """Reserve a port until the agent ends, so that a restarted role has the same address. The answer is PortReserved or OrderRefused.

    Attributes:
      host: the address to bind, or the name of an interface of the agent's host.
      port: the port; 0: a free port.
      ports: the range from which free ports are taken, also by the roles; "": any port.
    """

    order_id: int
    host: str
    port: int = 0
    ports: str = ""


class OfferCode(AgentMessage, frozen=True):
    """Describe the code that roles need. The answer is CodeReady if the agent's host has this code at the same path, otherwise CodeWanted;
    or OrderRefused.

    Attributes:
      digest, root, paths, imports: those of the CodeBundle (code_bundle.py).
    """

    order_id: int
    digest: str
    root: str
    paths: list[str]
    imports: list[str]


class SendCode(AgentMessage, frozen=True):
    """A part of the archive that was offered last. The archive is compressed by zlib and each part is in base64. CodeReady or OrderRefused
    answers the last part.
    """

    order_id: int
    data: str
    last: bool = False


class LauncherBeat(AgentMessage, frozen=True):
    """Show that the launcher runs. An agent that receives no order for its silence limit ends as if its standard input had ended."""


class CloseAgent(AgentMessage, frozen=True):
    """Stop all roles (SIGTERM, up to `grace_s` seconds to drain, then SIGKILL), and end. AgentClosing answers at once."""

    grace_s: float


# -- events ----------------------------------------------------------------------------------------------------------


class AgentHello(AgentMessage, frozen=True):
    """The first event. The launcher checks it before it starts a role.

    Attributes:
      python: version of the agent's Python, such as "3.11.7".
      version, path: version and folder of the agent's zmqdist.
      cores: number of cores that the agent may use.
      clock_s: the wall clock of its host, in seconds since 1970.
      host: the name that its host has for itself.
      folder: the folder for the files of its roles; its mode is 0700.
      reached_at, reached_from: the address of this host at which the launcher reached it, and the address of the launcher as this host sees
        it; "" if the connection to the host does not tell them.
    """

    python: str
    version: str
    path: str
    cores: int
    clock_s: float
    host: str
    pid: int
    folder: str
    reached_at: str = ""
    reached_from: str = ""


class AgentUnfit(AgentMessage, frozen=True):
    """The first event in place of AgentHello: this host cannot run roles.

    Attributes:
      python, executable: version of the agent's Python, such as "3.9.2", and its path.
      reason: a phrase, such as "No module named 'zmqdist'".
      remedy: what the user should do; "": install zmqdist.
    """

    python: str
    executable: str
    reason: str
    remedy: str = ""


class RoleStarted(AgentMessage, frozen=True):
    """A role has been started, with this pid."""

    order_id: int
    pid: int


class RoleLine(AgentMessage, frozen=True):
    """A line of a role's output, without the line break."""

    order_id: int
    text: str


class RoleEnded(AgentMessage, frozen=True):
    """A role has ended. This is the last event about it, with the exit code in the form of `subprocess` and the last lines of output."""

    order_id: int
    pid: int
    exit_code: int
    tail: str = ""


class PortReserved(AgentMessage, frozen=True):
    """A port has been reserved, with the address "host:port"."""

    order_id: int
    address: str


class CodeWanted(AgentMessage, frozen=True):
    """The agent's host does not have the offered code at the same path, so the launcher has to send it."""

    order_id: int


class CodeReady(AgentMessage, frozen=True):
    """The code is in this folder, which is the working directory of all roles that the agent starts after this event."""

    order_id: int
    folder: str


class OrderRefused(AgentMessage, frozen=True):
    """The agent could not carry out an order. For a StartRole this is the last event of the role. `reason` is a sentence that does not name
    the host.
    """

    order_id: int
    reason: str


class AgentClosing(AgentMessage, frozen=True):
    """The agent has begun to stop its roles. A launcher does not wait for an agent that does not send this soon, because the host must be
    cut off.
    """


AgentOrder: TypeAlias = StartRole | SignalRole | ReservePort | OfferCode | SendCode | LauncherBeat | CloseAgent
AgentEvent: TypeAlias = (
    AgentHello
    | AgentUnfit
    | AgentClosing
    | RoleStarted
    | RoleLine
    | RoleEnded
    | PortReserved
    | CodeWanted
    | CodeReady
    | OrderRefused
)

_encoder: Final = msgspec.json.Encoder()
_orders: Final = msgspec.json.Decoder(AgentOrder)
_events: Final = msgspec.json.Decoder(AgentEvent)


def encode(message: AgentMessage) -> bytes:
    """Return a message as one line of JSON, with the line break."""
    return _encoder.encode(message) + b"\n"


def decode_order(line: bytes) -> AgentOrder:
    """Return the order in a line. Raises msgspec.DecodeError if the line is not an order."""
    return _orders.decode(line)  # type: ignore[no-any-return]


def decode_event(line: bytes) -> AgentEvent:
    """Return the event in a line. Raises msgspec.DecodeError if the line is not an event."""
    return _events.decode(line)  # type: ignore[no-any-return]
