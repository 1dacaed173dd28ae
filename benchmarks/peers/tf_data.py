"""The tf.data service: a dispatcher and workers in processes of their own. Elements are not
compressed.

Variants: `inside`: the servers and the reader are in one process, and elements pass between them
without gRPC (data_transfer_protocol="local"). `native`: TensorFlow's operations decode the images,
instead of the function that all other systems run.

TensorFlow sends a Python function to a worker in another process only as a number. Therefore each
worker first builds the same pipeline, and TensorFlow gives the function the same number there.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

from benchmarks.peers.served import run
from benchmarks.peers.streams import (
    ARRAY_MOD,
    ENDLESS,
    SIDE,
    WORKERS,
    Loader,
    Servers,
    firsts,
    free_port,
    picture,
    pictures,
    streamed,
    streamed_bytes,
)

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

GC_MS = 1000
"""Milliseconds after which the dispatcher drops a job without readers, so that a block does not
slow down the next one."""


def serve(role: str, address: str, *functions: str) -> None:
    """Run a dispatcher or a worker in this process until standard input ends. With `functions`,
    first build the pipeline of images."""
    if functions:
        images(False)
    server = dispatch(int(address.rpartition(":")[2])) if role == "dispatcher" else worker(address)
    print("ready", server, flush=True)
    sys.stdin.read()


def dispatch(port: int = 0) -> Any:
    import tensorflow as tf

    service = tf.data.experimental.service
    return service.DispatchServer(
        service.DispatcherConfig(port=port, job_gc_check_interval_ms=GC_MS, job_gc_timeout_ms=GC_MS)
    )


def worker(dispatcher: str) -> Any:
    import tensorflow as tf

    service = tf.data.experimental.service
    return service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher))


@cache
def images(native: bool) -> Any:
    """Return the pipeline of images. A process must build it only once, because the number of its
    function counts (see above)."""
    import tensorflow as tf

    def by_function(name: Any) -> Any:
        image = tf.numpy_function(picture, [name], tf.float32)
        image.set_shape([SIDE, SIDE, 3])
        return image

    def by_operations(name: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(name), channels=3)
        return tf.image.flip_left_right(tf.image.resize(image, [SIDE, SIDE]))

    names = tf.data.Dataset.from_tensor_slices(pictures()).repeat()
    found = names.map(by_operations if native else by_function, num_parallel_calls=tf.data.AUTOTUNE)
    return found.prefetch(tf.data.AUTOTUNE)


class TfData(Loader):
    package = "tensorflow"

    def __init__(self, variant: str = "") -> None:
        super().__init__(variant)
        self._servers = Servers(self.stack)

    def version(self) -> str:
        import tensorflow as tf

        return f"tensorflow {tf.__version__}"

    def answers(self) -> list[str]:
        return ["data_images"] if self.variant == "native" else super().answers()

    @cache  # noqa: B019 (as long as the process)
    def _started(self, workers: int, *functions: str) -> str:
        """Start a dispatcher and its workers. Return the dispatcher's address, perhaps before the
        servers are ready."""
        if self.variant == "inside":
            dispatcher = dispatch()
            servers = [dispatcher, *(worker(dispatcher._address) for _ in range(workers))]
            self.stack.callback(servers.clear)
            return str(dispatcher._address)
        address = f"localhost:{free_port()}"
        for role in ["dispatcher", *["worker"] * workers]:
            self._servers.start("benchmarks.peers.tf_data", "--serve", role, address, *functions)
        return address

    def _served(self, dataset: Any, workers: int = WORKERS, *functions: str) -> Any:
        import tensorflow as tf

        service = tf.data.experimental.service
        sent = service.distribute(
            service.ShardingPolicy.OFF,
            f"grpc://{self._started(workers, *functions)}",
            compression=None,
            data_transfer_protocol="local" if self.variant == "inside" else None,
        )
        return dataset.apply(sent)

    @cache  # noqa: B019
    def _numbers(self, batch: int = 1) -> Any:
        import tensorflow as tf

        dataset = tf.data.Dataset.range(ENDLESS)
        return self._served(dataset.batch(batch) if batch > 1 else dataset)

    @cache  # noqa: B019
    def _arrays(self, size: int) -> Any:
        import tensorflow as tf

        base = tf.ones([size], tf.uint8)
        dataset = tf.data.Dataset.range(ENDLESS)
        dataset = dataset.map(
            lambda i: base + tf.cast(i % ARRAY_MOD, tf.uint8), num_parallel_calls=tf.data.AUTOTUNE
        )
        return self._served(dataset.prefetch(tf.data.AUTOTUNE))

    @cache  # noqa: B019
    def _images(self, workers: int) -> Any:
        return self._served(images(self.variant == "native"), workers, "functions")

    def data_elements(self, count: int, batch: int) -> list[float]:
        dataset = self._numbers(batch)
        self._servers.ready()
        return streamed(dataset.as_numpy_iterator, count, batch)

    def data_arrays(self, count: int, size: int) -> list[float]:
        dataset = self._arrays(size)
        self._servers.ready()
        return streamed_bytes(dataset.as_numpy_iterator, count, size)

    def data_images(self, count: int, workers: int) -> list[float]:
        dataset = self._images(workers)
        self._servers.ready()
        return streamed(dataset.as_numpy_iterator, count)

    def data_first(self, count: int) -> list[float]:
        dataset = self._numbers()
        self._servers.ready()
        return firsts(lambda: dataset, count)

    def data_start(self) -> list[float]:
        if not self.variant:
            self._started(WORKERS)
        next(iter(self._numbers()))
        return []


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        run(TfData)
