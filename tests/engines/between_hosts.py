"""GB/s of a 256 MiB array from one host to another, with keys and without, beside one frame of
ZeroMQ with CURVE and one stream of TLS.

    python -m tests.engines.between_hosts [ROUNDS]      5 unless said otherwise

The hosts are two namespaces of this machine, joined by a cable without a limit
(tests/campaigns/hosts.py), so both ends share its cores. The lanes take turns, in another order
each round. A transfer ends when the receiver, which then has the whole array in its memory, has
said so. The seconds of CPU are those of sender and receiver for one transfer.
"""

from __future__ import annotations

import json
import os
import random
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zmq

from tests.campaigns.hosts import Network
from zmqdist.rpc import Server
from zmqdist.rpc.client import ZmqClient
from zmqdist.transport import keys
from zmqdist.transport.security import client_security, server_security

BYTES = 256 * 2**20
PORTS = {"keys": 7001, "open": 7002, "curve": 7003, "tls": 7004}
LANES = {
    "keys": "zmqdist with keys",
    "open": "zmqdist without encryption",
    "curve": "one frame of ZeroMQ with CURVE",
    "tls": "one stream of TLS",
}
TLS_PIECE = 2**20
READY = "ready"


def received(array: Any) -> float:
    """Return the seconds of CPU of the receiver so far, as its reply to a transfer."""
    assert len(array) == BYTES
    return time.process_time()


# -- the receiving host ----------------------------------------------------------------------------


def serve(folder: Path, host: str) -> None:
    with_keys = Server.create("zmq", f"{host}:{PORTS['keys']}", keys_dir=folder / "keys")
    without = Server.create("zmq", f"{host}:{PORTS['open']}")
    for server in (with_keys, without):
        server.register("received", received)
    with_keys.start()
    with mock.patch("zmqdist.rpc.server.server_security", partial(server_security, insecure=True)):
        # no program can have such a server: `insecure` is for tasks and dispatchers
        without.start()
    for lane in (serve_curve, serve_tls):
        threading.Thread(target=lane, args=(folder, host), daemon=True).start()
    print(READY, flush=True)
    sys.stdin.read()


def serve_curve(folder: Path, host: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.curve_server = True
        router.curve_secretkey = (folder / "curve").read_bytes()
        router.bind(f"tcp://{host}:{PORTS['curve']}")
        while True:
            peer, frame = router.recv_multipart(copy=False)
            router.send_multipart([peer, json.dumps(received(frame.buffer)).encode()])


def serve_tls(folder: Path, host: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate", folder / "key")
    array = np.ones(BYTES, np.uint8)
    with socket.create_server((host, PORTS["tls"])) as listening:
        connection, _ = listening.accept()
        with context.wrap_socket(connection, server_side=True) as stream:
            while True:
                view, at = memoryview(array), 0
                while at < BYTES:
                    count = stream.recv_into(view[at:])
                    if not count:
                        return
                    at += count
                stream.sendall(json.dumps(received(array)).encode().ljust(32))


# -- the sending host ------------------------------------------------------------------------------


def senders(folder: Path, host: str, array: Any) -> dict[str, Callable[[], float]]:
    """For each lane what sends the array, waits for the reply and returns it."""
    address = f"{host}:{PORTS['open']}"
    with_keys = ZmqClient(f"{host}:{PORTS['keys']}", keys_dir=folder / "keys")
    without = ZmqClient(address, security=client_security(address, "client", insecure=True))
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.curve_serverkey = (folder / "curve.pub").read_bytes()
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.connect(f"tcp://{host}:{PORTS['curve']}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(folder / "certificate")
    stream = context.wrap_socket(socket.create_connection((host, PORTS["tls"])))
    print(
        json.dumps([zmq.zmq_version(), stream.version(), stream.cipher()[0], ssl.OPENSSL_VERSION]),
        flush=True,
    )

    def time_zmqdist(client: ZmqClient) -> float:
        (seconds,) = client.call("received", array).get_value()
        return float(seconds)

    def time_curve() -> float:
        dealer.send(array, copy=False)
        return float(json.loads(dealer.recv()))

    def time_tls() -> float:
        view = memoryview(array)
        for at in range(0, BYTES, TLS_PIECE):
            stream.sendall(view[at : at + TLS_PIECE])
        return float(json.loads(stream.recv(32)))

    return {
        "keys": lambda: time_zmqdist(with_keys),
        "open": lambda: time_zmqdist(without),
        "curve": time_curve,
        "tls": time_tls,
    }


def ask(folder: Path, host: str, rounds: int) -> None:
    array = np.ones(BYTES, np.uint8)
    lanes = senders(folder, host, array)
    replied = {
        lane: send() for lane, send in lanes.items()
    }  # the first transfer of each pays for connections and new memory
    for number in range(rounds):
        order = list(lanes)
        random.Random(number).shuffle(order)
        for lane in order:
            replied[lane] = max(replied.values())  # the receiver idles between two transfers
            begun, used = time.perf_counter(), time.process_time()
            there = lanes[lane]()
            took = time.perf_counter() - begun
            row = [lane, took, time.process_time() - used, there - replied[lane]]
            replied[lane] = there
            print(json.dumps(row), flush=True)


# -- this machine ----------------------------------------------------------------------------------


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name, Network("sender", "receiver") as net:
        folder = Path(name)
        keys.keygen(folder / "keys")
        public, secret = zmq.curve_keypair()
        (folder / "curve.pub").write_bytes(public)
        (folder / "curve").write_bytes(secret)
        made = [
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-subj",
            "/CN=receiver",
            "-days",
            "1",
        ]
        files = ["-keyout", folder / "key", "-out", folder / "certificate"]
        subprocess.run(
            ["openssl", "req", "-x509", "-nodes", *made, *files], check=True, capture_output=True
        )
        command = [sys.executable, "-m", __spec__.name]  # type: ignore[name-defined]
        host = net["receiver"].ip
        receiver = net["receiver"].run(
            [*command, "serve", name, host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert receiver.stdout.readline().strip() == READY
        sender = net["sender"].run(
            [*command, "ask", name, host, str(rounds)], stdout=subprocess.PIPE, text=True
        )
        first, *lines = sender.communicate()[0].splitlines()
        assert sender.returncode == 0
        receiver.communicate(timeout=20)
    rows = [json.loads(line) for line in lines]
    libzmq, protocol, cipher, openssl = json.loads(first)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"libzmq {libzmq}; {protocol}, {cipher}, {openssl}; {load}")
    print(f"{'GB/s, one way':32} median  quartiles      CPU s of sender, receiver")
    for lane, title in LANES.items():
        took = [BYTES / row[1] / 1e9 for row in rows if row[0] == lane]
        low, middle, high = statistics.quantiles(took, method="inclusive")
        cpu = [statistics.median(row[index] for row in rows if row[0] == lane) for index in (2, 3)]
        print(f"{title:32} {middle:5.2f}   {low:.2f} to {high:.2f}   {cpu[0]:.2f}, {cpu[1]:.2f}")


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["serve"]:
            serve(Path(sys.argv[2]), sys.argv[3])
        case ["ask"]:
            ask(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        case _:
            main()
