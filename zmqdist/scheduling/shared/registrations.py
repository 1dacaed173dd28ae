"""The checks of what a worker or a coordinator tells the dispatcher about itself. No I/O.

Everything here is shown to people, counted, or used as a process id, so a value that no correct
process sends is refused with the reason.
"""

from __future__ import annotations

import re
from typing import Final

from zmqdist.addresses import split_address
from zmqdist.limits import (
    ACTOR_GROUP_MAX,
    ACTOR_RESTARTS_MAX,
    HOSTED_ACTORS_MAX,
    NAME_CHARS_MAX,
    NUMBER_MAX,
    QUEUE_UNBOUNDED,
    SLOTS_MAX,
    WORKER_INDEX_MAX,
    WORKER_TAGS_MAX,
)
from zmqdist.messages import ActorSpec, Register, RegisterCoordinator
from zmqdist.scheduling.shared.quantities import GPU, UNIT, Quantities, quantities_problem

_JOB: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_PID_MAX: Final = 2**22
"""The largest process id that Linux gives."""


def job_problem(job: str) -> str:
    """Return why a job cannot have this name, or "" if it can."""
    if isinstance(job, str) and _JOB.fullmatch(job) and len(job) <= NAME_CHARS_MAX:
        return ""
    return f"job is {ascii(job)[:NAME_CHARS_MAX]}, wants at most {NAME_CHARS_MAX} of A-Z a-z 0-9 _ . -, a letter or _ first"


def text_problem(name: str, text: str) -> str:
    """Return why a name, host, address or tag cannot be this text, or "" if it can."""
    if isinstance(text, str) and len(text) <= NAME_CHARS_MAX and text.isprintable():
        return ""
    return f"{name} is {ascii(text)[:NAME_CHARS_MAX]}, wants at most {NAME_CHARS_MAX} printable characters"


def worker_problem(register: Register) -> str:
    """Return why no worker can register with these fields, or "" if one can."""
    bounds = (
        ("slots", register.slots, 1, SLOTS_MAX),
        ("index", register.index, -1, WORKER_INDEX_MAX),
        ("pid", register.pid, 1, _PID_MAX),
        ("incarnation", register.incarnation, 0, NUMBER_MAX),
        ("serial", register.serial, 0, NUMBER_MAX),
        ("threads_per_slot", register.threads_per_slot, 0, SLOTS_MAX),
        ("the number of tags", len(register.tags), 0, WORKER_TAGS_MAX),
        ("actors_max", register.actors_max, 0, HOSTED_ACTORS_MAX),
        ("the number of actors", len(register.actors), 0, HOSTED_ACTORS_MAX),
    )
    if problem := _out_of_bounds(bounds) or job_problem(register.job):
        return problem
    if problem := "".join(actor_problem(hosted.spec) for hosted in register.actors):
        return problem
    for name, text in (
        ("host", register.host),
        ("address", register.address),
        *(("a tag", t) for t in register.tags),
    ):
        if problem := text_problem(name, text):
            return problem
    if problem := quantities_problem(register.resources):
        return problem
    gpus = dict(register.resources).get(GPU, 0)
    if gpus % UNIT:
        return f"resources: gpu is {gpus / UNIT:g}, wants whole devices"
    used = [("a lease", amounts, devices) for _, amounts, devices in register.grants]
    used += [("an actor", request_of(h.spec), h.devices) for h in register.actors]
    for user, amounts, devices in used:
        if problem := quantities_problem(amounts):
            return problem
        if not all(0 <= device < gpus // UNIT for device in devices):
            return f"{user} has the devices {devices}, wants some of {gpus // UNIT}"
    try:
        if register.address and not split_address(register.address)[0]:
            return f"{register.address!r} is not an address: no host before the colon"
    except ValueError as error:
        return f"{register.address!r} is not an address: {error}"
    return ""


def request_of(spec: ActorSpec) -> Quantities:
    """Return what a process of this actor uses of its worker."""
    return tuple(sorted(spec.resources.items()))


def actor_problem(spec: ActorSpec) -> str:
    """Return why no actor can have this spec, or "" if one can."""
    return (
        _out_of_bounds(
            (
                ("actor", spec.actor, 1, NUMBER_MAX),
                ("owner", spec.owner, 0, NUMBER_MAX),
                ("restarts", spec.restarts, 0, ACTOR_RESTARTS_MAX),
                ("group", spec.group, 0, NUMBER_MAX),
                ("size", spec.size, 1, ACTOR_GROUP_MAX if spec.group else 1),
                ("rank", spec.rank, 0, spec.size - 1),
            )
        )
        or text_problem("the class of an actor", spec.cls)
        or text_problem("the name of an actor", spec.name)
        or text_problem("the worker of an actor", spec.worker)
        or quantities_problem(request_of(spec))
    )


def coordinator_problem(register: RegisterCoordinator) -> str:
    """Return why no coordinator can register with these fields, or "" if one can."""
    return _out_of_bounds(
        (
            ("coordinator", register.coordinator, 0, NUMBER_MAX),
            ("queue_max", register.queue_max, 1, QUEUE_UNBOUNDED),
            ("round", register.round, 0, QUEUE_UNBOUNDED),
        )
    )


def _out_of_bounds(bounds: tuple[tuple[str, int, int, int], ...]) -> str:
    return next(
        (
            f"{name} is {n}, wants {low} to {high}"
            for name, n, low, high in bounds
            if not low <= n <= high
        ),
        "",
    )
