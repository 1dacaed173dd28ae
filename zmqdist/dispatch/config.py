"""What a dispatcher and a worker are told, checked once, here.

Light to import: whoever starts processes needs these before anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqdist import errors, limits


@dataclass(frozen=True)
class DispatcherConfig:
    """Where a dispatcher listens and when it gives up. Durations are seconds.

    Attributes:
      port: 0 takes a free one.
      host: address to bind; anything but loopback needs keys (SECURITY.md).
      lease_s: how long a worker that was lost from sight may go on running what it has.
      reconnect_grace_s: how long a worker whose connection ended has to come back.
      cancel_grace_s: how long a function that was told to end has, before its slot is cut off.
      attempts_max: lost starts after which a piece of work fails with WorkerLost.
      token_file, keys_dir: where the secrets are, if not in the usual place.
      insecure: neither token nor keys; everybody who reaches the port can run code. Warns at each start.
    """

    port: int = 0
    host: str = "127.0.0.1"
    lease_s: float = limits.LEASE_S
    reconnect_grace_s: float = limits.RECONNECT_GRACE_S
    cancel_grace_s: float = limits.CANCEL_GRACE_S
    attempts_max: int = limits.ATTEMPTS_MAX
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        _check_more_than_0(lease_s=self.lease_s, reconnect_grace_s=self.reconnect_grace_s)
        if not self.cancel_grace_s >= 0:
            raise errors.InvalidArgumentError(None, None, f"cancel_grace_s is {self.cancel_grace_s}, wants 0 s or more")
        if self.attempts_max < 1:
            raise errors.InvalidArgumentError(None, None, f"attempts_max is {self.attempts_max}, wants 1 or more")
        _check_port(self.port)


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is and whom it works for. Durations are seconds.

    Attributes:
      dispatcher_address: "host:port", with or without "zmq://".
      port: of its own server, from which large results are fetched; 0 takes a free one.
      host: address it binds; None takes loopback for a dispatcher on loopback, else the interface that leads to it.
      job, index: its name; index None takes the lowest that is free.
      slots: functions it runs at a time.
      processes: slots are child processes (can be cut off, may crash) instead of threads.
      orphan_limit_s: it ends itself after so long without a dispatcher.
      token_file, keys_dir: where its secret is, if not in the usual place (SECURITY.md).
      insecure: neither token nor keys: for a dispatcher that was started insecure.
    """

    dispatcher_address: str
    port: int = 0
    host: str | None = None
    job: str = "worker"
    index: int | None = None
    slots: int = 1
    processes: bool = False
    orphan_limit_s: float = limits.ORPHAN_LIMIT_S
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if not self.dispatcher_address:
            raise errors.InvalidArgumentError(None, None, "Must specify a `dispatcher_address`")
        if not 1 <= self.slots <= limits.SLOTS_MAX:
            problem = f"slots is {self.slots}, wants 1 to {limits.SLOTS_MAX}"
            raise errors.InvalidArgumentError(None, None, problem)
        if self.index is not None and self.index < 0:
            raise errors.InvalidArgumentError(None, None, f"index is {self.index}, wants 0 or more, or None")
        _check_more_than_0(orphan_limit_s=self.orphan_limit_s)
        _check_port(self.port)


def _check_more_than_0(**durations: float) -> None:
    for name, seconds in durations.items():
        if not seconds > 0:  # so that NaN is refused, too
            raise errors.InvalidArgumentError(None, None, f"{name} is {seconds}, wants more than 0 s")


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise errors.InvalidArgumentError(None, None, f"port is {port}, wants 0 to 65535")
