"""Calls between processes: a server registers functions, a client calls them and gets their values.

    server = Server.create("zmq", "127.0.0.1:0")
    server.register("multiply", lambda a, b: a * b)
    server.start()
    client = Client.create("zmq", server.address)
    client.multiply_blocking(2, 3)      # 6
    client.multiply(2, 3).get_value()   # also 6, but the caller can do other work before get_value

docs/rpc.md describes the rest: arguments by name, await, streams, batches, large arrays.
Not here: functions that may run on any of several workers (coordinator). Calls never send code,
only values.
"""

from zmqdist.rpc.client import Interface, StatusOrResult, Stream, ZmqClient, connect
from zmqdist.rpc.client import RpcClient as Client
from zmqdist.rpc.methods import MethodInfo
from zmqdist.rpc.server import RpcServer as Server
from zmqdist.rpc.server import ZmqServer, serve
from zmqdist.transport.connection_snapshots import ClientSnapshot, ServerSnapshot

__all__ = [
    "Server",
    "Client",
    "StatusOrResult",
    "Stream",
    "MethodInfo",
    "ZmqServer",
    "ZmqClient",
    "ClientSnapshot",
    "Interface",
    "ServerSnapshot",
    "connect",
    "serve",
]
__dir__ = __all__.copy  # dir() and completion show no other names
