"""The dispatcher that a program schedules on: its address, and where to read the secret for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from zmqdist import limits
from zmqdist.cluster.environment import CONFIG_ENV
from zmqdist.errors import InvalidArgumentError
from zmqdist.scheduling.shared import own_cluster
from zmqdist.transport.credentials import Credentials, credentials_for
from zmqdist.transport.endpoint import split
from zmqdist.wire import results, trusted

if TYPE_CHECKING:  # most programs read no cluster file, and YAML takes 20 ms to import
    from zmqdist.cluster.config import ClusterConfig
    from zmqdist.cluster.file_sections import RuntimeConfig

ACCEPTED = (
    'a ParameterServerStrategy, a DispatchServer, a local_cluster, "host:port" or '
    '"zmq://host:port", what connect returned, '
    "or nothing in a scheduled function or a program that `zmqdist launch` started"
)


@dataclass(frozen=True, slots=True)
class ResultForm:
    """The form of results that a program accepts. With `safe_only`, it accepts a closed set of
    types and refuses pickles."""

    safe_only: bool

    @classmethod
    def named(cls, name: str | None, by_file: bool) -> ResultForm:
        """Return the form with this name, or the safe form if the cluster file requires it
        (`by_file`).

        Raises InvalidArgumentError if no form has this name.
        """
        if name not in (None, "any", "safe"):
            raise InvalidArgumentError(f"results is {name!r}, wants 'any' or 'safe'")
        return cls(by_file or name == "safe")

    @property
    def mark(self) -> bytes:
        """The bytes before the payload of a work item. They tell the worker in which form the
        program accepts the result."""
        return results.SAFE if self.safe_only else b""

    def pack_error(self, error: BaseException) -> bytes:
        """Pack an error of this process as a worker packs its errors, so that the same code unpacks
        both."""
        return results.pack_error(error) if self.safe_only else trusted.pack_error(error)


ANY: Final = ResultForm(safe_only=False)


@dataclass(frozen=True)
class Target:
    """A dispatcher, and the settings for its coordinators: those in its cluster file, those of a
    server object, or the defaults."""

    address: str
    credentials: Credentials
    queue_max: int = limits.QUEUE_MAX
    cancel_grace_s: float = limits.CANCEL_GRACE_S
    queue_bytes_max: int | None = None
    form: ResultForm = ANY


def resolve(target: Any, results: str | None = None) -> Target:
    """Return the dispatcher that `target` names. `results` says in which form the program accepts
    results.

    Raises:
      ValueError: `target` is not of an accepted type or format. The message lists the accepted
        forms.
      InvalidArgumentError: `results` is neither None nor the name of a form.
    """
    own = own_cluster.present() if target is None else None
    dispatcher = _resolve(target) if own is None else _of_own_cluster(own)
    return replace(dispatcher, form=ResultForm.named(results, dispatcher.form.safe_only))


def _of_own_cluster(own: own_cluster.OwnCluster) -> Target:
    """Return the cluster whose work this thread runs, with the settings of its file, if it has
    one.
    """
    config = _config_of_environment()
    target = Target(own.dispatcher, own.credentials)
    if config is not None and config.runtime is not None:
        of_file = target_of(config, config.runtime)
        if of_file.address == own.dispatcher:
            target = replace(of_file, credentials=own.credentials)
    return replace(target, form=ResultForm(target.form.safe_only or own.safe_only()))


def _config_of_environment() -> ClusterConfig | None:
    if not os.environ.get(CONFIG_ENV):
        return None
    from zmqdist.cluster.config import ClusterConfig

    return ClusterConfig.from_environment()


def _resolve(target: Any) -> Target:
    config: Any = _config_of_environment() if target is None else getattr(target, "config", None)
    # only a ClusterConfig has `runtime`
    if (runtime := getattr(config, "runtime", None)) is not None:
        return target_of(config, runtime)
    if target is None:
        raise ValueError(
            f"no target was given and {CONFIG_ENV} names no running cluster: wanted {ACCEPTED}"
        )
    address = target if isinstance(target, str) else getattr(target, "target", None)
    if not isinstance(address, str):
        raise ValueError(f"cannot schedule on {target!r}: wanted as `target` {ACCEPTED}")
    address = address.removeprefix("zmq://")
    try:
        split(address)
    except Exception as error:
        raise ValueError(f"{error}: wanted {ACCEPTED}") from None
    credentials = getattr(target, "credentials", None)
    credentials_of_target = (
        credentials if isinstance(credentials, Credentials) else credentials_for(address)
    )
    grace_s = getattr(target, "cancel_grace_s", limits.CANCEL_GRACE_S)
    return Target(address, credentials_of_target.vouched_by(address), cancel_grace_s=grace_s)


def target_of(config: ClusterConfig, runtime: RuntimeConfig) -> Target:
    """Return the dispatcher of a cluster that `zmqdist launch` runs, with the settings of its
    file.
    """
    dispatcher, workers = config.jobs.dispatcher, config.jobs.worker
    address = runtime.dispatcher.removeprefix("zmq://")
    return Target(
        address,
        Credentials(runtime.token_file, runtime.keys_dir).vouched_by(address),
        limits.QUEUE_MAX if dispatcher is None else dispatcher.queue_max,
        limits.CANCEL_GRACE_S if workers is None else workers.cancel_grace_s,
        None if dispatcher is None else dispatcher.queue_bytes_max,
        ResultForm(config.security.results == "safe"),
    )
