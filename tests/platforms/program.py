"""Programs of users, in a process without the calls of Linux: `python -m tests.platforms.program
darwin|win32`.

Each line of the input, in JSON, is the name of a scenario below, an address and environment
variables. Each line of the output is what a test is to see, and "" or why the scenario failed.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
import time
import traceback
from typing import Any

from tests.platforms.take_away import take_away

LARGE_BYTES = 64 * 2**20


def rpc_client(zd: Any, np: Any, address: str) -> None:
    with zd.rpc.connect(address) as client:
        assert client.echo_blocking({"a": [1, 2.5, None]}) == {"a": [1, 2.5, None]}
        large = np.arange(LARGE_BYTES // 8)
        assert np.array_equal(client.echo_blocking(large), large)
        results = [client.echo(number) for number in range(500)]
        assert [result.get_value() for result in results] == list(range(500))
        assert client.fail().get_error()[0] == zd.errors.NOT_FOUND
        assert client.sleep(0.5, timeout_in_ms=50).get_error()[0] == zd.errors.DEADLINE_EXCEEDED
        assert list(client.count(2000)) == list(range(2000))
        answers: list[int] = []
        called = threading.Event()
        result = client.echo(7)
        result.add_done_callback(lambda done: (answers.append(done.get_value()), called.set()))
        assert called.wait(30)
        assert answers == [7]
        threads = [
            threading.Thread(target=lambda: answers.append(client.echo_blocking(7)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [7] * 9


def rpc_server(zd: Any, np: Any, address: str) -> None:
    """Serve until the client calls `stop`."""
    over = threading.Event()

    def count(upto: int) -> Any:
        yield from range(upto)

    with zd.rpc.serve("127.0.0.1:0", {"echo": lambda x: x, "count": count, "stop": over.set}) as s:
        print(json.dumps(s.address), flush=True)
        assert over.wait(50)


def patient() -> None:
    import zmqdist

    while not zmqdist.cancelled():
        time.sleep(0.001)


def coordinator(zd: Any, np: Any, address: str) -> None:
    with zd.ClusterCoordinator(address) as co:
        assert co.submit(pow, 2, 5).result() == 32
        large = np.arange(LARGE_BYTES // 8)
        assert co.submit(np.sum, large).result() == large.sum()
        assert np.array_equal(co.submit(np.negative, co.scatter(large)).result(), -large)
        failed = co.submit(int, "x")
        assert isinstance(failed.exception(), ValueError)
        assert list(co.imap(abs, range(-300, 0))) == list(range(300, 0, -1))
        waiting = co.submit(patient)
        waiting.cancel()
        assert isinstance(waiting.exception(), zd.errors.CancelledError)


def actors(zd: Any, np: Any, address: str) -> None:
    class Counter:
        def __init__(self, start: int) -> None:
            self.count = start

        def add(self, number: Any) -> Any:
            self.count += int(np.size(number))
            return number

        def up_to(self, end: int) -> Any:
            yield from range(end)

    with zd.ClusterCoordinator(address) as co:
        counter = co.actor(Counter, 1)
        calls = [counter.add(number) for number in range(100)]
        assert [call.result() for call in calls] == list(range(100))
        large = np.arange(LARGE_BYTES // 8)
        assert np.array_equal(counter.add(large).result(), large)
        assert list(counter.up_to(50)) == list(range(50))


def executor(zd: Any, np: Any, address: str) -> None:
    with zd.Executor(address, max_workers=4) as pool:
        assert pool.submit(pow, 2, 5).result() == 32
        assert list(pool.map(abs, range(-100, 0))) == list(range(100, 0, -1))
    with zd.connect(address) as cluster:
        assert cluster.workers == 1


def die() -> None:
    os.kill(os.getpid(), 9)


def lost_function(zd: Any, np: Any, address: str) -> None:
    with zd.ClusterCoordinator(address) as co:
        error = co.submit(die).exception()
        assert isinstance(error, zd.errors.WorkerLost)
        assert "killed by " in str(error)
        assert co.submit(pow, 2, 5).result() == 32


def refused(zd: Any, np: Any, address: str) -> None:
    messages = []
    for name in ("local_cluster", "DispatchServer", "WorkerServer", "Executor"):
        try:
            getattr(zd, name)()
        except zd.errors.UnimplementedError as error:
            messages.append(error.message)
    print(json.dumps(messages), flush=True)


def command(zd: Any, np: Any, address: str) -> None:
    """Print the exit code of `zmqdist status`, and what each command says that does not exist."""
    import click

    from zmqdist_cli.main import COMMANDS, cli, main

    refusals = []
    for name in COMMANDS:
        try:
            cli.get_command(click.Context(cli), name)
        except zd.errors.UnimplementedError as error:
            refusals.append(error.message)
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(["status", address.removeprefix("zmq://")])
    print(json.dumps([int(code), refusals]), flush=True)


def unnamed_token(zd: Any, np: Any, address: str) -> None:
    try:
        zd.rpc.connect(address)
    except zd.errors.FailedPreconditionError as error:
        print(json.dumps(error.message), flush=True)


def main() -> None:
    take_away(sys.argv[1])
    import numpy

    import zmqdist

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zmqdist").addHandler(handler)
    for line in sys.stdin:
        name, address, variables = json.loads(line)
        os.environ.update(variables)
        try:
            globals()[name](zmqdist, numpy, address)
        except BaseException:
            warnings.append(traceback.format_exc())
        for variable in variables:
            del os.environ[variable]
        print(json.dumps("\n".join(warnings)), flush=True)
        warnings.clear()


if __name__ == "__main__":
    main()
