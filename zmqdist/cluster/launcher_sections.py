"""The sections of a cluster file about the hosts on which its jobs run: one section for each
launcher."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from zmqdist.cluster.file_sections import Section, SlotCount, documented

LauncherName = Literal["local", "ssh", "slurm", "kubernetes", "ray"]

NodeCount = Annotated[int, Meta(ge=1)]
HostName = Annotated[str, Meta(min_length=1, max_length=255)]


class SshHost(Section, frozen=True):
    """One host that ssh reaches."""

    host: Annotated[
        HostName,
        documented(
            "The host as ssh accepts it: a name in its config, or user@host.", "a name of a host"
        ),
    ]
    slots: Annotated[
        SlotCount | None,
        documented(
            "How many workers and ps may run there; null: no bound.",
            "a whole number above 0, or null",
        ),
    ] = None


class SshConfig(Section, frozen=True):
    """Hosts that the system's ssh reaches, with its own config, agent, jump hosts and
    known_hosts.
    """

    hosts: Annotated[
        list[str | SshHost],
        documented(
            "The hosts; each worker or ps is placed on the first host that has the fewest.",
            "a list of hosts, or of {host, slots}",
        ),
    ] = []
    python: Annotated[
        str | None,
        documented(
            "The Python of the hosts; null: the path of this one.", "the path of a Python, or null"
        ),
    ] = None
    options: Annotated[
        list[str], documented("Further words for ssh, for example -p 2222.", "a list of words")
    ] = []


class SlurmConfig(Section, frozen=True):
    """Settings of the one Slurm job in which the whole cluster runs."""

    nodes: Annotated[
        NodeCount | None, documented("Nodes of the job.", "a whole number above 0, or null")
    ] = None
    partition: Annotated[str | None, documented("The job's partition.", "a name, or null")] = None
    account: Annotated[
        str | None, documented("The account that is charged.", "a name, or null")
    ] = None
    time: Annotated[
        str | None, documented("The job's time limit, as for sbatch.", "a time such as 01:30:00")
    ] = None
    gres: Annotated[
        str | None, documented("Generic resources of each node, such as gpu:2.", "a text, or null")
    ] = None
    extra: Annotated[list[str], documented("Further options of sbatch.", "a list of words")] = []


Cores = Annotated[float, Meta(ge=0.001, le=4096)]
MemorySize = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,8}(Ki|Mi|Gi|Ti)$(?!\n)")]
ImageName = Annotated[str, Meta(pattern=r"^\S+$(?!\n)", max_length=1024)]
GpuCount = Annotated[int, Meta(ge=0, le=1024)]


class PodResources(Section, frozen=True):
    """Resources that one pod of a job gets."""

    cpu: Annotated[
        Cores | None,
        documented("Cores of the pod, such as 0.5; null: not set.", "a number of cores, or null"),
    ] = None
    memory: Annotated[
        MemorySize | None,
        documented(
            "Memory of the pod, which is killed if it uses more; null: not set.",
            "a size such as 512Mi or 4Gi, or null",
        ),
    ] = None
    gpus: Annotated[
        GpuCount, documented("GPUs of the pod (nvidia.com/gpu).", "a whole number, 0 or more")
    ] = 0


class ResourcesConfig(Section, frozen=True):
    """Resources that the pods of each job get."""

    dispatcher: Annotated[PodResources, documented("The dispatcher's pod.", "a mapping")] = (
        PodResources()
    )
    worker: Annotated[PodResources, documented("Each worker's pod.", "a mapping")] = PodResources()
    ps: Annotated[PodResources, documented("The pod of each parameter server.", "a mapping")] = (
        PodResources()
    )
    program: Annotated[PodResources, documented("The program's pod.", "a mapping")] = PodResources()
    evaluator: Annotated[PodResources, documented("The evaluator's pod.", "a mapping")] = (
        PodResources()
    )


class KubernetesConfig(Section, frozen=True):
    """Settings of the manifests that `zmqdist launch --render` writes, in addition to the jobs."""

    image: Annotated[
        ImageName | None,
        documented(
            "The image of all pods, with zmqdist and the program in it; required.",
            "the name of an image",
        ),
    ] = None
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"] | None,
        documented(
            "When a node pulls the image; null: as Kubernetes does.",
            "Always, IfNotPresent, Never or null",
        ),
    ] = None
    namespace: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$(?!\n)", max_length=63)],
        documented(
            "The namespace of all objects.", "a name of at most 63 small letters, digits or '-'"
        ),
    ] = "default"
    resources: Annotated[
        ResourcesConfig, documented("Resources of the pods of each job.", "a mapping")
    ] = ResourcesConfig()
    service_account: Annotated[
        str | None,
        documented(
            "The service account of all pods; null: the default one, without a token in the pods.",
            "a name, or null",
        ),
    ] = None
    user_id: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)],
        documented(
            "The user (and group) that all pods run as; never root.", "a whole number above 0"
        ),
    ] = 10001
    storage: Annotated[
        MemorySize,
        documented(
            "The size of the volume for the dispatcher's work_dir.", "a size such as 512Mi or 4Gi"
        ),
    ] = "1Gi"


RayAmount = Annotated[float, Meta(ge=0, le=1_000_000)]


class RayRole(Section, frozen=True):
    """Resources that the actor of a role requests from Ray."""

    cpus: Annotated[
        RayAmount | None,
        documented(
            "CPUs; null: the slots of a worker, 1 for a ps.", "a number, 0 or more, or null"
        ),
    ] = None
    gpus: Annotated[RayAmount, documented("GPUs.", "a number, 0 or more")] = 0
    resources: Annotated[
        dict[str, RayAmount],
        documented("Resources of your own.", "a mapping of names to numbers, 0 or more"),
    ] = {}


class RayConfig(Section, frozen=True):
    """A Ray cluster that already runs and places the workers and ps."""

    address: Annotated[
        str, documented("Where Ray is, as ray.init takes it.", "host:port, or auto")
    ] = "auto"
    worker: Annotated[RayRole, documented("Resources that each worker requests.", "a mapping")] = (
        RayRole()
    )
    ps: Annotated[
        RayRole, documented("Resources that each parameter server requests.", "a mapping")
    ] = RayRole()
