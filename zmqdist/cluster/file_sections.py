"""The sections of a cluster file, as frozen structs.

The type annotation of a key has three parts: the type with the allowed range, the description,
which editors show with the help of the JSON Schema, and a phrase for the allowed values, which
error texts contain. Rules that involve several keys are in `check.py`. Paths of folders and files
are relative to the working directory of the command. Null in place of a folder means that there is
no folder.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from zmqdist import blas_threads, limits
from zmqdist.addresses import advertised_address

_SECONDS_MAX = 1e9  # thirty years: a larger number is surely a mistake


def documented(
    description: str, expected: str, *, secret: bool = False, schema: dict[str, Any] | None = None
) -> Meta:
    """Return the metadata of a key: its description, and the phrase for the allowed values
    (`expected`) for error texts. An error text does not repeat the value of a key that is `secret`.
    """
    return Meta(
        description=description,
        extra={"expected": expected, "secret": secret},
        extra_json_schema=schema,
    )


Seconds = Annotated[float, Meta(gt=0, le=_SECONDS_MAX)]
SecondsFromZero = Annotated[float, Meta(ge=0, le=_SECONDS_MAX)]
Amount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=1, le=2**62)]
TaskCount = Annotated[int, Meta(ge=1, le=limits.WORKERS_MAX)]
SlotCount = Annotated[int, Meta(ge=1, le=limits.SLOTS_MAX)]
ExtraSlotCount = Annotated[int, Meta(ge=0, le=limits.SLOTS_MAX)]
ActorCount = Annotated[int, Meta(ge=0, le=limits.HOSTED_ACTORS_MAX)]
HostName = Annotated[str, Meta(min_length=1, max_length=255)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Address = Annotated[str, Meta(extra_json_schema={"pattern": ":[0-9]+$"})]
SparseTasks = Annotated[
    dict[Index, Address],
    Meta(min_length=1, extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}}),
]
DenseTasks = Annotated[list[Address], Meta(min_length=1)]


class Section(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """The base class of all sections. A section is immutable, takes only keyword arguments, refuses
    unknown keys, and is written without keys that have their default values.
    """


class DispatcherJob(Section, frozen=True):
    """The dispatcher, which queues the work and knows the workers.

    >>> zd.cluster.DispatcherJob(address="127.0.0.1:5050").address
    '127.0.0.1:5050'

    Without this section the launcher starts a dispatcher with the default settings.
    """

    address: Annotated[
        str,
        documented(
            "host:port to bind; the host may be an interface, and port 0 takes a free one.",
            "host:port",
            schema={"pattern": ":[0-9]+$"},
        ),
    ] = "127.0.0.1:0"
    advertise: Annotated[
        HostName | None,
        documented(
            "The address at which other processes reach the dispatcher, for example behind NAT; "
            "null: the address that it binds.",
            "host or host:port, or null",
        ),
    ] = None
    work_dir: Annotated[
        str | None,
        documented(
            "Folder of the keyring, the datasets and the journal; null: in memory.",
            "the path of a folder, or null",
        ),
    ] = None
    fault_tolerant_mode: Annotated[
        bool,
        documented(
            "Keep a journal in work_dir, so that jobs of the data service go on after a restart.",
            "true or false",
        ),
    ] = False
    job_gc_timeout_ms: Annotated[
        int | None,
        documented(
            "Milliseconds after which a job of the data service without readers is dropped, "
            "unless its sharding is DYNAMIC; -1: never.",
            "a whole number",
        ),
    ] = None
    job_gc_check_interval_ms: Annotated[
        int | None,
        documented(
            "Milliseconds between two looks for jobs and readers of the data service to drop.",
            "a whole number",
        ),
    ] = None
    gc_dynamic_sharding_jobs: Annotated[
        bool,
        documented(
            "Drop jobs of the data service without readers also if their sharding is DYNAMIC.",
            "true or false",
        ),
    ] = False
    deployment_mode: Annotated[
        Literal["COLOCATED", "REMOTE", "HYBRID"] | None,
        documented(
            "COLOCATED: readers of the data service use the workers of their own process.",
            "COLOCATED, REMOTE or HYBRID, or null",
        ),
    ] = None
    worker_timeout_ms: Annotated[
        int | None,
        documented(
            "Milliseconds after which the data service gives up a worker that is away.",
            "a whole number",
        ),
    ] = None
    client_timeout_ms: Annotated[
        int | None,
        documented(
            "Milliseconds after which the data service drops a reader that is silent.",
            "a whole number",
        ),
    ] = None
    worker_addresses: Annotated[
        list[str] | None,
        documented(
            "The fixed list of workers, for sharding policies that need one (FILE, DATA, ...).",
            "a list of host or host:port",
        ),
    ] = None
    lease_s: Annotated[
        Seconds,
        documented(
            "Length of a lease; a worker without contact ends its functions after at most half of "
            "it.",
            "a number of seconds above 0",
        ),
    ] = limits.LEASE_S
    reconnect_grace_s: Annotated[
        Seconds,
        documented(
            "Seconds that a worker has to reconnect after its connection has ended.",
            "a number of seconds above 0",
        ),
    ] = limits.RECONNECT_GRACE_S
    attempts_max: Annotated[
        Amount,
        documented(
            "Attempts of a work item that may end with the crash of their process.",
            "a whole number above 0",
        ),
    ] = limits.ATTEMPTS_MAX
    queue_max: Annotated[
        Amount,
        documented(
            "Work items of one coordinator that may wait for a worker.", "a whole number above 0"
        ),
    ] = limits.QUEUE_MAX
    queue_bytes_max: Annotated[
        Bytes | None,
        documented(
            "Bytes of arguments that one coordinator holds for unfinished work; null: a quarter "
            "of its host's memory.",
            "a whole number of bytes above 0, or null",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the fields of this section that are also fields of DispatcherConfig, by name.

        >>> zd.cluster.DispatcherJob(work_dir="journal").settings()["work_dir"]
        'journal'
        """
        elsewhere = ("address", "queue_max", "queue_bytes_max")
        return {
            name: getattr(self, name) for name in self.__struct_fields__ if name not in elsewhere
        }


