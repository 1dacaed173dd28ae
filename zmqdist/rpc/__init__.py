"""Questions with answers between processes.

    server = Server.create("zmq", "127.0.0.1:0")
    server.register("multiply", lambda a, b: a * b)
    server.start()
    client = Client.create("zmq", server.address)
    client.multiply_blocking(2, 3)      # 6
    client.multiply(2, 3).get_value()   # the same, and other things can be done before get_value

What else there is - arguments by name, await, streams, batches, large arrays - is in docs/rpc.md.
Not here: work that may run on any of several workers (coordinator), and anything that sends code: values only.
"""

from zmqdist.rpc.client import RpcClient as Client
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.future import StatusOrResult
from zmqdist.rpc.method_list import MethodInfo
from zmqdist.rpc.server import RpcServer as Server
from zmqdist.rpc.server import ZmqServer
from zmqdist.rpc.streams import Stream
from zmqdist.transport.figures import ClientSnapshot, ServerSnapshot

__all__ = [
    "Server",
    "Client",
    "StatusOrResult",
    "Stream",
    "MethodInfo",
    "ZmqServer",
    "ZmqClient",
    "ClientSnapshot",
    "ServerSnapshot",
]
