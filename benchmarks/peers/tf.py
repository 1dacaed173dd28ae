"""TensorFlow: `tf.distribute.experimental.rpc` for calls, a ParameterServerStrategy of two workers
and two parameter servers for tasks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import cache, cached_property
from typing import Any

from benchmarks.peers.served import SHRINKS, TABLE, System, echoed, rate, run, timed

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def serve(port: str) -> None:
    """Run the server of the calls, in the other process, until standard input ends."""
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])  # type: ignore[untyped-decorator, unused-ignore]
    def echo(value: Any) -> Any:
        return value

    @tf.function(input_signature=[tf.TensorSpec([None], tf.uint8)])  # type: ignore[untyped-decorator, unused-ignore]
    def echo_array(value: Any) -> Any:
        return value

    server = tf.distribute.experimental.rpc.Server.create("grpc", f"127.0.0.1:{port}")
    server.register("echo", echo)
    server.register("echo_array", echo_array)
    server.start()
    print("ready", flush=True)
    sys.stdin.read()


def work(cluster: str, job: str, index: str) -> None:
    """Run a worker or a parameter server until standard input ends."""
    import tensorflow as tf

    tf.distribute.Server(json.loads(cluster), job_name=job, task_index=int(index), protocol="grpc")
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


class Tf(System):
    package = "tensorflow"

    def version(self) -> str:
        from importlib.metadata import PackageNotFoundError, version

        for name in ("tensorflow", "tensorflow-cpu"):
            try:
                return f"tensorflow {version(name)}"
            except PackageNotFoundError:
                continue
        return "tensorflow"

    def _started(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.peers.tf", *words]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.stack.callback(process.communicate)
        return process

    @cached_property
    def _client(self) -> Any:
        import tensorflow as tf

        port = str(_free_port())
        stdout = self._started("--serve", port).stdout
        assert stdout is not None
        stdout.readline()
        return tf.distribute.experimental.rpc.Client.create("grpc", f"127.0.0.1:{port}")

    def latency(self, count: int) -> list[float]:
        import tensorflow as tf

        echo, value = self._client.echo, tf.constant(7, tf.int64)
        return timed(lambda: echo(value).get_value(), count)

    def calls(self, count: int, window: int) -> list[float]:
        import tensorflow as tf

        echo, value = self._client.echo, tf.constant(7, tf.int64)

        def calling() -> None:
            for first in range(0, count, window):
                for result in [echo(value) for _ in range(min(window, count - first))]:
                    result.get_value()

        return rate(calling, count)

    def bandwidth(self, count: int, size: int) -> list[float]:
        import tensorflow as tf

        echo = self._client.echo_array

        def asked(array: Any) -> Any:
            result = echo(tf.constant(array))
            if not result.is_ok():
                raise RuntimeError(result.get_error()[1].numpy().decode())
            return result.get_value().numpy()

        return echoed(asked, size, count)

    @cached_property
    def _coordinator(self) -> Any:
        import tensorflow as tf

        cluster = {
            "chief": [f"127.0.0.1:{_free_port()}"],
            "ps": [f"127.0.0.1:{_free_port()}" for _ in range(2)],
            "worker": [f"127.0.0.1:{_free_port()}" for _ in range(2)],
        }
        text = json.dumps(cluster)
        for job, index in (("ps", "0"), ("ps", "1"), ("worker", "0"), ("worker", "1")):
            self._started("--work", text, job, index)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        halves = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
        strategy = tf.distribute.ParameterServerStrategy(resolver, halves)
        return tf.distribute.coordinator.ClusterCoordinator(strategy)

    @cached_property
    def _nothing(self) -> Any:
        import tensorflow as tf

        return tf.function(lambda: tf.constant(0))

    def tasks(self, count: int) -> list[float]:
        coordinator = self._coordinator

        def working() -> None:
            values = [coordinator.schedule(self._nothing) for _ in range(count)]
            coordinator.join()
            coordinator.fetch(values)

        return rate(working, count)

    def roundtrip(self, count: int) -> list[float]:
        coordinator, nothing = self._coordinator, self._nothing
        return timed(lambda: coordinator.schedule(nothing).fetch(), count)

    @cache  # noqa: B019
    def _zeros(self, *shape: int) -> Any:
        import tensorflow as tf

        with self._coordinator.strategy.scope():
            return tf.Variable(tf.zeros(shape))

    @cache  # noqa: B019
    def _touching(self, *shape: int, rows: int = 0) -> Any:
        """Return the function of a task: it adds to a number (no `shape`), to `rows` rows of a
        table, or to a whole array (`rows` is 0)."""
        import tensorflow as tf

        variable = self._zeros(*shape)

        def touched() -> None:
            if not shape:
                variable.assign_add(1.0)
            elif rows:
                ids = tf.random.uniform([rows], 0, shape[0], tf.int64)
                found = tf.nn.embedding_lookup(variable, ids)
                variable.scatter_add(tf.IndexedSlices(found * SHRINKS, ids))
            else:
                for part in variable.variables:
                    part.assign_add(part.read_value() * SHRINKS)

        return tf.function(touched)

    def ps_tasks(self, count: int) -> list[float]:
        return self._touched(self._touching(), count)

    def ps_rows(self, count: int, rows: int) -> list[float]:
        return [value * rows for value in self._touched(self._touching(*TABLE, rows=rows), count)]

    def ps_model(self, count: int, size: int) -> list[float]:
        touching = self._touching(size // 4)
        return [
            value * 2 * size
            for value in rate(lambda: [self._touched(touching, 1) for _ in range(count)], count)
        ]

    def _touched(self, touching: Any, count: int) -> list[float]:
        def work() -> None:
            for _ in range(count):
                self._coordinator.schedule(touching)
            self._coordinator.join()

        return rate(work, count)

    def startup(self) -> list[float]:
        self._coordinator.schedule(self._nothing).fetch()
        return []


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    elif sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        run(Tf)
