"""Conversion of the plain dicts of a cluster file into sections, and the rules that the types of
keys cannot express.

The module that reads a file (config.py) knows the line of each key but not its meaning. This module
knows the meaning of each key but not its line. It therefore names a mistake by the path of the key,
from which config.py finds the line. This module raises the first mistake as a `Mistake`. It checks
in the order in which a user would correct mistakes: unknown keys, missing keys, types and ranges.
Then it checks addresses, ports, commands and the rules that involve several keys.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar, get_args, get_origin

import msgspec

from zmqdist import limits
from zmqdist.addresses import (
    advertised_address,
    check_advertised,
    is_loopback,
    is_wildcard,
    parse_ports,
    split_address,
)
from zmqdist.blas_threads import VARIABLES
from zmqdist.cluster.file_sections import Job, Section, SingleJob
from zmqdist.field_types import did_you_mean

Path: TypeAlias = tuple[Any, ...]
"""The keys and list indices that lead from the top of the file to a value."""
Config: TypeAlias = Any
"""A ClusterConfig. Its module imports this one, so that its class has no name here."""
_S = TypeVar("_S", bound=Section)
_SHOWN_MAX = 40
_KUBERNETES_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""The pattern of cluster names for Kubernetes. Names of Services begin with a letter. Names of
pods, which may have 63 characters, begin with the name of the cluster, so 40 characters are left
for the cluster's name.
"""


class Mistake(Exception):
    """A mistake in the value at `path`. The caller, which knows the file, converts it into a
    ConfigError."""

    def __init__(self, path: Path, problem: str, hint: str = "") -> None:
        super().__init__(path, problem, hint)
        self.path = path
        self.problem = problem
        self.hint = hint


def dotted(path: Path) -> str:
    """Return a path as text: `jobs.worker.tasks[1]` for `("jobs", "worker", "tasks", 1)`."""
    text = ""
    for part in path:
        if isinstance(part, str):
            text += ("." if text else "") + (part if part.isidentifier() else displayed(part))
        else:
            text += f"[{displayed(part)}]"
    return text or "(file)"


def displayed(value: object) -> str:
    """Return a value as short text in one line, for an error text: its repr, or "nothing", "true",
    "false", "a list" or "a mapping"."""
    if value is None or isinstance(value, bool | dict | list):
        return _kind(value)
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of several thousand digits
        return "a very large number"
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."


