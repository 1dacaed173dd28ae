"""The figures that the dispatcher's machine goes by; a DispatcherConfig is such rules, too."""

from __future__ import annotations

from dataclasses import dataclass

from zmqdist import limits


@dataclass(frozen=True, kw_only=True)
class BrokerRules:
    """Seconds where a name says so. What each means is said at DispatcherConfig, and why it is so much in zmqdist.limits."""

    lease_s: float = limits.LEASE_S
    reconnect_grace_s: float = limits.RECONNECT_GRACE_S
    cancel_grace_s: float = limits.CANCEL_GRACE_S
    attempts_max: int = limits.ATTEMPTS_MAX
