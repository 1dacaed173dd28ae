"""Quantities of resources by name: what a worker has, and what a function needs. No I/O.

A quantity is an integer in thousandths, so that sums are exact. GPU is the one resource whose units
are devices with numbers: a request takes whole devices, or a part of one device.

Per-worker resources (resources.py beside this file) are something else: objects in slots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from zmqdist.limits import QUANTITIES_MAX, QUANTITY_MAX

Quantities: TypeAlias = "tuple[tuple[str, int], ...]"
"""(name, thousandths) of each resource, sorted by name, each above 0."""

GPU: Final = "gpu"
AUTO: Final = "auto"
"""In place of the number of GPUs of a worker: those that this host has."""
UNIT: Final = 1000
"""One unit of a resource, in thousandths."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class Grant(NamedTuple):
    """What one lease has of its worker: quantities, and the numbers of the worker's devices."""

    quantities: Quantities
    devices: tuple[int, ...] = ()


def quantities(amounts: Mapping[str, float]) -> Quantities:
    """Return amounts such as {"gpu": 1, "memory_gb": 0.5} as checked quantities, without those that
    are 0.

    Raises TypeError if `amounts` is no mapping or an amount is no number, and ValueError for a name
    or an amount that no resource can have.
    """
    if not isinstance(amounts, Mapping):
        raise TypeError(f'resources is {amounts!r:.100}, wants a mapping, as {{"gpu": 1}}')
    rounded: dict[str, int] = {}
    for name, amount in amounts.items():
        if not isinstance(name, str):
            raise TypeError(f"resources has the name {name!r:.100}, wants a text")
        try:
            if isinstance(amount, (bool, str)):
                raise TypeError
            thousandths = float(amount) * UNIT
        except (TypeError, ValueError):
            raise TypeError(f"resources: {name} is {amount!r:.100}, wants a number") from None
        if thousandths:
            rounded[name] = round(thousandths) if math.isfinite(thousandths) else -1
    checked = tuple(sorted(rounded.items()))
    if problem := quantities_problem(checked):
        raise ValueError(problem)
    return checked


def check_worker_amounts(amounts: Mapping[str, float | str] | None, *, processes: bool) -> None:
    """Check what a worker is configured to have. Raises the errors of `quantities`."""
    numbers = dict(amounts or {})
    gpus = numbers.get(GPU, 0)
    if gpus == AUTO:
        numbers.pop(GPU)
    elif isinstance(gpus, float) and gpus % 1:
        raise ValueError(f'resources: gpu is {gpus:g}, wants whole devices, or "auto"')
    if gpus and not processes:
        raise ValueError(
            "resources: gpu needs slots that are processes, because CUDA_VISIBLE_DEVICES holds for "
            "a process: processes=True"
        )
    quantities(numbers)  # type: ignore[arg-type]


def quantities_problem(checked: Any) -> str:
    """Return why these are no quantities, or "" if they are."""
    if len(checked) > QUANTITIES_MAX:
        return f"resources has {len(checked)} names, wants at most {QUANTITIES_MAX}"
    names = [name for name, _ in checked]
    if names != sorted(set(names)):
        return "resources has names that are not sorted, or a name twice"
    for name, thousandths in checked:
        if not _NAME.fullmatch(name):
            return f"resources has the name {ascii(name)[:100]}, wants at most 64 of A-Z a-z 0-9 _ . -, a letter or _ first"
        if not 0 < thousandths <= QUANTITY_MAX:
            return f"resources: {name} is {thousandths / UNIT:g}, wants 0.001 to {QUANTITY_MAX // UNIT}"
        if name == GPU and thousandths > UNIT and thousandths % UNIT:
            return (
                f"resources: gpu is {thousandths / UNIT:g}, wants whole devices, or a part of one"
            )
    return ""


def amounts_text(amounts: Quantities) -> str:
    """Return quantities as text, such as "gpu 2, memory_gb 0.5"."""
    return ", ".join(f"{name} {thousandths / UNIT:g}" for name, thousandths in amounts)
