"""Programs whose comments say what mypy --strict and pyright in strict mode reveal or refuse.

A line `reveal_type(...)  # T` must reveal T, `# T || U` reveals T to mypy and U to pyright. A line
`...  # error` must be an error for both. No other line may be one.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.test_pages import ROOT, blocks

STRICT_PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("actors", "coordinator", "datasets", "executor", "rpc", "task_options")
    ),
    "docs/tasks.md",
    "docs/types.md",
)

TASKS = """
from __future__ import annotations
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar
import numpy as np
import zmqdist as zd
from zmqdist.coordinator import PerSlot, PerWorkerValues, RemoteValue

T = TypeVar("T")

def square(x: int) -> int:
    return x * x

def show(x: int, text: str = "") -> list[str]:
    return [text] * x

def mix(a: int, b: str, c: float, d: bytes) -> bool:
    return bool(b) and a > c

def total(numbers: list[int]) -> int:
    return sum(numbers)

def gathered(x: int, numbers: list[int]) -> str:
    return str(x + sum(numbers))

def same(x: T) -> T:
    return x

def divide(a: float, b: float) -> tuple[float, float]:
    return divmod(a, b)

async def load(x: int, y: float = 1.0) -> str:
    return str(x * y)

def numbers(count: int) -> Iterator[float]:
    yield from map(float, range(count))

async def words(count: int) -> AsyncIterator[str]:
    for number in range(count):
        yield str(number)

class Model:
    def __init__(self, size: int) -> None:
        self.size = size
    def predict(self, x: int) -> float:
        return x / self.size

