"""The lines between a launcher and the agent of a host: orders to the agent's standard input, events from its standard output.

Each line is one JSON object; its key `is` says which of the structs here it is. A new order or event is a struct here, a branch in
`HostAgent.obey` (agent.py) or in `AgentLink` (agent_link.py), and nothing else. Both ends are of the same version of zmqdist: the launcher
refuses an agent whose hello names another one.

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
      name: the task, as "worker:0".
      kind, fields: the class of its config, and that config's fields as JSON (roles.py).
      environment: laid over the environment of the agent.
      files: text by path; written below the agent's folder before the role starts, each 0600. This is how secrets travel.
    """

    order_id: int
    name: str
    kind: str
    fields: str
    environment: dict[str, str]
    files: dict[str, str] = {}


class SignalRole(AgentMessage, frozen=True):
    """Send a role a signal; no effect once it has ended."""

    order_id: int
    number: int


class ReservePort(AgentMessage, frozen=True):
    """Reserve a port until the agent ends, so that a restarted role has the same address; answered by PortReserved or OrderRefused.

    Attributes:
      host: the address to bind, or the name of an interface of the agent's host.
      port: 0 takes a free one.
      ports: the range of free ports, for the roles as well; "": any.
    """

    order_id: int
    host: str
    port: int = 0
    ports: str = ""


class OfferCode(AgentMessage, frozen=True):
    """Name the code that roles need; answered by CodeReady if this host has it in the same place, else by CodeWanted, or OrderRefused.

    Attributes:
      digest, root, paths, imports: of the CodeBundle (code_bundle.py).
    """

    order_id: int
    digest: str
    root: str
    paths: list[str]
    imports: list[str]


class SendCode(AgentMessage, frozen=True):
    """A part of the archive of the last offer: compressed by zlib, in base64. CodeReady or OrderRefused answers the last part."""

    order_id: int
    data: str
    last: bool = False


class LauncherBeat(AgentMessage, frozen=True):
    """The launcher runs. An agent that hears nothing for its silence limit ends as if its standard input had ended."""


class CloseAgent(AgentMessage, frozen=True):
    """Stop all roles (SIGTERM, up to `grace_s` to drain, then SIGKILL), and end; answered at once by AgentClosing."""

    grace_s: float


# -- events ----------------------------------------------------------------------------------------------------------


class AgentHello(AgentMessage, frozen=True):
    """The first event: what the launcher checks before it starts a role.

    Attributes:
      python: "3.11.7".
      version, path: of zmqdist there.
      cores: that the agent may use.
      clock_s: its wall clock, seconds since 1970.
      host: its own name for itself.
      folder: where it writes the files of its roles; mode 0700.
      reached_at, reached_from: the address of this host by which it was reached, and the address of the launcher as this host sees it; ""
        where the carrier of the stream does not say (a plain process).
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
    """In place of the hello: this host cannot run roles.

    Attributes:
      python, executable: "3.9.2", and the path of that Python.
      reason: a phrase, as "No module named 'zmqdist'".
      remedy: what to do; "": install zmqdist.
    """

    python: str
    executable: str
    reason: str
    remedy: str = ""


class RoleStarted(AgentMessage, frozen=True):
    """A role runs under this process number."""

    order_id: int
    pid: int


class RoleLine(AgentMessage, frozen=True):
    """A line of a role's output, without its end."""

    order_id: int
    text: str


class RoleEnded(AgentMessage, frozen=True):
    """The last event about a role: its exit code as in `subprocess`, and its last lines of output."""

    order_id: int
    pid: int
    exit_code: int
    tail: str = ""


class PortReserved(AgentMessage, frozen=True):
    """The port is reserved: "host:port"."""

    order_id: int
    address: str


class CodeWanted(AgentMessage, frozen=True):
    """This host does not have the offered code in the same place."""

    order_id: int


class CodeReady(AgentMessage, frozen=True):
    """The code is in this folder, which is the working directory of all roles that start from now on."""

    order_id: int
    folder: str


class OrderRefused(AgentMessage, frozen=True):
    """An order could not be carried out; for a role it is the last event. `reason`: one sentence, without the name of the host."""

    order_id: int
    reason: str


class AgentClosing(AgentMessage, frozen=True):
    """The roles are being stopped. A host that does not say so soon is cut off, and need not be waited for."""


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
    """Return the message as one line."""
    return _encoder.encode(message) + b"\n"


def decode_order(line: bytes) -> AgentOrder:
    """Invert `encode`. Raises msgspec.DecodeError."""
    return _orders.decode(line)  # type: ignore[no-any-return]


def decode_event(line: bytes) -> AgentEvent:
    """Invert `encode`. Raises msgspec.DecodeError."""
    return _events.decode(line)  # type: ignore[no-any-return]
