"""Options for how a pipeline runs. They do not change which elements it computes.

Rules
    An option that is set overrides the default, and an option of a later `with_options` overrides
    the option of an earlier one. Setting an option that does not exist raises AttributeError, so
    that a misspelt name is noticed.

The pipeline acts on `deterministic`, `threading.private_threadpool_size` and `stats`. The other
options are for the data service, or are accepted and ignored so that programs for tf.data run
unchanged.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class _Group:
    """A group of options. An option that is not set is None."""

    __slots__ = ()
    _names: tuple[str, ...] = ()

    def __init__(self) -> None:
        for name in self._names:
            setattr(self, name, None)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Group)
            and type(other) is type(self)
            and other.as_dict() == self.as_dict()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_')}({', '.join(f'{k}={v!r}' for k, v in self.as_dict().items())})"

    def as_dict(self) -> dict[str, Any]:
        """Return the options that are set, as plain values. Members of enums are replaced by their
        names.

        >>> options = zd.data.Options()
        >>> options.deterministic = True
        >>> options.as_dict()["deterministic"]
        True
        """
        values: dict[str, Any] = {}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, _Group):
                value = value.as_dict() or None
            # a description is JSON, which has no enums
            if isinstance(value, Enum):
                value = value.name
            if value is not None:
                values[name] = value
        return values

    def update(self, values: dict[str, Any]) -> None:
        """Set the options in `values`, which `as_dict` returned.

        >>> options, others = zd.data.Options(), zd.data.Options()
        >>> others.stats = True
        >>> options.update(others.as_dict())
        >>> options.stats
        True
        """
        for name, value in values.items():
            have = getattr(self, name)
            if isinstance(have, _Group):
                have.update(value)
            else:
                setattr(self, name, value)


class _Threading(_Group):
    __slots__ = _names = ("max_intra_op_parallelism", "private_threadpool_size")
    max_intra_op_parallelism: int | None
    private_threadpool_size: int | None


class _Autotune(_Group):
    __slots__ = _names = ("cpu_budget", "enabled", "ram_budget")
    cpu_budget: int | None
    enabled: bool | None
    ram_budget: int | None


class _Distribute(_Group):
    __slots__ = _names = ("auto_shard_policy", "num_devices")
    auto_shard_policy: Any
    num_devices: int | None


class _Service(_Group):
    __slots__ = _names = ("pinned",)
    pinned: bool | None


class Options(_Group):
    """Options for how a pipeline runs. Attach them by `Dataset.with_options`. Every option is None
    until it is set.

    >>> options = zd.data.Options()
    >>> options.threading.private_threadpool_size = 2
    >>> int(sum(Dataset.range(4).map(abs, num_parallel_calls=2).with_options(options)))
    6

    Attributes:
      stats: True counts elements and measures times of the operators, for `iterator.stats()`.
      deterministic: False lets parallel operators yield elements in the order in which they are
        ready. None means True.
      threading.private_threadpool_size: the largest number of threads for each parallel operator.
      threading.max_intra_op_parallelism, autotune.enabled / cpu_budget / ram_budget: accepted and
      ignored.
      experimental_external_state_policy: what happens when a program registers, with a data
        service, a pipeline that depends on state outside its description (external_state.py):
        "WARN" (the default), "IGNORE" or "FAIL".
      experimental_distribute.auto_shard_policy / num_devices, experimental_service.pinned: accepted
      and ignored.
    """

    __slots__ = _names = (
        "autotune",
        "deterministic",
        "experimental_distribute",
        "experimental_external_state_policy",
        "experimental_service",
        "stats",
        "threading",
    )
    deterministic: bool | None
    experimental_external_state_policy: Any
    stats: bool | None

    def __init__(self) -> None:
        super().__init__()
        self.autotune = _Autotune()
        self.experimental_distribute = _Distribute()
        self.experimental_service = _Service()
        self.threading = _Threading()

    @classmethod
    def of(cls, values: dict[str, Any]) -> Options:
        """Return the Options from the result of `as_dict`.

        >>> zd.data.Options.of(zd.data.Options().as_dict()).deterministic is None
        True
        """
        options = cls()
        options.update(values)
        return options