def use(
    coordinator: zd.ClusterCoordinator,
    i: RemoteValue[int],
    s: RemoteValue[str],
    f: RemoteValue[float],
    b: RemoteValue[bytes],
    items: RemoteValue[list[int]],
    anything: RemoteValue,
    several: list[RemoteValue[int]],
    slot: PerSlot[int],
    table: PerWorkerValues,
) -> None:
    submit = coordinator.submit
    # plain values
    reveal_type(submit(square, 3))  # RemoteValue[int]
    reveal_type(submit(square, x=3))  # RemoteValue[int]
    reveal_type(submit(show, 3, text="x"))  # RemoteValue[list[str]]
    reveal_type(submit(load, 3, y=2.5))  # RemoteValue[str]
    reveal_type(submit(Model, 3))  # RemoteValue[Model]
    reveal_type(submit(Model(3).predict, 3))  # RemoteValue[float]
    reveal_type(submit(same, "x"))  # RemoteValue[str]
    reveal_type(submit(lambda: 3))  # RemoteValue[int]
    reveal_type(submit(pow, 2, 10, 3))  # RemoteValue[int]
    reveal_type(submit(sorted, [3, 1], reverse=True))  # RemoteValue[list[int]]
    reveal_type(submit(max, [2.5, 1.0]))  # RemoteValue[float]
    reveal_type(submit(int, "7", base=8))  # RemoteValue[int]
    reveal_type(submit(np.ones, 3))  # RemoteValue[ndarray[tuple[int], dtype[float64]]]
    submit(square, "x")  # error
    submit(square)  # error
    submit(square, 3, 4)  # error
    submit(show, 3, texts="x")  # error
    submit(load, "x")  # error
    submit(Model, "x")  # error
    submit(3, 4)  # error
    submit(square, 3, timeout=5)  # error
    # RemoteValues
    reveal_type(submit(square, i))  # RemoteValue[int]
    reveal_type(submit(square, submit(square, i)))  # RemoteValue[int]
    reveal_type(submit(divide, i, 3))  # RemoteValue[tuple[float, float]]
    reveal_type(submit(divide, 3, f))  # RemoteValue[tuple[float, float]]
    reveal_type(submit(show, i, text="x"))  # RemoteValue[list[str]]
    reveal_type(submit(show, i, s))  # RemoteValue[list[str]]
    reveal_type(submit(mix, 1, s, f, b""))  # RemoteValue[bool]
    reveal_type(submit(mix, i, "x", f, b))  # RemoteValue[bool]
    reveal_type(submit(load, i))  # RemoteValue[str]
    reveal_type(submit(load, 3, f))  # RemoteValue[str]
    reveal_type(submit(Model, i))  # RemoteValue[Model]
    reveal_type(submit(same, i))  # RemoteValue[int]
    reveal_type(submit(sum, items))  # RemoteValue[int | Literal[0]] || RemoteValue[int]
    reveal_type(submit(len, items))  # RemoteValue[int]
    reveal_type(submit(square, anything))  # RemoteValue[int]
    reveal_type(submit(total, several))  # RemoteValue[int]
    reveal_type(submit(total, [i, i]))  # RemoteValue[int]
    reveal_type(submit(max, several))  # RemoteValue[Any]
    reveal_type(submit(sorted, several, reverse=True))  # RemoteValue[list[Any]]
    reveal_type(submit(np.stack, several, axis=1))  # RemoteValue[ndarray[tuple[Any, ...], dtype[Any]]]
    reveal_type(submit(len, {"a": s}))  # RemoteValue[int]
    reveal_type(submit(gathered, i, several))  # RemoteValue[str]
    reveal_type(submit(gathered, 3, [i]))  # RemoteValue[str]
    reveal_type(submit(next, table))  # RemoteValue[Any]
    submit(gathered, "x", several)  # error
    submit(total, several, 3)  # error
    reveal_type(submit(square, slot))  # RemoteValue[int]
    reveal_type(submit(square, table))  # RemoteValue[int]
    reveal_type(submit(lambda x: x + 1, i))  # RemoteValue[int]
    submit(square, s)  # error
    submit(show, i, i)  # error
    submit(show, i, texts="x")  # error
    submit(mix, i, s, f, i)  # error
    submit(total, i)  # error
    submit(load, s)  # error
    submit(Model, s)  # error
    # options
    urgent = coordinator.options(priority=1, retries=2)
    reveal_type(urgent.submit(load, i))  # RemoteValue[str]
    urgent.submit(square, "x")  # error
    _, second = coordinator.options(num_returns=2).submit(divmod, 7, 2)
    reveal_type(second)  # RemoteValue[Any]
    reveal_type(urgent.options(num_returns=None, name="x").submit(square, 3))  # RemoteValue[int]
    coordinator.options(retry=1)  # error
    coordinator.options(name=5)  # error
    # schedule, results
    reveal_type(coordinator.schedule(square, (3,)).result())  # int
    reveal_type(coordinator.schedule(load, [3], timeout=3.0))  # RemoteValue[str]
    coordinator.schedule(square, (3,), priorty=1)  # error
    reveal_type(i.result(timeout=3))  # int
    reveal_type(i.get())  # int
    reveal_type(i.fetch())  # int
    reveal_type(anything.result())  # Any
    reveal_type(coordinator.scatter([1.5]))  # RemoteValue[list[float]]
    reveal_type(coordinator.per_slot(Model, 3))  # PerSlot[Model]
    coordinator.per_slot(Model, "x")  # error
    # many
    reveal_type(coordinator.map(square, range(3)))  # list[RemoteValue[int]]
    reveal_type(coordinator.map(square, several))  # list[RemoteValue[int]]
    reveal_type(coordinator.map(load, [1, 2]))  # list[RemoteValue[str]]
    reveal_type(coordinator.map(load, several))  # list[RemoteValue[str]]
    reveal_type(coordinator.map(load, several, [2.5]))  # list[RemoteValue[str]]
    reveal_type(coordinator.map(divide, [1], [f, f]))  # list[RemoteValue[tuple[float, float]]]
    reveal_type(coordinator.map(mix, [1], ["a"], [2.5], [b""]))  # list[RemoteValue[bool]]
    reveal_type(coordinator.map(lambda x: x * 2.5, [1, 2]))  # list[RemoteValue[float]]
    reveal_type(coordinator.map(abs, [-1, 2]))  # list[RemoteValue[int]]
    reveal_type(urgent.map(Model, [1, 2]))  # list[RemoteValue[Model]]
    coordinator.map(square, ["a"])  # error
    coordinator.map(square, [s])  # error
    coordinator.map(show, [1], [i])  # error
    coordinator.map(square, 3)  # error
    coordinator.map(square)  # error
    reveal_type(coordinator.imap(square, range(3), ahead=4))  # OrderedResults[int]
    reveal_type(next(coordinator.imap(load, [1])))  # str
    coordinator.imap(square, ["a"])  # error
    reveal_type(coordinator.stream(numbers, 3))  # FunctionStream[float]
    reveal_type(coordinator.stream(words, 3))  # FunctionStream[str]
    reveal_type(coordinator.stream(numbers, 3, ahead=5))  # FunctionStream[float]
    reveal_type(coordinator.stream(numbers, i))  # FunctionStream[float]
    coordinator.stream(numbers, "x")  # error
    coordinator.stream(square, 3)  # error
    reveal_type(coordinator.run(square, 3))  # dict[str, int]
    reveal_type(coordinator.run(load, 3))  # dict[str, str]
    coordinator.run(square, "x")  # error
    reveal_type(coordinator.gather(i))  # int
    reveal_type(coordinator.gather(several))  # list[int]
    reveal_type(coordinator.gather(coordinator.map(load, [1]), timeout=3))  # list[str]
    reveal_type(coordinator.gather(submit(square, n) for n in range(3)))  # list[int]
    reveal_type(coordinator.gather((i, s)))  # tuple[int, str]
    reveal_type(coordinator.gather({"a": i}))  # dict[str, int]
    reveal_type(coordinator.gather([several]))  # Any
    print(sum(coordinator.gather([submit(square, 1), submit(square, 2)])))
    reveal_type(coordinator.fetch(several))  # list[int]
    reveal_type(coordinator.wait(several, count=1))  # tuple[list[RemoteValue[int]], list[RemoteValue[int]]]
    for ended in coordinator.as_completed(several):
        reveal_type(ended.result())  # int
    for ended in zd.progress(several):
        reveal_type(ended)  # RemoteValue[int]

