"""The settings of the dispatcher's machine, which are a part of the settings in
DispatcherConfig.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqdist import limits


@dataclass(frozen=True, kw_only=True)
class BrokerSettings:
    """The settings of the dispatcher's machine. DispatcherConfig describes each of them;
    zmqdist.limits has the reason for each default."""

    lease_s: float = limits.LEASE_S
    reconnect_grace_s: float = limits.RECONNECT_GRACE_S
    cancel_grace_s: float = limits.CANCEL_GRACE_S
    attempts_max: int = limits.ATTEMPTS_MAX
    growth_limit_s: float = limits.GROWTH_LIMIT_S