class Job(Section, frozen=True):
    """Tasks of one kind: a number of them (`count`), or their addresses (`tasks`).

    >>> zd.cluster.WorkerJob(tasks=["host1:5000", "host2:5000"]).addresses()
    {0: 'host1:5000', 1: 'host2:5000'}

    The repr shows the names of the variables in `env` but not their values, which may be secrets.
    """

    count: Annotated[
        TaskCount | None,
        documented(
            "Number of tasks; the launcher finds their addresses.",
            f"a whole number, 1 to {limits.WORKERS_MAX}",
        ),
    ] = None
    tasks: Annotated[
        DenseTasks | SparseTasks | None,
        documented(
            "The address of each task: a list, or a mapping of index to address if indices have "
            "gaps.",
            "a list of host:port, or a mapping of index to host:port",
        ),
    ] = None
    env: Annotated[
        dict[str, str],
        documented(
            "Environment variables for each task.",
            "a mapping of names to texts in quotes",
            secret=True,
        ),
    ] = {}

    def addresses(self) -> dict[int, str]:
        """Return the addresses of the tasks by index. The dict is empty if only a count is given.

        >>> zd.cluster.WorkerJob(tasks=["host1:5000"]).addresses()
        {0: 'host1:5000'}
        """
        if isinstance(self.tasks, list):
            return dict(enumerate(self.tasks))
        return dict(self.tasks or {})

    def indices(self) -> list[int]:
        """Return the sorted indices of the tasks, whether or not the tasks have addresses.

        >>> zd.cluster.WorkerJob(count=3).indices()
        [0, 1, 2]
        """
        return sorted(self.addresses()) if self.tasks is not None else list(range(self.count or 0))

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        values["env"] = dict.fromkeys(self.env, "...")
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


class SingleJob(Job, frozen=True):
    """A job of one task. Neither count nor tasks need be given.

    >>> zd.cluster.SingleJob().indices()
    [0]
    """

    def indices(self) -> list[int]:
        return super().indices() or [0]


class EvaluatorJob(SingleJob, frozen=True):
    """A program that evaluates checkpoints. It runs beside the other tasks, without a connection to
    them.

    >>> zd.cluster.EvaluatorJob(program="python evaluate.py").indices()
    [0]
    """

    program: Annotated[
        str | list[str] | None,
        documented(
            "The evaluator's program; null: the program of the cluster.",
            "a command line, or a list of words, or null",
        ),
    ] = None


class ServingJob(Job, frozen=True):
    """Tasks that serve as long as the program runs, and are restarted when they crash.

    >>> zd.cluster.ServingJob(count=2).indices()
    [0, 1]
    """

    restarts: Annotated[
        int,
        Meta(ge=0, le=2**31 - 1),
        documented(
            "How often a task that crashed is restarted; 0: never; the count begins again when "
            "the task has run for ten minutes.",
            "a whole number, 0 or more",
        ),
    ] = limits.RESTARTS

    host: Annotated[
        HostName | None,
        documented(
            "The address or the interface (eth1) that each task binds; null: the host in `tasks`, "
            "or else the interface that leads to the "
            "dispatcher.",
            "an address, the name of a host or of an interface, or null",
        ),
    ] = None
    advertise: Annotated[
        HostName | None,
        documented(
            "The address at which other processes reach a task that has none in `tasks`, for "
            "example behind NAT; null: the address that it "
            "binds.",
            "host or host:port, or null",
        ),
    ] = None

    def advertised_at(self, index: int) -> str | None:
        """Return the address at which other processes reach a task. None means the address that the
        task binds.

        >>> zd.cluster.ServingJob(count=1).advertised_at(0) is None
        True

        "%port%" in the result means the port that the task chooses when it starts.
        """
        address = self.addresses().get(index)
        if address is not None:
            return address if self.host is not None else None
        return None if self.advertise is None else advertised_address(self.advertise, "%port%")