async def use_async(value: RemoteValue[str], items: list[RemoteValue[int]]) -> None:
    reveal_type(await value)  # str
    for item in items:
        reveal_type(await item)  # int
"""

ACTORS = """
from __future__ import annotations
from collections.abc import AsyncIterator, Iterator
import zmqdist as zd

class Counter:
    def __init__(self, start: int) -> None:
        self.count = start
    def add(self, number: int, times: int = 1) -> int:
        self.count += number * times
        return self.count
    async def wait(self, text: str) -> str:
        return text
    def numbers(self, count: int) -> Iterator[int]:
        yield from range(count)
    async def letters(self, text: str) -> AsyncIterator[str]:
        for letter in text:
            yield letter

class Other:
    def add(self, number: int) -> int:
        return number

def use(coordinator: zd.ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter, 1)
    reveal_type(counter)  # ActorHandle[Counter]
    reveal_type(coordinator.options(restarts=2).actor(Counter, start=1))  # ActorHandle[Counter]
    coordinator.actor(Counter)  # error
    coordinator.actor(Counter, "x")  # error
    coordinator.options(restarts=2).actor(Counter, 1, 2)  # error
    reveal_type(counter[Counter.add](2, times=3))  # RemoteValue[int]
    reveal_type(counter[Counter.add].options(timeout=3.0)(2))  # RemoteValue[int]
    reveal_type(counter[Counter.wait]("a"))  # RemoteValue[str]
    reveal_type(counter[Counter.numbers](2))  # ResultStream[int]
    reveal_type(counter[Counter.letters]("ab"))  # ResultStream[str]
    counter[Counter.add]("x")  # error
    counter[Counter.add]()  # error
    counter[Counter.subtract](2)  # error
    counter[Other.add](2)  # error
    reveal_type(counter.add(2))  # Any
    reveal_type(coordinator.get_actor("counter"))  # ActorHandle[Any]
    named: zd.coordinator.ActorHandle[Counter] = coordinator.get_actor("counter")
    reveal_type(named[Counter.add](2).result())  # int
    team = coordinator.actors(Counter, 2, 1)
    reveal_type(team)  # ActorGroup[Counter]
    reveal_type(team[1][Counter.add](2))  # RemoteValue[int]
    reveal_type(team[Counter.add](2).result())  # list[int]
    reveal_type(team[Counter.wait]("a"))  # GroupValue[str]
    for value in team[Counter.add].as_completed(2):
        reveal_type(value)  # RemoteValue[int]
    team[Counter.add]("x")  # error
    coordinator.actors(Counter, 2, "x")  # error
    coordinator.kill(team)
    coordinator.kill(counter)
    coordinator.kill(3)  # error
"""

RPC = """
from __future__ import annotations
from typing import Protocol
import numpy as np
from numpy.typing import NDArray
import zmqdist as zd

