"""The messages between a launcher and a host agent. The launcher writes orders to the agent's
standard input, and the agent writes events to its standard output.

Each message is one line with one JSON object. Its key `is` names the struct of this file that the
line encodes. A new order needs a struct here and a branch in `HostAgent.obey` (agent.py). A new
event needs a struct and a branch in `AgentLink` (agent_link.py). Launcher and agent have the same
version of zmqdist, because the launcher refuses an agent whose hello names another version.

Each order that has an answer carries an `order_id`, a number that the launcher never uses again.
Orders and events about a role carry the `order_id` of its StartRole, so that the output of an ended
role is not taken for that of a restarted role with the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec


class AgentMessage(msgspec.Struct, frozen=True, tag_field="is", tag=True, omit_defaults=True):
    """The base class of all orders and events."""


# -- orders ----------------------------------------------------------------------------------------


class StartRole(AgentMessage, frozen=True):
    """Start a role.

    Attributes:
      name: the name of the role, such as "worker:0".
      kind, fields: the name of the class of the role's config, and the fields of the config as JSON
        (roles.py).
      environment: environment variables of the role, in addition to those of the agent. They
        replace variables of the same name.
      files: the text of each file by its path. The agent writes the files into its folder with mode
        0600 before the role starts. Secrets are sent only as such files.
    """

    order_id: int
    name: str
    kind: str
    fields: str
    environment: dict[str, str]
    files: dict[str, str] = {}


class SignalRole(AgentMessage, frozen=True):
    """Send a signal to a role. The order has no effect after the role has ended."""

    order_id: int
    number: int


class ReservePort(AgentMessage, frozen=True):
    """Reserve a port until the agent ends, so that a restarted role has the same address. The
    answer is PortReserved or OrderRefused.

    Attributes:
      host: the address to bind, or the name of an interface of the agent's host.
      port: the port. 0 means a free port.
      ports: the range from which a free port is taken. "" means any port. Roles that the agent
        starts later use this range, too.
    """

    order_id: int
    host: str
    port: int = 0
    ports: str = ""


class OfferCode(AgentMessage, frozen=True):
    """Describe the code that roles need. The answer is CodeReady if the agent's host has this code
    at the same path, CodeWanted if it does not, and OrderRefused if the code cannot be used there.

    Attributes:
      digest, root, paths, imports, working: the fields of the CodeBundle (code_bundle.py).
    """

    order_id: int
    digest: str
    root: str
    paths: list[str]
    imports: list[str]
    working: str = "."


class SendCode(AgentMessage, frozen=True):
    """A part of the archive of the code that the last OfferCode described. The archive is
    compressed by zlib, and each part is in base64. The answer to the last part is CodeReady or
    OrderRefused.
    """

    order_id: int
    data: str
    last: bool = False


class LauncherBeat(AgentMessage, frozen=True):
    """Show that the launcher runs. An agent that receives no order for its silence limit ends as if
    its standard input had ended."""


class CloseAgent(AgentMessage, frozen=True):
    """Stop all roles, and end. Each role gets SIGTERM, has up to `grace_s` seconds to drain, and
    then gets SIGKILL. The agent answers with AgentClosing at once, before the roles have stopped.
    """

    grace_s: float


# -- events ----------------------------------------------------------------------------------------


class AgentHello(AgentMessage, frozen=True):
    """The first event of an agent. The launcher checks the hello before it starts a role.

    Attributes:
      python: version of the agent's Python, such as "3.11.7".
      version, path: version and folder of the agent's zmqdist.
      cores: number of cores that the agent may use.
      clock_s: the time on the wall clock of the agent's host, in seconds since 1970.
      host: the name of the agent's host, as the host itself reports it.
      folder: the folder for the files of the agent's roles. Its mode is 0700.
      reached_at: the address of the agent's host to which the launcher has connected. "" means that
        it is not known.
      reached_from: the address from which the launcher has connected, as the agent's host sees it.
        "" means that it is not known.
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
    """The first event of an agent whose host cannot run roles. The agent sends it in place of
    AgentHello.

    Attributes:
      python, executable: version of the agent's Python, such as "3.9.2", and its path.
      reason: why the host cannot run roles, as a phrase, such as "No module named 'zmqdist'".
      remedy: what the user should do. "" means that the user should install zmqdist.
    """

    python: str
    executable: str
    reason: str
    remedy: str = ""


class RoleStarted(AgentMessage, frozen=True):
    """The agent has started a role, whose process has this pid."""

    order_id: int
    pid: int


class RoleLine(AgentMessage, frozen=True):
    """A line of a role's output, without the line break."""

    order_id: int
    text: str


class RoleEnded(AgentMessage, frozen=True):
    """A role has ended. This is the last event about the role.

    Attributes:
      exit_code: the exit code in the form of `subprocess`, in which -9 means that SIGKILL ended the
        role.
      tail: the last lines of the role's output.
    """

    order_id: int
    pid: int
    exit_code: int
    tail: str = ""


class PortReserved(AgentMessage, frozen=True):
    """The agent has reserved a port. `address` is "host:port"."""

    order_id: int
    address: str


class CodeWanted(AgentMessage, frozen=True):
    """The agent's host does not have the offered code at the same path, so the launcher has to send
    it."""

    order_id: int


class CodeReady(AgentMessage, frozen=True):
    """The agent's host has the code in `folder`. All roles that the agent starts after this event
    run with this code. Their working directory is the field `working` of the OfferCode, relative to
    `folder`.
    """

    order_id: int
    folder: str


class OrderRefused(AgentMessage, frozen=True):
    """The agent could not carry out an order. If the order was a StartRole, this is the last event
    about the role. `reason` is a sentence that does not name the host.
    """

    order_id: int
    reason: str


class AgentClosing(AgentMessage, frozen=True):
    """The agent has begun to stop its roles. If a launcher does not get this event soon after
    CloseAgent, it treats the host as unreachable, and does not wait for the ends of the roles.
    """


AgentOrder: TypeAlias = (
    StartRole | SignalRole | ReservePort | OfferCode | SendCode | LauncherBeat | CloseAgent
)
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


def encode(message: AgentMessage) -> bytes:
    """Return a message as one line of JSON, with the line break."""
    return _encoder.encode(message) + b"\n"


decode_order: Final[Callable[[bytes], AgentOrder]] = msgspec.json.Decoder(AgentOrder).decode
"""Returns the order in a line. Raises msgspec.DecodeError if the line is not an order."""

decode_event: Final[Callable[[bytes], AgentEvent]] = msgspec.json.Decoder(AgentEvent).decode
"""Returns the event in a line. Raises msgspec.DecodeError if the line is not an event."""
