"""Names of devices as TensorFlow writes them: `/job:worker/replica:0/task:1/device:CPU:0`, whole or in part.

A task has one device here, its CPU: a device is another way to name a task. Names are compared in their canonical form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_PART = re.compile(
    r"/(?:job:(?P<job>[A-Za-z][\w.-]*)|replica:(?P<replica>\d+)|task:(?P<task>\d+)"
    r"|(?:device:)?(?P<type>[A-Za-z][A-Za-z_]*):(?P<index>\d+))(?=/|$)"
)


@dataclass(frozen=True)
class Device:
    """A device, or all of which so much is known; None is what is not."""

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    type: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, name: str) -> Device:
        """`/job:ps/task:1`, `/device:CPU:0`, `/cpu:0` and the like; the type in capitals.

        Raises:
          ValueError: not the name of a device, or a part is there twice.
        """
        found: dict[str, str | int] = {}
        position = 0
        while position < len(name):
            part = _PART.match(name, position)
            fields = {} if part is None else {key: text for key, text in part.groupdict().items() if text is not None}
            if part is None or not found.keys().isdisjoint(fields):
                break
            found.update({key: int(text) if text.isdecimal() else text for key, text in fields.items()})
            position = part.end()
        if position < len(name) or not found:
            raise ValueError(
                f"{name!r} is not the name of a device: wanted /job:NAME/replica:0/task:N/device:CPU:0, or parts of it"
            )
        made = cls(**found)  # type: ignore[arg-type]
        return made if made.type is None else replace(made, type=made.type.upper())

    def canonical(self) -> Device:
        """With replica 0 and CPU 0 where nothing else is said."""
        return replace(
            self,
            replica=self.replica or 0,
            type=self.type or "CPU",
            index=self.index or 0,
        )

    def __str__(self) -> str:
        named = [("job", self.job), ("replica", self.replica), ("task", self.task)]
        text = "".join(f"/{key}:{value}" for key, value in named if value is not None)
        return text if self.type is None else f"{text}/device:{self.type}:{self.index or 0}"


def canonical_device(name: str) -> str:
    """A name in its canonical form; two names are of the same device if these are equal. Raises ValueError as `Device.parse`."""
    return str(Device.parse(name).canonical())


def device_of(job: str, index: int) -> str:
    """The canonical name of a task's device."""
    return str(Device(job, 0, index, "CPU", 0))
