"""The sections of a cluster file that say where its jobs run: one for each launcher."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from zmqdist.cluster.sections import Section, SlotCount, documented

LauncherName = Literal["local", "ssh", "slurm", "kubernetes", "ray"]

NodeCount = Annotated[int, Meta(ge=1)]
HostName = Annotated[str, Meta(min_length=1, max_length=255)]


class SshHost(Section, frozen=True):
    """One host that ssh reaches."""

    host: Annotated[HostName, documented("As ssh takes it: a name of its config, or user@host.", "a name of a host")]
    slots: Annotated[
        SlotCount | None,
        documented("How many workers and ps may run there; null: no bound.", "a whole number above 0, or null"),
    ] = None


class SshConfig(Section, frozen=True):
    """Hosts that the system's ssh reaches, with its own config, agent, jump hosts and known_hosts."""

    hosts: Annotated[
        list[str | SshHost],
        documented("The hosts, in the order in which they are filled.", "a list of hosts, or of {host, slots}"),
    ] = []
    python: Annotated[
        str | None,
        documented("The Python of the hosts; null: the path of this one.", "the path of a Python, or null"),
    ] = None
    options: Annotated[list[str], documented("Further words for ssh, for example -p 2222.", "a list of words")] = []


class SlurmConfig(Section, frozen=True):
    """One job of Slurm that holds the whole cluster."""

    nodes: Annotated[NodeCount | None, documented("Nodes of the job.", "a whole number above 0, or null")] = None
    partition: Annotated[str | None, documented("Its partition.", "a name, or null")] = None
    account: Annotated[str | None, documented("The account that is charged.", "a name, or null")] = None
    time: Annotated[str | None, documented("Its time limit, as sbatch takes it.", "a time such as 01:30:00")] = None
    gres: Annotated[str | None, documented("Generic resources of each node, such as gpu:2.", "a text, or null")] = None
    extra: Annotated[list[str], documented("Further options of sbatch.", "a list of words")] = []


class KubernetesConfig(Section, frozen=True):
    """What the manifests of `zmqdist launch --render` say beyond the jobs."""

    image: Annotated[str | None, documented("The image of all pods.", "the name of an image, or null")] = None
    namespace: Annotated[str, documented("The namespace of all objects.", "a name")] = "default"


class RayConfig(Section, frozen=True):
    """A Ray cluster that runs already and places the workers and ps."""

    address: Annotated[str, documented("Where Ray is, as ray.init takes it.", "an address, or auto")] = "auto"
