"""Values of other packages as arguments and results: they come as they were, and their memory does
not go through the pickle. Needs the packages: pip install zmqdist[engines]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.wire import trusted

pytestmark = pytest.mark.shares_cluster


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ClusterCoordinator]:
    with zd.local_cluster(workers=1) as cluster, cluster.coordinator() as coordinator:
        yield coordinator


def echo(value: Any) -> Any:
    return value


def add_to(tensor: Any) -> Any:
    tensor += 1
    return tensor


def tensors(torch: Any) -> dict[str, Any]:
    rows = torch.arange(48.0).reshape(2, 3, 4, 2)
    return {
        "float": rows,
        "no dimension": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "half": rows.to(torch.bfloat16),
        "complex": torch.tensor([1 + 2j]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "bool": torch.tensor([True, False]),
        "every second": rows[:, ::2],
        "channels last": rows.to(memory_format=torch.channels_last),
        "grad": torch.ones(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "sparse": torch.eye(3).to_sparse(),
        "expanded": torch.ones(1).expand(5),
    }


def test_tensors_come_as_they_were(coordinator: ClusterCoordinator) -> None:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    for name, tensor in tensors(torch).items():
        received = coordinator.submit(echo, tensor).result(60)
        assert type(received) is type(tensor), name
        assert received.dtype == tensor.dtype, name
        assert received.requires_grad == tensor.requires_grad, name
        assert torch.equal(received.to_dense(), tensor.to_dense()), name
        if name == "channels last":
            assert received.is_contiguous(memory_format=torch.channels_last)


def test_tensor_is_private_to_its_function(coordinator: ClusterCoordinator) -> None:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    tensor = torch.zeros(1 << 17)
    sums = coordinator.gather([coordinator.submit(add_to, tensor) for _ in range(3)])
    assert [float(result.sum()) for result in sums] == [float(1 << 17)] * 3
    assert not tensor.any()


def polars_frame() -> Any:
    polars = pytest.importorskip("polars", reason="needs pip install zmqdist[engines]")
    pytest.importorskip("pyarrow")
    return polars.DataFrame({"number": np.arange(1 << 17), "text": ["a"] * (1 << 17)})


def polars_series() -> Any:
    return polars_frame()["number"]


def image() -> Any:
    pil = pytest.importorskip("PIL.Image", reason="needs pip install zmqdist[engines]")
    return pil.fromarray(np.arange(3 << 17, dtype=np.uint8).reshape(512, 256, 3))


def state_dict() -> Any:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    return {f"layer{n}": torch.full((200, 200), float(n)) for n in range(200)}


def jax_array() -> Any:
    jax = pytest.importorskip("jax", reason="needs pip install jax")
    return jax.numpy.arange(1 << 17)


@pytest.mark.parametrize("make", [polars_frame, polars_series, image, state_dict, jax_array])
def test_memory_is_beside_pickle(coordinator: ClusterCoordinator, make: Callable[[], Any]) -> None:
    value = make()
    packed = trusted.pack(value)
    assert isinstance(packed, list)
    assert len(packed[0]) < 50_000
    received = coordinator.submit(echo, value).result(60)
    assert type(received) is type(value)
    if isinstance(value, dict):
        assert all(bool((received[name] == value[name]).all()) for name in value)
    elif hasattr(value, "equals"):
        assert received.equals(value)
    else:
        np.testing.assert_array_equal(np.asarray(received), np.asarray(value))


def test_tensor_of_missing_device_says_so() -> None:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    if torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    from zmqdist.errors import FailedPreconditionError
    from zmqdist.wire import foreign

    with pytest.raises(FailedPreconditionError, match=r"cuda:1 .* send tensor.cpu"):
        foreign._tensor("float32", (1,), False, False, "cuda:1", bytearray(4))  # reach: no GPU here