class Sums(zd.rpc.Interface, Protocol):
    def cumsum(self, array: NDArray[np.int64]) -> zd.rpc.StatusOrResult[NDArray[np.int64]]: ...
    def cumsum_blocking(self, array: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def count(self, upto: int) -> zd.rpc.Stream[int]: ...

class Plain(Protocol):
    def half_blocking(self, number: float) -> float: ...

async def use(address: str) -> None:
    sums = zd.rpc.connect(address, interface=Sums, timeout=3)
    reveal_type(sums)  # Sums
    reveal_type(await sums.cumsum(np.arange(3)))  # ndarray[tuple[Any, ...], dtype[signedinteger[_64Bit]]]
    reveal_type(sums.cumsum(np.arange(3)).get_value().shape)  # tuple[Any, ...]
    for number in sums.count(3):
        reveal_type(number)  # int
    sums.cumsum_blocking("x")  # error
    sums.product(np.arange(3))  # error
    sums.close()
    with zd.rpc.connect(address, interface=Sums) as client:
        reveal_type(client)  # Sums
    with zd.rpc.connect(address, interface=Plain) as plain:
        reveal_type(plain.half_blocking(3))  # float
        plain.half_blocking("x")  # error
    zd.rpc.connect(address, interfaces=Plain)  # error
    with zd.rpc.serve(methods=[np.cumsum]) as server, zd.rpc.connect(server.address) as free:
        reveal_type(free)  # ZmqClient
        reveal_type(free.cumsum_blocking(np.arange(4)))  # Any
        reveal_type(free.call("cumsum", np.arange(4)))  # StatusOrResult[Any]
"""

DATA = """
from __future__ import annotations
import numpy as np
from numpy.typing import NDArray
import zmqdist as zd
from zmqdist.data import Dataset

def row(x: np.int64) -> NDArray[np.float64]:
    return np.full(3, x, np.float64)

def pair(x: np.int64) -> tuple[np.int64, str]:
    return x, str(x)

def joined(x: np.int64, text: str) -> str:
    return text * int(x)

def number(x: np.int64) -> int:
    return int(x)

def is_even(x: np.int64) -> bool:
    return bool(x > 2)

def has_text(x: np.int64, text: str) -> bool:
    return bool(text)

def half(dataset: Dataset[np.int64]) -> Dataset[np.int64]:
    return dataset.shard(2, 0)

def several(x: np.int64) -> Dataset[str]:
    return Dataset.range(int(x)).map(str)

dataset = Dataset.range(10)
reveal_type(dataset)  # Dataset[signedinteger[_64Bit]]
reveal_type(Dataset.range(3, output_type=np.float32))  # Dataset[Any]
reveal_type(dataset.map(row, num_parallel_calls=2))  # Dataset[ndarray[tuple[Any, ...], dtype[float64]]]
reveal_type(dataset.map(pair))  # Dataset[tuple[signedinteger[_64Bit], str]]
reveal_type(dataset.map(pair).map(joined))  # Dataset[str]
reveal_type(dataset.map(number))  # Dataset[Any]
reveal_type(dataset.map(lambda x: x * 2).take(3))  # Dataset[Any] || Dataset[signedinteger[_64Bit]]
reveal_type(dataset.filter(is_even))  # Dataset[signedinteger[_64Bit]]
reveal_type(dataset.filter(lambda x: x > 2))  # Dataset[signedinteger[_64Bit]]
reveal_type(dataset.map(pair).filter(has_text))  # Dataset[tuple[signedinteger[_64Bit], str]]
reveal_type(dataset.map(pair).filter(lambda x, text: x > 3))  # Dataset[tuple[signedinteger[_64Bit], str]]
reveal_type(dataset.batch(3))  # Dataset[ndarray[tuple[Any, ...], dtype[signedinteger[_64Bit]]]]
reveal_type(dataset.map(row).batch(3))  # Dataset[ndarray[tuple[Any, ...], dtype[float64]]]
reveal_type(dataset.map(pair).batch(3))  # Dataset[Any]
reveal_type(dataset.map(pair).shuffle(9).repeat(2).prefetch(3))  # Dataset[tuple[signedinteger[_64Bit], str]]
reveal_type(dataset.map(pair).enumerate())  # Dataset[tuple[signedinteger[_64Bit], tuple[signedinteger[_64Bit], str]]]
reveal_type(dataset.window(3))  # Dataset[Dataset[signedinteger[_64Bit]]]
reveal_type(dataset.flat_map(several))  # Dataset[str]
reveal_type(dataset.interleave(several, 2))  # Dataset[str]
reveal_type(Dataset.zip(dataset, dataset.map(row)))  # Dataset[tuple[signedinteger[_64Bit], ndarray[tuple[Any, ...], dtype[float64]]]]
reveal_type(Dataset.zip({"a": dataset}))  # Dataset[Any]
reveal_type(dataset.concatenate(dataset.flat_map(several)))  # Dataset[signedinteger[_64Bit] | str]
reveal_type(dataset.apply(half))  # Dataset[signedinteger[_64Bit]]
reveal_type(dataset.map(row).get_single_element())  # ndarray[tuple[Any, ...], dtype[float64]]
reveal_type(next(dataset.as_numpy_iterator()))  # signedinteger[_64Bit]
for batch in dataset.batch(3):
    reveal_type(batch)  # ndarray[tuple[Any, ...], dtype[signedinteger[_64Bit]]]
dataset.map(joined)  # error
dataset.map(row).map(row)  # error
dataset.flat_map(row)  # error
dataset.map(row, num_parallel_call=2)  # error
dataset.batch("3")  # error
dataset.shuffel(3)  # error

def use(untyped: Dataset, coordinator: zd.ClusterCoordinator) -> None:
    reveal_type(untyped.map(row))  # Dataset[Any]
    reveal_type(untyped.filter(is_even).take(3))  # Dataset[Any]
    reveal_type(untyped.batch(3))  # Dataset[Any]
    for element in untyped:
        reveal_type(element)  # Any
    read = coordinator.create_per_worker_dataset(dataset)
    reveal_type(coordinator.submit(next, iter(read)))  # RemoteValue[Any]
"""

VARIABLES = """
from __future__ import annotations
import numpy as np
from numpy.typing import NDArray
import zmqdist as zd

weights = zd.Variable(np.zeros(3), name="weights")
reveal_type(weights)  # Variable
reveal_type(weights.assign_add(np.ones(3)))  # Variable
reveal_type(weights.shape)  # tuple[int, ...]
weights.asign(3)  # error
zd.Variable(np.zeros(3), nam="weights")  # error

@zd.function(input_signature=[zd.TensorSpec([None], np.float64)])
def mean(x: NDArray[np.float64]) -> float:
    return float(x.mean())

@zd.function
def double(x: int, times: int = 1) -> int:
    return 2 * times * x

reveal_type(mean(np.ones(3)))  # float
reveal_type(double(3, times=2))  # int
reveal_type(mean.input_signature)  # Any
mean("x")  # error
double(3, time=2)  # error
zd.function(3)  # error

def use(coordinator: zd.ClusterCoordinator) -> None:
    reveal_type(coordinator.submit(double, 3))  # RemoteValue[int]
    coordinator.submit(double, "x")  # error
"""

NAMES = """
from __future__ import annotations
import zmqdist as zd
import zmqdist as zmqdist_itself

zd.Executr  # error
zd.rpc.conect("x")  # error
zmqdist_itself.corodinator  # error
zd.coordinator.RemoteValues  # error
zd.data.Datasett  # error
zd.local_cluster(worker=2)  # error
zd.local_cluster(workers="two")  # error
zd.local_cluster(lease_s="3")  # error
zd.local_cluster(token_file="x")  # error
zd.ClusterCoordinator(queue_maximum=3)  # error
cluster = zd.local_cluster(workers=2, lease_s=3, logs=False)
cluster.coordinator(queue_max=3)
cluster.coordinator(queue_maximum=3)  # error
zd.Executor(cluster, max_workers=2, initializer=print, initargs=("a",), queue_max=3)
zd.Executor(max_worker=2)  # error
zd.Executor(max_workers="2")  # error
zd.Executor(queue_maximum=2)  # error
"""

PROGRAMS = {
    "tasks": TASKS,
    "actors": ACTORS,
    "rpc": RPC,
    "data": DATA,
    "variables": VARIABLES,
    "names": NAMES,
}


def short(revealed: str) -> str:
    """Return a type without the modules of its names."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", revealed)