class WorkerJob(ServingJob, frozen=True):
    """Processes that run functions.

    >>> zd.cluster.WorkerJob(count=2, slots=4).slots
    4
    """

    min: Annotated[
        TaskCount | None,
        documented(
            "The fewest workers, given together with max: idle workers leave; null: the number "
            "changes only by request.",
            f"a whole number, 1 to {limits.WORKERS_MAX}, or null",
        ),
    ] = None
    max: Annotated[
        TaskCount | None,
        documented(
            "The most workers, given together with min: workers start while work waits.",
            f"a whole number, 1 to {limits.WORKERS_MAX}, or null",
        ),
    ] = None
    idle_s: Annotated[
        Seconds,
        documented(
            "Seconds after which a worker without work, kept values, data tasks and snapshot "
            "streams leaves; only with min and max.",
            "a number of seconds above 0",
        ),
    ] = limits.WORKER_IDLE_S
    slots: Annotated[
        SlotCount | Literal["auto"],
        documented(
            "Functions that run at the same time in each worker; auto: one for each core of the "
            "worker's host.",
            f"a whole number, 1 to {limits.SLOTS_MAX}, or auto",
        ),
    ] = 1
    resources: Annotated[
        dict[str, Annotated[float, Meta(ge=0)] | Literal["auto"]],
        documented(
            "What functions may use of each worker, by name; gpu: auto takes the GPUs in "
            "CUDA_VISIBLE_DEVICES, or else those that nvidia-smi lists.",
            "a mapping of names to numbers, 0 or more; gpu also auto",
        ),
    ] = {}
    memory_max_gb: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        documented(
            "GB (10**9 bytes) of memory that a function may use, without shared arrays; null: no "
            "bound.",
            "a number above 0, or null",
        ),
    ] = None
    threads_per_slot: Annotated[
        Amount | None,
        documented(
            "Threads of BLAS and OpenMP in each slot; null: as OMP_NUM_THREADS or a similar "
            "variable says, or else the cores of the host, "
            "divided among the slots of that host.",
            "a whole number above 0, or null",
        ),
    ] = None
    actors_max: Annotated[
        ActorCount,
        documented(
            "Actors that each worker may have at the same time, which are processes beside its "
            "slots.",
            f"a whole number, 0 to {limits.HOSTED_ACTORS_MAX}",
        ),
    ] = limits.WORKER_ACTORS_MAX
    nested_slots_max: Annotated[
        ExtraSlotCount,
        documented(
            "Extra slots that each worker may start while functions in its slots wait for functions "
            "that they have scheduled.",
            f"a whole number, 0 to {limits.SLOTS_MAX}",
        ),
    ] = limits.NESTED_SLOTS_MAX
    worker_tags: Annotated[
        list[str],
        documented(
            "Tags for the data service; a worker with the tag COLOCATED serves readers in its own "
            "process.",
            "a list of texts",
        ),
    ] = []
    dispatcher_timeout_ms: Annotated[
        int | None,
        documented(
            "Milliseconds that a data task waits for a dispatcher that does not reply.",
            "a whole number",
        ),
    ] = None
    cross_trainer_cache_size_bytes: Annotated[
        Bytes | None,
        documented(
            "Bytes of elements that trainings with a cross_trainer_cache share at each worker.",
            "a whole number of bytes above 0, or null",
        ),
    ] = None
    snapshot_max_chunk_size_bytes: Annotated[
        Bytes | None,
        documented(
            "Bytes, before compression, at which a file of a distributed snapshot ends.",
            "a whole number of bytes above 0, or null",
        ),
    ] = None
    schedule_start_delay_s: Annotated[
        SecondsFromZero | None,
        documented(
            "Worker i delays the first function of each program by i times these seconds; null: as "
            "ZMQDIST_COORDINATOR_SCHEDULE_START_DELAY says.",
            "a number of seconds, 0 or more, or null",
        ),
    ] = None
    schedule_start_delay_max_s: Annotated[
        SecondsFromZero | None,
        documented(
            "The longest such delay; 0: no bound.", "a number of seconds, 0 or more, or null"
        ),
    ] = None
    orphan_limit_s: Annotated[
        Seconds,
        documented(
            "Seconds without a dispatcher after which a worker stops.",
            "a number of seconds above 0",
        ),
    ] = limits.ORPHAN_LIMIT_S
    cancel_grace_s: Annotated[
        SecondsFromZero,
        documented(
            "Seconds that a cancelled function has to end before it is killed.",
            "a number of seconds, 0 or more",
        ),
    ] = limits.CANCEL_GRACE_S

    def settings(self) -> dict[str, Any]:
        """Return the fields of this section that a WorkerConfig has under the same names, and that
        are the same on all hosts.

        >>> zd.cluster.WorkerJob(count=2, worker_tags=["COLOCATED"]).settings()["worker_tags"]
        ['COLOCATED']
        """
        return {name: getattr(self, name) for name in _WORKER_SETTINGS}

    def most(self) -> int:
        """Return the most workers that the launcher starts unless a user scales the cluster: `max`,
        or else the number in the file.

        >>> zd.cluster.WorkerJob(count=2, max=8).most()
        8
        """
        return len(self.indices()) if self.max is None else self.max

    def slots_here(self) -> int:
        """Return the number of slots of a worker on this host. `auto` means the number of cores
        that this process may use.

        >>> zd.cluster.WorkerJob(count=2, slots=4).slots_here()
        4
        """
        if self.slots != "auto":
            return self.slots
        return min(blas_threads.cores(), limits.SLOTS_MAX)


