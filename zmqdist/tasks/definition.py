"""The rules for the arguments of `zmqdist.Server`: which task the server is, and on which address
it listens.

Not here: how the server binds the address (node.py), and the rules for a cluster's jobs
(cluster/job_roles.py).
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Mapping
from typing import Any, Final

from zmqdist.addresses import join_address
from zmqdist.cluster.defs import ClusterDef, ServerDef
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.errors import InvalidArgumentError, NotFoundError
from zmqdist.field_types import check_type, converted
from zmqdist.transport.endpoint import split

PROTOCOLS: Final = ("zmq",)
"""Names of protocols; the first is the default."""

EVERYWHERE: Final = "0.0.0.0"


def effective(
    source: ServerDef | ClusterDef | ClusterSpec | Mapping[str, Any],
    job_name: str | None = None,
    task_index: int | None = None,
    protocol: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> ServerDef:
    """Return the ServerDef that the arguments of a server describe. The result is always a copy.

    Raises:
      TypeError: `source` does not describe a cluster, or `config` is not a dict.
      ValueError: the arguments name no task although the cluster has several, or ClusterSpec
        refuses the cluster.
      InvalidArgumentError: the cluster has no such task.
      NotFoundError: there is no such protocol.
    """
    if isinstance(source, ServerDef):
        definition = source.copy()
        ClusterSpec(definition.cluster)
        definition.job_name = definition.job_name if job_name is None else job_name
        definition.task_index = definition.task_index if task_index is None else task_index
        definition.protocol = definition.protocol if protocol is None else protocol
    else:
        spec = converted("server_or_cluster_def", ClusterSpec, source)
        job = _the_only("which job", spec.jobs) if job_name is None else job_name
        index = (
            _the_only(f"which task of job {job!r}", spec.task_indices(job))
            if task_index is None
            else task_index
        )
        definition = ServerDef(spec.as_cluster_def().copy(), job, index, protocol=protocol or "")
    check_type("job_name", definition.job_name, str, "str")
    check_type("task_index", definition.task_index, int, "int")
    definition.protocol = definition.protocol or PROTOCOLS[0]
    if definition.protocol not in PROTOCOLS:
        raise NotFoundError(
            f"no protocol {definition.protocol!r}; there is: {', '.join(PROTOCOLS)}. Write "
            f'protocol="zmq" (in a resolver '
            'rpc_layer="zmq"), or leave it out'
        )
    if not isinstance(config or {}, Mapping):
        raise TypeError(f"the config of a server is a dict of options, not {config!r}")
    definition.default_session_config = merged(definition.default_session_config, config or {})
    definition.own_address()
    return definition


def _the_only(question: str, choices: list[Any]) -> Any:
    if len(choices) != 1:
        raise ValueError(f"{question}? Name one of these in the arguments: {choices}")
    return choices[0]


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `old`, updated with `new`, also inside nested dicts. The result shares no
    object with `old` or `new`."""
    config = {**copy.deepcopy(dict(old)), **copy.deepcopy(dict(new))}
    for key in old.keys() & new.keys():
        if isinstance(old[key], Mapping) and isinstance(new[key], Mapping):
            config[key] = merged(old[key], new[key])
    return config


def written_address(definition: ServerDef) -> str:
    """Return the "host:port" of the task as it is written in the cluster; an empty host means
    localhost.

    Raises:
      InvalidArgumentError: the cluster has no valid address for the task; the text says what is
        wrong with the port or the host.
    """
    address = definition.own_address()
    address = f"localhost{address}" if address.startswith(":") else address
    try:
        split(address)
    except InvalidArgumentError as error:
        task = f"{definition.job_name}:{definition.task_index}"
        raise InvalidArgumentError(
            f"{task} needs an address with a port: {error.message}"
        ) from None
    return address


def address_to_bind(address: str, host: str | None) -> str:
    """Return the address to listen on, for a task whose address in the cluster is `address`.

    `host` overrides the host in `address`. By default the server listens on the host in `address`,
    if this is an address of this host. Otherwise the server listens on all interfaces, because the
    host may be a name that only other hosts can look up, or a load balancer.
    """
    written, port = split(address)
    if host is None:
        # behind an address translation the written host is none of this machine
        host = written if _is_here(written) else EVERYWHERE
    return join_address(host.strip("[]"), port)


def _is_here(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in addresses:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind((address[0], 0, *address[2:]))
        except OSError:
            continue
        return True
    return False
