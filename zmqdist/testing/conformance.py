"""`check_resolver` checks the rules that every cluster resolver must keep. Call it in the tests of
your own resolver."""

from __future__ import annotations

import copy

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers.base import ClusterResolver


def check_resolver(resolver: ClusterResolver) -> None:
    """Call all methods of a resolver, and check that their results agree with each other. This
    function sets attributes only in a copy of the resolver, so the resolver itself does not change.

    >>> spec = zd.ClusterSpec({"worker": ["host1:5000"]})
    >>> zd.testing.check_resolver(zd.resolvers.SimpleClusterResolver(spec, rpc_layer="zmq"))

    Pass a resolver that describes a real cluster, the larger the better. The function cannot know
    the right addresses: it only compares the results of the methods with each other.

    Raises:
      AssertionError: the resolver breaks a rule; the text names the rule.
    """
    _rule(isinstance(resolver, ClusterResolver), "it is a zmqdist.resolvers.ClusterResolver")
    spec = resolver.cluster_spec()
    _rule(isinstance(spec, ClusterSpec), f"cluster_spec() is a ClusterSpec, not {spec!r}")
    _rule(
        resolver.cluster_spec() == spec,
        "cluster_spec() returns the same cluster when nothing has changed",
    )
    for equal_spec in (
        ClusterSpec(spec),
        ClusterSpec(spec.as_cluster_def()),
        ClusterSpec(spec.as_dict()),
    ):
        _rule(equal_spec == spec, "the cluster survives its ClusterDef and its dict")
    _check_masters(resolver, spec)
    _check_properties(resolver)
    counted = resolver.num_accelerators()
    right = isinstance(counted, dict) and all(
        isinstance(kind, str) and count >= 0 for kind, count in counted.items()
    )
    _rule(
        right and "CPU" not in counted,
        f"num_accelerators() is {{type: count}} without CPUs, not {counted!r}",
    )
    problems = resolver.validate()
    right = isinstance(problems, list) and all(isinstance(sentence, str) for sentence in problems)
    _rule(right, f"validate() is a list of sentences, not {problems!r}")


def _check_masters(resolver: ClusterResolver, spec: ClusterSpec) -> None:
    tasks = [(job, index) for job in spec.jobs for index in spec.task_indices(job)]
    for job, index in tasks:
        address, task = spec.task_address(job, index), f"{job!r}, {index}"
        master = resolver.master(job, index)
        lonely = len(tasks) == 1 and master == ""  # a cluster of one task may have no master
        _rule(
            lonely or master.rpartition("://")[2] == address,
            f"master({task}) is at {address!r}, not {master!r}",
        )
        master = resolver.master(job, index, rpc_layer="other")
        _rule(
            lonely or master == f"other://{address}",
            f"rpc_layer wins in master({task}, rpc_layer='other'), not {master!r}",
        )
    if len(tasks) > 1:
        job = tasks[0][0]
        beyond = max(spec.task_indices(job)) + 1
        for absent_task in ((job, beyond), ("no such job", 0)):
            try:
                master = resolver.master(*absent_task)
            except ValueError:
                continue
            _rule(
                False,
                f"master{absent_task!r} is a ValueError, as the cluster has no such task; not "
                f"{master!r}",
            )


def _check_properties(resolver: ClusterResolver) -> None:
    task_type, task_id = resolver.task_type, resolver.task_id
    _rule(
        isinstance(resolver.environment, str),
        f"environment is a text, not {resolver.environment!r}",
    )
    _rule(
        task_type is None or isinstance(task_type, str),
        f"task_type is a text or None, not {task_type!r}",
    )
    _rule(
        task_id is None or type(task_id) is int,
        f"task_id is a whole number or None, not {task_id!r}",
    )
    twin = copy.copy(resolver)
    twin.task_type, twin.task_id, twin.rpc_layer = "set", 0, "layer"
    values = twin.task_type, twin.task_id, twin.rpc_layer
    _rule(
        values == ("set", 0, "layer"),
        f"task_type, task_id and rpc_layer can be set, also to 0; not {values!r}",
    )


def _rule(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"a rule of resolvers is broken: {rule}")
