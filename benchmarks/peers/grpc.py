"""gRPC for Python (grpcio): a generic handler in a process of its own. Messages are plain bytes,
without protobuf."""

from __future__ import annotations

import subprocess
import sys
from functools import cached_property
from typing import Any

from benchmarks.peers.served import System, echoed, rate, run, timed

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
SMALL = b"24 bytes of small payload"


def serve() -> None:
    """Run the server in the other process: print its port, and serve until standard input ends."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    def echo(request: bytes, _context: Any) -> bytes:
        return request

    class Echo(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
        def service(self, _details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(echo)

    server = grpc.server(ThreadPoolExecutor(2), options=UNLIMITED)
    server.add_generic_rpc_handlers((Echo(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None)


class Grpc(System):
    package = "grpc"

    def version(self) -> str:
        from importlib.metadata import version

        return f"grpcio {version('grpcio')}"

    @cached_property
    def _call(self) -> Any:
        import grpc

        command = [sys.executable, "-m", "benchmarks.peers.grpc", "--serve"]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert server.stdout is not None
        self.stack.callback(server.communicate)
        port = server.stdout.readline().decode().strip()
        channel = self.stack.enter_context(
            grpc.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED)
        )
        return channel.unary_unary("/benchmark/echo")

    def latency(self, count: int) -> list[float]:
        call = self._call
        return timed(lambda: call(SMALL), count)

    def calls(self, count: int, window: int) -> list[float]:
        start = self._call.future

        def work() -> None:
            for first in range(0, count, window):
                for future in [start(SMALL) for _ in range(min(window, count - first))]:
                    future.result()

        return rate(work, count)

    def bandwidth(self, count: int, size: int) -> list[float]:
        import numpy as np

        return echoed(
            lambda array: np.frombuffer(self._call(array.tobytes()), np.uint8), size, count
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        run(Grpc)
