"""Reads a cluster file, which is YAML, and returns one frozen `ClusterConfig`, or raises a
ConfigError that names file, line and key.

Rules
    This is the only module that imports yaml. It converts YAML's node tree, whose nodes know their
    lines, to dicts, lists, text, numbers, booleans and None, so a file cannot create other objects.
    The size of a file, its number of values and its depth are bounded. Each use of an alias counts
    as the values that the alias stands for.
    A program reads its config once, when it starts. The modules that get the config do not read the
    environment.

A launcher writes a file with its config for its child processes. The config in this file has all
addresses and the section `runtime`. The path of the file is in the environment variable
`CONFIG_ENV`. A user may set this variable to JSON in the form of TF_CONFIG instead, which
`zmqdist.resolvers` reads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import yaml  # type: ignore[import-untyped,unused-ignore]
from msgspec import Meta
from yaml.constructor import SafeConstructor  # type: ignore[import-untyped,unused-ignore]

from zmqdist import limits
from zmqdist.addresses import split_address
from zmqdist.cluster.check import Mistake, Path, build, displayed, dotted, problems, split_command
from zmqdist.cluster.environment import CONFIG_ENV, is_json
from zmqdist.cluster.file_sections import (
    Job,
    JobsConfig,
    RuntimeConfig,
    Section,
    SecurityConfig,
    documented,
)
from zmqdist.cluster.launcher_sections import (
    KubernetesConfig,
    LauncherName,
    RayConfig,
    SlurmConfig,
    SshConfig,
)
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.errors import ConfigError
from zmqdist.files import read_regular

# libyaml builds the same nodes ten times as fast as Python
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_TOO_DEEP = f"is nested more than {limits.DEPTH_MAX} levels deep"


class ClusterConfig(Section, frozen=True):
    """A whole cluster file.

    >>> rows = {"name": "it", "jobs": {"worker": {"count": 2}}, "program": "python it.py"}
    >>> config = zd.ClusterConfig.from_dict(rows)
    >>> config.jobs.worker.count
    2

    `load`, `from_dict` and `from_environment` create and check a ClusterConfig.
    `msgspec.structs.replace` makes a changed copy without checking the copy.
    """

    name: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$(?!\n)", max_length=64)],
        documented(
            "Name of the cluster, for logs and folders.",
            "a name of at most 64 letters, digits, '.', '_' or '-'",
        ),
    ]
    jobs: Annotated[JobsConfig, documented("The jobs of the cluster.", "a mapping")]
    program: Annotated[
        str | list[str],
        documented(
            "The program that runs on the cluster, as its chief.",
            "a command line, or a list of words",
        ),
    ]
    security: Annotated[SecurityConfig, documented("Which peers may connect.", "a mapping")] = (
        SecurityConfig()
    )
    ports: Annotated[
        str | None,
        documented(
            "The range from which processes of the cluster take free ports, for a firewall; null: "
            "any port.",
            "a range such as 5000-5100, or null",
        ),
    ] = None
    code: Annotated[
        list[str] | None,
        documented(
            "Paths of the code to send to hosts that do not share this file system; []: no code; "
            "null: the folder of the program's script, "
            "or no code with slurm or without a script.",
            "a list of paths, or null",
        ),
    ] = None
    launcher: Annotated[
        LauncherName,
        documented(
            "The launcher, which starts the jobs; --on overrides it.",
            "local, ssh, slurm, kubernetes or ray",
        ),
    ] = "local"
    ssh: Annotated[SshConfig, documented("Hosts that ssh reaches.", "a mapping")] = SshConfig()
    slurm: Annotated[SlurmConfig, documented("The job of Slurm.", "a mapping")] = SlurmConfig()
    kubernetes: Annotated[
        KubernetesConfig, documented("Settings of the manifests.", "a mapping")
    ] = KubernetesConfig()
    ray: Annotated[RayConfig, documented("A Ray cluster that runs already.", "a mapping")] = (
        RayConfig()
    )
    runtime: RuntimeConfig | None = None

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        launcher: str | None = None,
        *,
        runtime_allowed: bool = False,
    ) -> ClusterConfig:
        """Read and check a cluster file.

        >>> from pathlib import Path
        >>> lines = ["name: it", "jobs: {worker: {count: 2}}", "program: python it.py"]
        >>> _ = Path(folder, "cluster.yaml").write_text(chr(10).join(lines))
        >>> zd.ClusterConfig.load(f"{folder}/cluster.yaml").name
        'it'

        Args:
          launcher: a value that replaces the `launcher` of the file.
          runtime_allowed: whether the file may have the section `runtime`, which a launcher writes
            for its roles.

        Raises:
          ConfigError: the file cannot be read, is not YAML, or has a mistake. The text describes
            the first mistake. A host that does not exist, a port in use or a missing program is not
            noticed here, but when the cluster starts.
        """
        file = os.fspath(path)
        root = _compose(_read(file), file)
        nodes = _Nodes()
        try:
            raw = nodes.value(root, ())
            if not isinstance(raw, dict):
                raise Mistake((), f"expected a mapping of keys to values, got {displayed(raw)}")
            if "runtime" in raw and not runtime_allowed:
                raise Mistake(("runtime",), "is written by the launcher only", "leave it out")
            if launcher is not None:
                raw["launcher"] = launcher
            return _checked(raw, text_keys=False)
        except Mistake as mistake:
            raise _located(mistake, file, nodes.lines) from None

    @classmethod
    def from_environment(cls) -> ClusterConfig | None:
        """Return the config in the file that CONFIG_ENV names. `zmqdist launch` sets this variable
        for its processes. None means that the variable is not set or is JSON.

        >>> zd.ClusterConfig.from_environment() is None
        True

        Raises:
          ConfigError: the variable names a file that cannot be read or has a mistake.
        """
        path = os.environ.get(CONFIG_ENV)
        return cls.load(path, runtime_allowed=True) if path and not is_json(path) else None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClusterConfig:
        """Return the config that a dict describes, in the form of `to_dict`.

        >>> jobs = {"worker": {"count": 2}}
        >>> zd.ClusterConfig.from_dict({"name": "it", "jobs": jobs, "program": "python it.py"}).name
        'it'

        Raises:
          ConfigError: `data` has a mistake. The text names `(dict)` in place of the file, and line
            1.
        """
        try:
            return _checked(dict(data), text_keys=True)
        except Mistake as mistake:
            raise _located(mistake, "(dict)", {}) from None

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a new dict that JSON can represent. Keys with their default values
        are left out. The values of `env`, which may be secret, are included.

        >>> rows = {"name": "it", "jobs": {"worker": {"count": 2}}, "program": "python it.py"}
        >>> config = zd.ClusterConfig.from_dict(rows)
        >>> config.to_dict()["jobs"]
        {'worker': {'count': 2}}
        """
        built: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return built

    def to_yaml(self) -> str:
        """Return the text of a cluster file with this config. `load` returns an equal config from
        such a file. If the config has `runtime`, call `load` with `runtime_allowed=True`.

        >>> rows = {"name": "it", "jobs": {"worker": {"count": 2}}, "program": "python it.py"}
        >>> config = zd.ClusterConfig.from_dict(rows)
        >>> print(config.to_yaml().splitlines()[0])
        name: it
        """
        text: str = yaml.safe_dump(msgspec.to_builtins(self), sort_keys=False)
        return text

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the program's command line, for `subprocess`. No shell runs them."""
        return split_command(self.program)

    @property
    def spec(self) -> ClusterSpec:
        """The ClusterSpec of the jobs that have addresses. Jobs with only a count are left out, and
        so is a dispatcher with port 0."""
        dispatcher, jobs = self.jobs.dispatcher, self.task_spec.as_dict()
        if dispatcher is not None and split_address(dispatcher.address)[1]:
            jobs = {"dispatcher": [dispatcher.address], **jobs}
        return ClusterSpec(jobs)

    @property
    def task_spec(self) -> ClusterSpec:
        """The cluster of TF_CONFIG. This is `spec` without the dispatcher, because TensorFlow's
        strategies do not know a dispatcher."""
        jobs = self.jobs.task_jobs().items()
        return ClusterSpec({name: job.addresses() for name, job in jobs if job.tasks is not None})

    def tf_config(self, task_type: str, task_index: int) -> str:
        """Return the text of TF_CONFIG for one task.

        >>> jobs = {"worker": {"tasks": ["host1:5000", "host2:5000"]}}
        >>> rows = {"name": "it", "jobs": jobs, "program": "python it.py"}
        >>> config = zd.ClusterConfig.from_dict(rows)
        >>> '"index": 1' in config.tf_config("worker", 1)
        True

        The chief may be missing in the file, because the program always runs as chief.

        Raises:
          ValueError: the file has no such task.
        """
        job = self.jobs.task_jobs().get(task_type, Job(count=1) if task_type == "chief" else Job())
        if task_index not in job.indices():
            raise ValueError(f"cluster {self.name!r} has no task {task_index} of job {task_type!r}")
        task = {"type": task_type, "index": task_index}
        return json.dumps({"cluster": self.task_spec.as_dict(), "task": task, "rpc_layer": "zmq"})


