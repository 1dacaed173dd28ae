"""Values of other packages as arguments and results: they come as they were, and their memory does
not go through the pickle. Needs the packages: pip install zmqdist[engines]."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.rpc import payload
from zmqdist.wire import trusted

try:
    import torch

    class OfUser(torch.Tensor):
        pass

except ImportError:
    pass

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


def jax_bfloat16() -> Any:
    jax = pytest.importorskip("jax", reason="needs pip install jax")
    return jax.numpy.arange(1 << 17, dtype="bfloat16")


def torch_bfloat16() -> Any:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    return torch.arange(1 << 17).to(torch.bfloat16)


def torch_strided() -> Any:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    return torch.arange(1 << 18, dtype=torch.float64).reshape(512, 512).T[::2]


def ml_dtypes_array() -> Any:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return np.arange(1 << 17).astype(ml_dtypes.bfloat16)


def pandas_frame() -> Any:
    pandas = pytest.importorskip("pandas", reason="needs pip install pandas")
    return pandas.DataFrame({"number": np.arange(1 << 17), "text": ["a"] * (1 << 17)})


def arrow_array() -> Any:
    return pytest.importorskip("pyarrow").array(np.arange(1 << 17))


def arrow_table() -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.table({"number": np.arange(1 << 17), "text": ["a"] * (1 << 17)})


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


def as_argument(coordinator: ClusterCoordinator, value: Any) -> Any:
    return coordinator.submit(echo, value).result(60)


def as_state(coordinator: ClusterCoordinator, value: Any) -> Any:
    actor = coordinator.actor(Holder, value)
    received = actor.get().result(60)
    coordinator.kill(actor)
    return received


def as_rpc_value(_: ClusterCoordinator, value: Any) -> Any:
    with zd.rpc.serve(methods=[echo]) as server, zd.rpc.connect(server.address) as client:
        return client.echo_blocking(value)


def as_variable(_: ClusterCoordinator, value: Any) -> Any:
    return zd.Variable(value).numpy()


def as_element(_: ClusterCoordinator, value: Any) -> Any:
    return next(iter(zd.data.Dataset.from_tensors(value)))


ARRAYS = [torch_bfloat16, torch_strided, jax_array, jax_bfloat16, ml_dtypes_array]
FRAMES = [polars_frame, polars_series, pandas_frame, arrow_array, arrow_table, image]


def same(received: Any, value: Any) -> bool:
    if hasattr(value, "equals"):
        return bool(received.equals(value))
    if hasattr(value, "to_dense"):
        return bool((received == value).all())
    return bool((np.asarray(received) == np.asarray(value)).all())


@pytest.mark.parametrize("road", [as_argument, as_state])
@pytest.mark.parametrize("make", [*ARRAYS, *FRAMES, state_dict])
def test_value_arrives_with_its_type(
    coordinator: ClusterCoordinator, make: Callable[[], Any], road: Callable[..., Any]
) -> None:
    value = make()
    received = road(coordinator, value)
    assert type(received) is type(value)
    if isinstance(value, dict):
        assert all(same(received[name], value[name]) for name in value)
    else:
        assert same(received, value)


@pytest.mark.parametrize("make", ARRAYS)
def test_tensor_travels_by_rpc_with_its_type(
    coordinator: ClusterCoordinator, make: Callable[[], Any]
) -> None:
    value = make()
    received = as_rpc_value(coordinator, value)
    assert type(received) is type(value)
    assert received.dtype == value.dtype
    assert same(received, value)


@pytest.mark.parametrize(
    ("make", "road"),
    [
        (make, road)
        for make in (torch_bfloat16, torch_strided, jax_bfloat16, arrow_array, image)
        for road in (as_rpc_value, as_variable, as_element)
        if road is not as_rpc_value or make in (arrow_array, image)  # others keep their type
    ],
)
def test_array_takes_place_of_other_values(
    coordinator: ClusterCoordinator, make: Callable[[], Any], road: Callable[..., Any]
) -> None:
    value = make()
    received = road(coordinator, value)
    assert type(received) is np.ndarray
    if hasattr(value, "to_dense"):
        value = value.double().numpy()
        received = received.astype(np.float64)
    np.testing.assert_array_equal(received, np.asarray(value))


def test_all_dtypes_of_torch_arrive() -> None:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    count = 0
    for dtype in dtypes:
        if str(dtype).startswith(("torch.q", "torch.bits")):
            continue
        tensor = torch.arange(64, dtype=torch.uint8).view(dtype)
        packed = trusted.pack(tensor)
        assert isinstance(packed, bytes)
        received = trusted.unpack(packed)
        assert received.dtype == dtype
        assert torch.equal(received.view(torch.uint8), tensor.view(torch.uint8)), dtype
        count += 1
    assert count > 20


def test_memory_of_subclass_is_beside_pickle() -> None:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    tensor = torch.ones(1 << 17).as_subclass(OfUser)
    tensor.note = "kept"
    packed = trusted.pack(tensor)
    assert isinstance(packed, list)
    assert len(packed) == 2
    received = trusted.unpack_parts(packed)
    assert type(received) is OfUser
    assert received.note == "kept"
    assert torch.equal(received, tensor)


def test_names_and_types_of_polars_are_kept() -> None:
    polars = pytest.importorskip("polars", reason="needs pip install zmqdist[engines]")
    series = polars.Series("grade", ["a", "b"], dtype=polars.Enum(["a", "b"]))
    received = trusted.unpack(trusted.pack(series))
    assert (received.name, received.dtype) == (series.name, series.dtype)


def test_refused_tensor_says_what_to_call() -> None:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    with pytest.raises(zd.errors.InvalidArgumentError, match=r"\['x'\] is .*to_dense\(\)"):
        payload.pack({"x": torch.eye(3).to_sparse()})


def test_batches_join_tensors_as_arrays() -> None:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
    server.register("double", lambda rows: torch.from_numpy(rows) * 2, batch=True)
    server.start()
    with server, zd.rpc.connect(server.address) as client:
        assert client.double_blocking(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


def test_receiver_without_package_gets_array() -> None:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    body, _ = payload.pack((torch.ones(2), torch.ones(2, dtype=torch.bfloat16)))
    program = (
        "import sys; from zmqdist.rpc import payload;"
        f"a, b = payload.unpack({body!r}, [], 'peer');"
        "print(type(a).__name__, a.dtype, b.dtype, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "ndarray float32 bfloat16 False\n", ran.stderr


def test_tensor_of_missing_device_says_so() -> None:
    torch = pytest.importorskip("torch", reason="needs pip install zmqdist[engines]")
    if torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    from zmqdist.errors import FailedPreconditionError
    from zmqdist.wire import foreign

    with pytest.raises(FailedPreconditionError, match=r"cuda:1 .* send tensor.cpu"):
        foreign._tensor("float32", (1,), False, False, "cuda:1", bytearray(4))  # reach: no GPU here