def unexpected(program: str, checker: int, lines: dict[int, list[str]]) -> str:
    """Return what a type checker says of the lines of a program, and its comments do not.

    Args:
      checker: 0 for mypy, 1 for pyright.
      lines: by line, the revealed types and errors; an error begins with "error".
    """
    wrong = []
    for number, line in enumerate(program.splitlines(), 1):
        code, _, comment = line.partition("  # ")
        texts = sorted({short(text) for text in lines.get(number, [])})
        if comment == "error":
            if not texts or not all(text.startswith("error") for text in texts):
                wrong.append(f"{number}: {code.strip()}: no error: {texts}")
        elif comment and code.strip().startswith("reveal_type"):
            types = comment.split(" || ")
            if texts != [types[checker if len(types) > 1 else 0]]:
                wrong.append(f"{number}: {code.strip()}: {comment}, not {texts}")
        elif texts:
            wrong.append(f"{number}: {code.strip()}: {texts}")
    return "\n".join(wrong)


def strict_programs() -> dict[str, str]:
    """Return the programs of pages that strict type checkers accept as they are, by file name: the
    blocks of a page are one program."""
    programs = {}
    for page in STRICT_PAGES:
        text = "\n".join(blocks((ROOT / page).read_text(), "python"))
        programs[f"page_{Path(page).stem.lower()}.py"] = text
    return programs