class _Dumper(yaml.SafeDumper):  # type: ignore[misc,unused-ignore]
    """A YAML dumper for readable documents. It writes a text of several lines as a block, and
    writes no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        _TAG + "str", text, style="|" if "\n" in text else None
    ),
)


def yaml_documents(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return YAML text with one document for each mapping. The keys have the order of the mapping,
    and equal mappings give equal texts."""
    text: str = yaml.dump_all(
        documents, Dumper=_Dumper, explicit_start=True, sort_keys=False, width=1_000_000
    )
    return text


def schema() -> dict[str, Any]:
    """Return a JSON Schema of the cluster file, for editors. The schema accepts the keys, types and
    ranges that `load` accepts.

    >>> zd.cluster.schema()["$schema"]
    'https://json-schema.org/draft/2020-12/schema'

    Only `load` checks addresses, and the rules that involve several keys, such as the rule that no
    address is listed twice.
    """
    tree = msgspec.json.schema(ClusterConfig)
    defs = tree["$defs"]
    top = defs["ClusterConfig"]["properties"]
    del defs["RuntimeConfig"], top["runtime"]
    for definition in (key for section in defs.values() for key in section["properties"].values()):
        if "$ref" in definition:
            # the value of the key is a section, and null means the defaults of the section
            definition["anyOf"] = [{"$ref": definition.pop("$ref")}, {"type": "null"}]
    defs["JobsConfig"]["minProperties"] = 1
    for name, job in defs["JobsConfig"]["properties"].items():
        del job["default"]
        if name in ("worker", "ps"):  # these jobs need count or tasks, so null is not valid
            job["anyOf"].remove({"type": "null"})
    for name in ("ServingJob", "WorkerJob"):
        defs[name]["oneOf"] = _COUNT_OR_TASKS
    for name in ("SingleJob", "EvaluatorJob"):
        defs[name]["oneOf"] = [*_COUNT_OR_TASKS, _NEITHER]
    for definition in defs.values():
        definition["description"] = definition["description"].partition("\n")[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree}