def _kind(value: object) -> str:
    """Return a phrase for the kind of a value, such as "a text", for error texts that must not
    repeat the value."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "a text"
    if isinstance(value, dict | list):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    return "a number"


def build(kind: type[_S], raw: Any, path: Path = (), *, text_keys: bool = False) -> _S:
    """Return the section of type `kind` that `raw` describes. This checks the names, types and
    ranges of keys; `problems` checks the rest.

    Args:
      path: the path of the section in the file, for a Mistake.
      text_keys: whether the indices of tasks may be text, as in JSON, where all keys are text.

    Raises:
      Mistake: the first mistake that was found.
    """
    if not isinstance(raw, dict):
        raise Mistake(path, f"expected a mapping of keys to values, got {displayed(raw)}")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    # Unknown keys come first: a misspelt key would otherwise be reported as a missing one.
    for key in raw:
        if key not in fields:
            raise Mistake(
                (*path, key),
                "unknown job" if path == ("jobs",) else "unknown key",
                # never suggest `runtime`, which only a launcher writes
                did_you_mean(key, [name for name in fields if name != "runtime"], "known are:"),
            )
    for name, field in fields.items():
        if field.required and name not in raw:
            raise Mistake((*path, name), "required key is missing")
    values: dict[str, Any] = {}
    for name in raw:
        inner, value = _section_in(fields[name].type), raw[name]
        if inner is None:
            values[name] = _leaf(fields[name].type, value, (*path, name), text_keys)
        else:
            # the value is None if all keys of the section are commented out, and the section then
            # has its defaults
            values[name] = build(
                inner, {} if value is None else value, (*path, name), text_keys=text_keys
            )
    return kind(**values)


def _section_in(hint: Any) -> type[Section] | None:
    """Return the section class in an annotation like `Annotated[Section | None, ...]`. None means
    that a key with this annotation holds a plain value or a list of sections.
    """
    if get_origin(hint) is list:
        return None
    if isinstance(hint, type) and issubclass(hint, Section):
        return hint
    return next(filter(None, map(_section_in, get_args(hint))), None)


def _leaf(hint: Any, value: Any, path: Path, text_keys: bool) -> Any:
    try:
        return msgspec.convert(value, hint, str_keys=text_keys)
    except msgspec.ValidationError:
        extra = next(
            meta.extra for meta in get_args(hint) if isinstance(meta, msgspec.Meta) and meta.extra
        )
    value_text, value_path = _offender(hint, value, path, text_keys, extra["secret"])
    raise Mistake(value_path, f"expected {extra['expected']}, got {value_text}")


def _offender(hint: Any, value: Any, path: Path, text_keys: bool, secret: bool) -> tuple[str, Path]:
    """Return the wrong part of `value` as text, and its path. In a list or mapping this is the
    first wrong item or key, if there is one."""
    say = _kind if secret else displayed
    if isinstance(value, list):
        for index, item in enumerate(value):
            if not _fits(hint, [item], text_keys):
                return say(item), (*path, index)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not _fits(_with_any_value(hint), {key: item}, text_keys):
                return f"the key {displayed(key)}", (*path, key)
            if not _fits(hint, {key: item}, text_keys):
                return say(item), (*path, key)
    return say(value), path


def _with_any_value(hint: Any) -> Any:
    """Return the dict type in an annotation, but with values of any type. None means that the
    annotation has no dict type."""
    if get_origin(hint) is dict:
        return dict[get_args(hint)[0], Any]  # type: ignore[misc]
    return next(filter(None, map(_with_any_value, get_args(hint))), None)


def _fits(hint: Any, value: Any, text_keys: bool) -> bool:
    try:
        msgspec.convert(value, hint, str_keys=text_keys)
    except msgspec.ValidationError:
        return False
    return True


# -- rules between keys ----------------------------------------------------------------------------


def problems(config: Config) -> Iterator[Mistake]:
    """Yield the mistakes that `build` does not find: wrong addresses, ports and commands, and keys
    that contradict each other."""
    jobs = config.jobs
    if jobs.dispatcher is None and not jobs.task_jobs():
        yield Mistake(("jobs",), "no job is given", "a cluster has at least a worker")
    for name, job in jobs.task_jobs().items():
        yield from _count_and_tasks(("jobs", name), job)
        for variable in job.env:
            if not variable or "=" in variable:
                yield Mistake(
                    ("jobs", name, "env", variable), "is no name for an environment variable"
                )
    if jobs.worker is not None:
        threads = VARIABLES if jobs.worker.threads_per_slot is not None else ()
        for variable in filter(jobs.worker.env.__contains__, threads):
            yield Mistake(
                ("jobs", "worker", "env", variable),
                "is given together with threads_per_slot",
                "leave one of them out",
            )
        for name, amount in jobs.worker.resources.items():
            if amount == "auto" if name != "gpu" else amount != "auto" and amount % 1:
                yield Mistake(
                    ("jobs", "worker", "resources", name),
                    f"is {amount}",
                    "only gpu may be auto, and gpu is a whole number otherwise",
                )
        yield from _bounds(config)
    for name, single, hint in (
        ("chief", jobs.chief, "others are workers"),
        ("evaluator", jobs.evaluator, ""),
    ):
        if single is not None and len(single.indices()) > 1:
            key = "count" if single.tasks is None else "tasks"
            yield Mistake(("jobs", name, key), f"there is at most one {name}", hint)
    yield from _addresses(config)
    yield from _advertised(config)
    if config.ports is not None:
        try:
            parse_ports(config.ports)
        except ValueError as error:
            yield Mistake(("ports",), str(error))
    yield from _command(config)
    if config.launcher != "local":
        yield from _on_hosts(config)
    own_rules = {"ssh": _ssh, "kubernetes": _kubernetes, "ray": _ray}
    if config.launcher in own_rules:
        yield from own_rules[config.launcher](config)


def _bounds(config: Config) -> Iterator[Mistake]:
    """Yield the mistakes in min, max and idle_s of the workers: keys that contradict each other,
    and bounds that a launcher ignores."""
    worker, path = config.jobs.worker, ("jobs", "worker")
    hint = "write both, for example min: 1, max: 8"
    if worker.min is None and worker.max is None:
        if worker.idle_s != limits.WORKER_IDLE_S:
            yield Mistake((*path, "idle_s"), "is given without min and max", hint)
        return
    for name, missing in (("min", "max"), ("max", "min")):
        if getattr(worker, missing) is None:
            yield Mistake((*path, name), f"is given without {missing}", hint)
            return
    if worker.tasks is not None:
        yield Mistake(
            (*path, "tasks"),
            "lists the workers, and with min and max their number changes",
            "write count",
        )
    elif worker.min > worker.max:
        yield Mistake((*path, "min"), f"is {worker.min}, and max is {worker.max}")
    elif worker.count is not None and not worker.min <= worker.count <= worker.max:
        yield Mistake(
            (*path, "count"), f"is {worker.count}, and min is {worker.min} and max {worker.max}"
        )
    if config.launcher in _FIXED_SIZE:
        yield Mistake((*path, "max"), *_FIXED_SIZE[config.launcher])


_FIXED_SIZE = {
    "kubernetes": (
        "has no effect in Kubernetes, which holds the workers",
        "use an autoscaler there",
    ),
    "ray": ("has no effect with Ray, where each worker is placed at the start", "write count"),
}
"""The launchers that ignore the bounds of the number of workers: why, and what to write."""


def _count_and_tasks(path: Path, job: Job) -> Iterator[Mistake]:
    if job.count is not None and job.tasks is not None:
        yield Mistake((*path, "count"), "is given together with tasks", "leave one of them out")
    if job.count is None and job.tasks is None and not isinstance(job, SingleJob):
        yield Mistake(path, "has neither count nor tasks", "write for example count: 1")
    if len(job.tasks or ()) > limits.WORKERS_MAX:
        yield Mistake(
            (*path, "tasks"),
            f"has {len(job.tasks or ())} tasks, at most {limits.WORKERS_MAX} are allowed",
        )


def _addresses(config: Config) -> Iterator[Mistake]:
    first: dict[tuple[str, int], Path] = {}
    for path, address in _addresses_in(config):
        try:
            host, port = split_address(address)
        except ValueError as error:
            yield Mistake(path, f"bad address {displayed(address)}: {error}")
            continue
        # A dispatcher may bind every interface and take a free port. Other tasks connect to a task
        # at this address, so it must name a host and a port.
        is_task = path[1] != "dispatcher"
        if not host or (is_task and is_wildcard(host)):
            yield Mistake(path, f"bad address {displayed(address)}: it names no host")
        elif is_task and not port:
            yield Mistake(
                path,
                f"bad address {displayed(address)}: the other tasks must know the port",
                "or use count",
            )
        elif (host, port) in first:
            yield Mistake(
                path, f"address {address} is listed twice", f"first at {dotted(first[host, port])}"
            )
        elif config.security.curve is False and not is_loopback(host):
            yield Mistake(
                path,
                f"address {address} is not on loopback and security.curve is false: any peer "
                f"could connect",
                "write curve: auto, or use 127.0.0.1",
            )
        first.setdefault((host, port), path)


def _addresses_in(config: Config) -> Iterator[tuple[Path, str]]:
    if config.jobs.dispatcher is not None:
        yield ("jobs", "dispatcher", "address"), config.jobs.dispatcher.address
    for name, job in config.jobs.task_jobs().items():
        for index, address in job.addresses().items():
            yield ("jobs", name, "tasks", index), address


def _on_hosts(config: Config) -> Iterator[Mistake]:
    """Yield a mistake for each setting that does not fit a launcher that places roles on other
    hosts."""
    for name in ("worker", "ps"):
        job = config.jobs.task_jobs().get(name)
        # If the config has the section `runtime`, a launcher has written the config and has filled
        # in the tasks itself.
        if job is not None and job.tasks is not None and config.runtime is None:
            yield Mistake(
                ("jobs", name, "tasks"),
                f"launcher: {config.launcher} finds the addresses itself",
                "write count instead",
            )
    if config.security.curve is False:
        yield Mistake(
            ("security", "curve"),
            f"launcher: {config.launcher} connects hosts, which needs keys",
            "write curve: auto",
        )


def _ssh(config: Config) -> Iterator[Mistake]:
    path = ("ssh", "hosts")
    hosts = config.ssh.hosts
    if not hosts:
        yield Mistake(
            path,
            "launcher: ssh needs at least one host",
            "write for example ssh: {hosts: [node-a, node-b]}",
        )
        return
    names = [entry if isinstance(entry, str) else entry.host for entry in hosts]
    for index, name in enumerate(names):
        # two agents on one host would each give all of its slots
        if name in names[:index]:
            yield Mistake((*path, index), f"host {name} is listed twice", "write its slots once")
    slots = [None if isinstance(entry, str) else entry.slots for entry in hosts]
    jobs = config.jobs
    roles = (0 if jobs.worker is None else jobs.worker.most()) + (
        0 if jobs.ps is None else len(jobs.ps.indices())
    )
    bounded = [entry for entry in slots if entry is not None]
    if len(bounded) == len(slots) and sum(bounded) < roles:
        yield Mistake(
            path,
            f"the jobs have {roles} workers and ps, and the hosts have {sum(bounded)} slots",
            "raise slots, or leave it out",
        )


def _advertised(config: Config) -> Iterator[Mistake]:
    for name in ("dispatcher", "worker", "ps"):
        job = getattr(config.jobs, name)
        if job is None or job.advertise is None:
            continue
        path = ("jobs", name, "advertise")
        try:
            check_advertised(job.advertise)
        except ValueError as error:
            yield Mistake(path, f"bad address {displayed(job.advertise)}: {error}")
            continue
        if (
            name != "dispatcher"
            and len(job.indices()) > 1
            and job.advertise == advertised_address(job.advertise, 1)
        ):
            yield Mistake(
                path, f"names one port for {len(job.indices())} tasks", "write the host alone"
            )


def _kubernetes(config: Config) -> Iterator[Mistake]:
    """Yield a mistake for each missing setting that the manifests need, and for each setting that
    has no meaning in a pod."""
    section, jobs = config.kubernetes, config.jobs
    if not section.image:
        yield Mistake(
            ("kubernetes", "image"),
            "required key is missing",
            "an image with zmqdist and the program in it",
        )
    if not _KUBERNETES_NAME.fullmatch(config.name):
        yield Mistake(
            ("name",),
            f"{displayed(config.name)} cannot begin the names of objects in Kubernetes",
            "at most 40 small letters, digits and '-', a letter first",
        )
    if jobs.dispatcher is not None:
        host, _ = split_address(jobs.dispatcher.address)
        if not is_loopback(host) and not is_wildcard(host):
            path = ("jobs", "dispatcher", "address")
            yield Mistake(
                path,
                f"names the host {displayed(host)}, which Kubernetes chooses",
                "leave the address out",
            )
    if (
        jobs.worker is not None
        and jobs.worker.slots == "auto"
        and section.resources.worker.cpu is None
    ):
        yield Mistake(
            ("jobs", "worker", "slots"),
            "is auto, but the file does not say how many cores a worker's pod has",
            "write kubernetes.resources.worker.cpu, or a number of slots",
        )


def _ray(config: Config) -> Iterator[Mistake]:
    worker = config.jobs.worker
    if "://" in config.ray.address:
        yield Mistake(
            ("ray", "address"),
            "names a server of Ray's client, but the dispatcher must run where the workers can "
            "reach it",
            "run launch on a node of the Ray cluster, with auto",
        )
    if worker is not None and worker.slots == "auto" and config.runtime is None:
        yield Mistake(
            ("jobs", "worker", "slots"),
            "is auto, but Ray needs the number of slots to place a worker",
            "write for example 4",
        )


def _command(config: Config) -> Iterator[Mistake]:
    programs: list[tuple[Path, str | list[str]]] = [(("program",), config.program)]
    if config.jobs.evaluator is not None and config.jobs.evaluator.program is not None:
        programs.append((("jobs", "evaluator", "program"), config.jobs.evaluator.program))
    for path, program in programs:
        try:
            words = split_command(program)
        except ValueError as error:
            yield Mistake(
                path, f"cannot be split into words: {error}", "a list of words needs no quotes"
            )
            continue
        if not words or not words[0]:
            yield Mistake(path, "is empty", "write the command line, for example python train.py")


def split_command(program: str | list[str]) -> tuple[str, ...]:
    """Return the words of a command line. Raises ValueError if a quote is not closed."""
    return tuple(shlex.split(program)) if isinstance(program, str) else tuple(program)
