"""Options for how a pipeline runs. They do not change which elements it computes.

Rules
    An option that is set overrides the default, and an option of a later `with_options` overrides
    the option of an earlier one. Setting an option that does not exist raises AttributeError, so
    that a misspelt name is noticed.

The pipeline acts on `deterministic`, `threading.private_threadpool_size` and `stats`. The other
options are for the data service, or are accepted and ignored so that programs for tf.data run
unchanged; docs/tensorflow.md lists them.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any


class AutoShardPolicy(IntEnum):
    """How TensorFlow's strategies shard a dataset. The policy of a data service is its
    ShardingPolicy.

    >>> options = zd.data.Options()
    >>> options.experimental_distribute.auto_shard_policy = zd.data.experimental.AutoShardPolicy.OFF
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class AutotuneAlgorithm(IntEnum):
    """TensorFlow's algorithms for AUTOTUNE.

    >>> zd.data.experimental.AutotuneAlgorithm.DEFAULT.value
    0
    """

    DEFAULT = 0
    HILL_CLIMB = 1
    GRADIENT_DESCENT = 2
    MAX_PARALLELISM = 3
    STAGE_BASED = 4


class ExternalStatePolicy(IntEnum):
    """What happens when a program registers, with a data service, a pipeline that depends on state
    outside its description.

    >>> options = zd.data.Options()
    >>> options.experimental_external_state_policy = zd.data.experimental.ExternalStatePolicy.FAIL
    """

    WARN = 0
    IGNORE = 1
    FAIL = 2


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
        return (
            f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.as_dict().items())})"
        )

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


class ThreadingOptions(_Group):
    """Options for threads. Attributes: as `Options.threading`.

    >>> options = zd.data.Options()
    >>> options.threading = zd.data.experimental.ThreadingOptions()
    """

    __slots__ = _names = ("max_intra_op_parallelism", "private_threadpool_size")
    max_intra_op_parallelism: int | None
    private_threadpool_size: int | None


class AutotuneOptions(_Group):
    """Options of AUTOTUNE, without effect.

    >>> options = zd.data.Options()
    >>> options.autotune = zd.data.experimental.AutotuneOptions()
    """

    __slots__ = _names = (
        "autotune_algorithm",
        "cpu_budget",
        "enabled",
        "initial_parallelism",
        "min_parallelism",
        "ram_budget",
    )


class DistributeOptions(_Group):
    """Options of TensorFlow's strategies, without effect.

    >>> options = zd.data.Options()
    >>> options.experimental_distribute = zd.data.experimental.DistributeOptions()
    """

    __slots__ = _names = ("auto_shard_policy", "num_devices")


class OptimizationOptions(_Group):
    """Options of TensorFlow's rewriting of graphs, without effect.

    >>> options = zd.data.Options()
    >>> options.experimental_optimization.map_fusion = True
    """

    __slots__ = _names = (
        "apply_default_optimizations",
        "filter_fusion",
        "filter_parallelization",
        "inject_prefetch",
        "map_and_batch_fusion",
        "map_and_filter_fusion",
        "map_fusion",
        "map_parallelization",
        "noop_elimination",
        "parallel_batch",
        "seq_interleave_prefetch",
        "shuffle_and_repeat_fusion",
    )


class ServiceOptions(_Group):
    """Options of TensorFlow's data service, without effect.

    >>> options = zd.data.Options()
    >>> options.experimental_service.pinned = False
    """

    __slots__ = _names = ("pinned",)


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
      experimental_external_state_policy: what happens when a program registers, with a data
        service, a pipeline that depends on state outside its description (external_state.py):
        "WARN" (the default), "IGNORE" or "FAIL", or a member of ExternalStatePolicy.
      experimental_deterministic, experimental_threading: older names of `deterministic` and
        `threading`.
      threading.max_intra_op_parallelism, autotune, dataset_name, framework_type,
      experimental_distribute, experimental_optimization, experimental_service, experimental_slack,
      experimental_symbolic_checkpoint, experimental_warm_start: accepted and ignored.
    """

    __slots__ = _names = (
        "autotune",
        "dataset_name",
        "deterministic",
        "experimental_distribute",
        "experimental_external_state_policy",
        "experimental_optimization",
        "experimental_service",
        "experimental_slack",
        "experimental_symbolic_checkpoint",
        "experimental_warm_start",
        "framework_type",
        "stats",
        "threading",
    )
    deterministic: bool | None
    experimental_external_state_policy: Any
    stats: bool | None
    threading: Any
    autotune: Any
    experimental_distribute: Any
    experimental_optimization: Any
    experimental_service: Any

    def __init__(self) -> None:
        super().__init__()
        for name, group in _GROUPS.items():
            setattr(self, name, group())

    def __setattr__(self, name: str, value: Any) -> None:
        name = _OLD_NAMES.get(name, name)
        group = _GROUPS.get(name)
        if group is not None and value is not None and type(value) is not group:
            raise TypeError(f"{name} wants {group.__name__}, not {type(value).__name__}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _OLD_NAMES:
            return getattr(self, _OLD_NAMES[name])
        raise AttributeError(f"Options has no option {name!r}: {', '.join(self._names)}")

    def merge(self, options: Options) -> Options:
        """Return the options of both. What `options` sets overrides what is set here.

        >>> first, second = zd.data.Options(), zd.data.Options()
        >>> first.deterministic, second.deterministic, first.stats = True, False, True
        >>> first.merge(second).as_dict()
        {'deterministic': False, 'stats': True}
        """
        merged = type(self).of(self.as_dict())
        merged.update(options.as_dict())
        return merged

    @classmethod
    def of(cls, values: dict[str, Any]) -> Options:
        """Return the Options from the result of `as_dict`.

        >>> zd.data.Options.of(zd.data.Options().as_dict()).deterministic is None
        True
        """
        options = cls()
        options.update(values)
        return options


_GROUPS: dict[str, type[_Group]] = {
    "autotune": AutotuneOptions,
    "experimental_distribute": DistributeOptions,
    "experimental_optimization": OptimizationOptions,
    "experimental_service": ServiceOptions,
    "threading": ThreadingOptions,
}
_OLD_NAMES = {"experimental_deterministic": "deterministic", "experimental_threading": "threading"}