# `required` accepts a key whose value is null. `type` refuses null here, because a cluster file
# with `count: null` has no count.
_COUNT_OR_TASKS = [
    {"required": ["count"], "properties": {"count": {"type": "integer"}}},
    {"required": ["tasks"], "properties": {"tasks": {"type": ["array", "object"]}}},
]

_NEITHER = {"properties": {"count": {"type": "null"}, "tasks": {"type": "null"}}}


# -- from a file to sections -----------------------------------------------------------------------


def _checked(raw: dict[str, Any], *, text_keys: bool) -> ClusterConfig:
    config = build(ClusterConfig, raw, text_keys=text_keys)
    for mistake in problems(config):
        raise mistake
    return config


def _located(mistake: Mistake, path: str, lines: dict[Path, int]) -> ConfigError:
    """Return the ConfigError for a mistake. A missing key has no line, so the error names the line
    of the nearest key above it in the path.
    """
    known_path = mistake.path
    while known_path and known_path not in lines:
        known_path = known_path[:-1]
    return ConfigError(
        path, lines.get(known_path, 1), dotted(mistake.path), mistake.problem, mistake.hint
    )


def _read(path: str) -> str:
    try:
        data = read_regular(path, limits.CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(path, 1, "(file)", f"cannot be read: {error.strerror}") from None
    if len(data) > limits.CONFIG_BYTES_MAX:
        raise ConfigError(
            path, 1, "(file)", f"is larger than {limits.CONFIG_BYTES_MAX} bytes: not a cluster file"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(
            path, line, "(file)", f"is not UTF-8: byte 0x{data[error.start]:02x}"
        ) from None


def _compose(text: str, path: str) -> yaml.Node:
    """Return the node tree of a YAML text. This first checks the depth on the flat sequence of
    YAML's events, because composing the tree is recursive, also in libyaml, so a deep text could
    overflow the stack.
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth > limits.DEPTH_MAX:
                line = event.start_mark.line + 1 if event.start_mark is not None else 1
                raise ConfigError(path, line, "(file)", _TOO_DEEP)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, _position(error, text)) + 1
        raise ConfigError(path, line, "(file)", "not YAML: it has a control character") from None
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(error, text, path) from None
    if root is None:
        raise ConfigError(
            path,
            1,
            "(file)",
            "is empty",
            "zmqdist validate --schema prints the keys of a cluster file",
        )
    return root


def _position(error: yaml.reader.ReaderError, text: str) -> int:
    """Return the index of the bad character in `text`. libyaml and PyYAML report positions in
    different units, but both report the character, so this function searches for it.
    """
    position = text.find(chr(error.character)) if isinstance(error.character, int) else -1
    return position if position >= 0 else int(error.position)


def _not_yaml(error: yaml.MarkedYAMLError, text: str, path: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    rows = text.splitlines()
    indent = rows[line - 1] if line <= len(rows) else ""
    if "\t" in indent[: len(indent) - len(indent.lstrip())]:
        return ConfigError(
            path, line, "(file)", "not YAML: a tab in the indentation", "indent with spaces"
        )
    # libyaml reads ahead, so it may reach its own limit of nesting before `_compose` has counted
    # DEPTH_MAX levels.
    if "nesting depth" in str(error.problem):
        return ConfigError(path, line, "(file)", _TOO_DEEP)
    return ConfigError(path, line, "(file)", f"not YAML: {error.problem}")


class _Nodes:
    """Converts YAML nodes to plain values, and records the line of each path."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self._count = 0

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Return the value of a node as a dict, list, str, int, float, bool or None. Raises Mistake
        if a rule of the module's docstring is broken.
        """
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._count += 1
        if len(path) > limits.DEPTH_MAX:
            raise Mistake(
                path[:1], f"has an alias that makes it more than {limits.DEPTH_MAX} levels deep"
            )
        if self._count > limits.CONFIG_NODES_MAX:
            raise Mistake(
                path[:1],
                f"makes the file larger than {limits.CONFIG_NODES_MAX} values when its aliases "
                f"are expanded",
            )
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node, path)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            raise _bad_tag(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._mapping(node, path)

    def _mapping(self, node: yaml.Node, path: Path) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.lines[path] = line
                raise Mistake(path, "a key must be a word or a number")
            key = _scalar(key_node, path)
            key_path = (*path, key)
            if key in values:
                first, self.lines[key_path] = self.lines[key_path], line
                raise Mistake(key_path, "duplicate key", f"first on line {first}")
            self.lines[key_path] = line
            values[key] = self.value(value_node, key_path)
        return values


_CONSTRUCTOR = SafeConstructor()
_PLAIN = {
    "null": _CONSTRUCTOR.construct_yaml_null,
    "bool": _CONSTRUCTOR.construct_yaml_bool,
    "int": _CONSTRUCTOR.construct_yaml_int,
    "float": _CONSTRUCTOR.construct_yaml_float,
}
# YAML tags 2026-01-01 as a timestamp. It stays text here, because no key of a cluster file is a
# date.
_TEXTS = ("str", "timestamp", "value", "merge")


def _scalar(node: yaml.ScalarNode, path: Path) -> Any:
    kind = node.tag.removeprefix(_TAG)
    text: str = node.value
    if kind in _TEXTS:
        if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise Mistake(path, "has a character that no text can have")
        return text
    if kind not in _PLAIN:
        raise _bad_tag(node, path)
    try:
        value = _PLAIN[kind](node)
    except (ValueError, LookupError):
        raise Mistake(path, f"{displayed(text)} cannot be read as {kind}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise Mistake(path, f"{displayed(text)} is not a finite number")
    return value


def _bad_tag(node: yaml.Node, path: Path) -> Mistake:
    return Mistake(path, f"the tag {displayed(node.tag)} is not allowed", "write a plain value")
