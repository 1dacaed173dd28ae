"""Each field of a config is refused when the config is made, if its value has another type than the
field."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqdist.coordination.machine import CoordinationConfig
from zmqdist.errors import InvalidArgumentError
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig

NEEDED = {WorkerConfig: {"dispatcher_address": "localhost:1"}}
KINDS = (DispatcherConfig, WorkerConfig, CoordinationConfig)
WRONG: dict[str, list[Any]] = {
    "int": ["5050", True, 1.5, b"1", [1]],
    "float": ["1", True, [1.0]],
    "bool": ["yes", 1, []],
    "str": [5, b"x", ["x"]],
    "Sequence[str]": ["localhost:1", [1], 5],
    "Mapping[str, float | str]": [5, ["gpu"], {"gpu": [1]}],
    "frozenset[str]": [5, [1]],
}
CASES = [
    (kind, field.name, value, field.type)
    for kind in KINDS
    for field in dataclasses.fields(kind)
    for value in [
        *WRONG[str(field.type).removesuffix(" | None")],
        *([] if "None" in str(field.type) else [None]),
    ]
    if (field.name, value) != ("dispatcher_address", None)
]


@pytest.mark.parametrize(("kind", "name", "value", "wanted"), CASES)
def test_field_of_other_type_is_refused(kind: type, name: str, value: Any, wanted: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        kind(**{**NEEDED.get(kind, {}), name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}, wants ")


def test_numpy_numbers_and_paths_are_accepted() -> None:
    config = DispatcherConfig(port=np.int64(5050), lease_s=np.float32(3.0), work_dir=Path("/tmp"))  # type: ignore[arg-type]
    assert (config.port, config.lease_s) == (5050, 3.0)
    assert DispatcherConfig(lease_s=3).lease_s == 3
