"""Names of devices: contract N1."""

from __future__ import annotations

import pytest

from zmqdist.cluster.devices import Device, device_of

WHOLE = "/job:worker/replica:0/task:1/device:CPU:0"


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        (WHOLE, WHOLE),
        ("/job:worker/task:1", WHOLE),
        ("/task:1/job:worker", WHOLE),
        ("/job:worker/task:1/cpu:0", WHOLE),
        ("/job:worker/replica:0/task:1/CPU:0", WHOLE),
        ("/job:ps/task:10/device:GPU:3", "/job:ps/replica:0/task:10/device:GPU:3"),
        ("/device:CPU:0", "/replica:0/device:CPU:0"),
        ("/cpu:0", "/replica:0/device:CPU:0"),
        ("/gpu:1", "/replica:0/device:GPU:1"),
        ("/job:ps", "/job:ps/replica:0/device:CPU:0"),
        ("/job:a/replica:2/task:0", "/job:a/replica:2/task:0/device:CPU:0"),
    ],
)
def test_two_names_are_equal_if_their_canonical_forms_are(name: str, canonical: str) -> None:
    assert str(Device.parse(name).canonical()) == canonical
    assert str(Device.parse(canonical).canonical()) == canonical


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "worker",
        "worker:1",
        "job:worker",
        "/job:worker/",
        "//job:a",
        "/job:a/job:b",
        "/task:x",
        "/job:",
        "/cpu:0/gpu:0",
        "/cpu",
        "/job:a task:1",
    ],
)
def test_bad_device_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a device"):
        Device.parse(name)


def test_partial_device_name_stays_partial() -> None:
    assert str(Device.parse("/job:ps/task:1")) == "/job:ps/task:1"
    assert Device.parse("/job:ps/cpu:0") == Device("ps", None, None, "CPU", 0)
    assert device_of("worker", 1) == WHOLE
