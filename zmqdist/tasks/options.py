"""The options in the `config` of a server or a session.

Some options of TensorFlow's ConfigProto are known but have no effect, because they concern graphs,
thread pools and devices, which zmqdist does not have. A session computes the same results with and
without them. Every unknown option is refused, because its user expects an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zmqdist.errors import InvalidArgumentError
from zmqdist.field_types import did_you_mean

ISOLATE: Final = "isolate_session_state"
TIMEOUT: Final = "operation_timeout_in_ms"
SLOTS: Final = "slots"
PROCESSES: Final = "worker_processes"
COORDINATION: Final = "coordination"
"""Name of the section with the fields of CoordinationConfig. Only the section of the leader's
config has an effect."""

OF_SESSIONS: Final = (ISOLATE, TIMEOUT)
OF_SERVERS: Final = (*OF_SESSIONS, SLOTS, PROCESSES, COORDINATION)

INERT: Final = frozenset(
    {
        "allow_soft_placement",
        "device_count",
        "experimental",
        "gpu_options",
        "graph_options",
        "inter_op_parallelism_threads",
        "intra_op_parallelism_threads",
        "log_device_placement",
        "placement_period",
        "pluggable_device_options",
        "rpc_options",
        "session_inter_op_thread_pool",
        "share_cluster_devices_in_session",
        "use_per_session_threads",
    }
)
"""Options of TensorFlow's ConfigProto that have no effect; docs/tensorflow.md lists them."""

_ELSEWHERE: Final = {
    "cluster_def": "a session works on the cluster of its target: start the servers with that "
    "cluster",
    "device_filters": "a task sees the tasks that the `cluster_device_filters` of its ServerDef "
    "let through",
}
"""Options of TensorFlow that would change what a session does, each with a text that says how to
achieve this in zmqdist."""


def check(config: Mapping[str, Any], names: tuple[str, ...], whose: str) -> list[str]:
    """Check the options in a config, and return the options that have no effect.

    Args:
      known: the options that have an effect, OF_SERVERS or OF_SESSIONS.
      whose: "server" or "session", for the text of the error.

    Returns:
      The options in `config` that have no effect (INERT), sorted.

    Raises:
      InvalidArgumentError: an option is unknown; the text names the option, and says what to do
        instead.
    """
    for name in config:
        if name in names or name in INERT:
            continue
        hint = _ELSEWHERE.get(name)
        if hint is None:
            hint = did_you_mean(name, names, "it may have", repr)
        raise InvalidArgumentError(f"config[{name!r}] is no option of a {whose}: {hint}")
    return sorted(INERT.intersection(config))