_WORKER_SETTINGS = (
    "actors_max",
    "cross_trainer_cache_size_bytes",
    "dispatcher_timeout_ms",
    "memory_max_gb",
    "nested_slots_max",
    "orphan_limit_s",
    "schedule_start_delay_max_s",
    "schedule_start_delay_s",
    "snapshot_max_chunk_size_bytes",
    "threads_per_slot",
    "worker_tags",
)


class JobsConfig(Section, frozen=True):
    """The jobs of the cluster; at least one. A dispatcher, chief or evaluator whose value is null
    has its default settings.

    >>> zd.cluster.JobsConfig(worker=zd.cluster.WorkerJob(count=2)).worker.count
    2
    """

    dispatcher: Annotated[DispatcherJob | None, documented("The dispatcher.", "a mapping")] = None
    worker: Annotated[
        WorkerJob | None,
        documented(
            "Processes that run functions; without this job launch starts one worker.", "a mapping"
        ),
    ] = None
    ps: Annotated[ServingJob | None, documented("Parameter servers.", "a mapping")] = None
    chief: Annotated[
        SingleJob | None, documented("The task of the program; at most one.", "a mapping")
    ] = None
    evaluator: Annotated[
        EvaluatorJob | None, documented("The side-car that evaluates checkpoints.", "a mapping")
    ] = None

    def task_jobs(self) -> dict[str, Job]:
        """Return the jobs of this file that have tasks, by name. These are all jobs except the
        dispatcher.

        >>> list(zd.cluster.JobsConfig(worker=zd.cluster.WorkerJob(count=2)).task_jobs())
        ['worker']
        """
        jobs = {
            "worker": self.worker,
            "ps": self.ps,
            "chief": self.chief,
            "evaluator": self.evaluator,
        }
        return {name: job for name, job in jobs.items() if job is not None}


class SecurityConfig(Section, frozen=True):
    """Which peers may connect (peers with a token, on loopback only, or peers with CURVE keys), and
    which results are accepted.

    >>> zd.cluster.SecurityConfig(keys="keys").keys
    'keys'
    """

    curve: Annotated[
        bool | Literal["auto"],
        documented(
            "CURVE keys: auto uses them if the dispatcher is not on loopback or the launcher uses "
            "other hosts; with `keys` they are always "
            "used.",
            "auto, true or false",
        ),
    ] = "auto"
    keys: Annotated[
        str | None,
        documented(
            "Folder made by zmqdist keygen; null: launch makes keys of its own if `curve` wants "
            "keys, except for kubernetes.",
            "the path of a folder, or null",
        ),
    ] = None
    results: Annotated[
        Literal["any", "safe"],
        documented(
            "Which types functions may return. any: every type, because results are unpickled; "
            "safe: a closed set of types.",
            "any or safe",
        ),
    ] = "any"


class RuntimeConfig(Section, frozen=True):
    """Values that are known only when the cluster runs. The launcher writes them for its child
    processes.

    >>> zd.cluster.RuntimeConfig("zmq://localhost:5050").dispatcher
    'zmq://localhost:5050'

    Attributes:
      dispatcher: the target of the dispatcher, `zmq://host:port`.
      token_file, keys_dir: paths of the secrets, never the secrets themselves.
    """

    dispatcher: Annotated[str, documented("Target of the running dispatcher.", "zmq://host:port")]
    token_file: Annotated[
        str | None, documented("File with the cluster's token.", "the path of a file, or null")
    ] = None
    keys_dir: Annotated[
        str | None, documented("Folder with the cluster's keys.", "the path of a folder, or null")
    ] = None
