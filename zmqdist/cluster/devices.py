"""Names of devices as TensorFlow writes them: `/job:worker/replica:0/task:1/device:CPU:0`, complete
or partial.

A task has only one device, its CPU, so the name of a device also names a task. Convert names to
their canonical form before you compare them.
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
    """The name of a device, or a pattern for devices. A part that is None matches any value."""

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    type: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, name: str) -> Device:
        """Return the Device of a name like `/job:ps/task:1`, `/device:CPU:0` or `/cpu:0`. The type
        of the device is converted to capitals.

        Raises:
          ValueError: the text is not the name of a device, or a part occurs twice in it.
        """
        values: dict[str, str | int] = {}
        position = 0
        while position < len(name):
            part = _PART.match(name, position)
            fields = (
                {}
                if part is None
                else {key: text for key, text in part.groupdict().items() if text is not None}
            )
            if part is None or not values.keys().isdisjoint(fields):
                break
            values.update(
                {key: int(text) if text.isdecimal() else text for key, text in fields.items()}
            )
            position = part.end()
        if position < len(name) or not values:
            raise ValueError(
                f"{name!r} is not the name of a device: wanted "
                f"/job:NAME/replica:0/task:N/device:CPU:0, or parts of it"
            )
        device = cls(**values)  # type: ignore[arg-type]
        return device if device.type is None else replace(device, type=device.type.upper())

    def canonical(self) -> Device:
        """Return this device with replica 0 and CPU 0 in place of missing parts."""
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


def device_of(job: str, index: int) -> str:
    """Return the canonical name of a task's device."""
    return str(Device(job, 0, index, "CPU", 0))
