"""The code of the program at the agent of a host: found there, or received, unpacked and removed at the end of the run.

A received bundle lies in a folder of its own below $TMPDIR, not in memory as the secrets do, and is removed with the agent. A cache
would outlive the run and have to be bounded, while code is small beside the data of a cluster: sending it again costs less than a second.
"""

from __future__ import annotations

import base64
import binascii
import os
import tempfile
import zlib
from pathlib import Path

from zmqdist.errors import OpError
from zmqdist.launch.agent_protocol import AgentEvent, CodeReady, CodeWanted, OfferCode, OrderRefused, SendCode
from zmqdist.launch.code_bundle import pack, unpack
from zmqdist.launch.folders import RunFolder
from zmqdist.limits import CODE_BYTES_MAX

TAR_BYTES_MAX = 2 * CODE_BYTES_MAX
"""Bytes of an unpacked archive, which has a header for each of many small files."""


class ReceivedCode:
    """The code of one run on this host.

    Attributes:
      imports: the folders for the module path of roles; empty until there is code.
    """

    def __init__(self) -> None:
        self.imports: list[str] = []
        self._offer: OfferCode | None = None
        self._data = bytearray()
        self._folder: RunFolder | None = None

    def answer(self, order: OfferCode | SendCode) -> AgentEvent | None:
        """Carry out an order; return the event that answers it; None until the last part of the code has come."""
        try:
            return self._offered(order) if isinstance(order, OfferCode) else self._received(order)
        except (OpError, OSError, ValueError, zlib.error, binascii.Error) as error:
            reason = error.message if isinstance(error, OpError) else str(error)
            return OrderRefused(order.order_id, f"the code of the program cannot be unpacked there: {reason}")

    def close(self) -> None:
        """Remove the received code. Idempotent."""
        if self._folder is not None:
            os.chdir("/")
            self._folder.close()
            self._folder = None

    def _offered(self, order: OfferCode) -> AgentEvent:
        self._offer, self._data = order, bytearray()
        root = Path(order.root)
        if root.is_dir() and _is_same(root, order):
            return self._ready(order.order_id, root)
        return CodeWanted(order.order_id)

    def _received(self, order: SendCode) -> AgentEvent | None:
        assert self._offer is not None
        self._data += base64.b64decode(order.data)
        if not order.last:
            return None
        unpacking = zlib.decompressobj()
        archive = unpacking.decompress(bytes(self._data), TAR_BYTES_MAX)
        self._data = bytearray()
        self.close()
        self._folder = RunFolder(Path(tempfile.gettempdir()))
        root = self._folder.path / self._offer.digest[:16]
        root.mkdir()
        unpack(archive, self._offer.digest, root)
        return self._ready(order.order_id, root)

    def _ready(self, order_id: int, root: Path) -> CodeReady:
        assert self._offer is not None
        os.chdir(root)  # the roles of this agent inherit it
        self.imports = [os.path.normpath(root / folder) for folder in self._offer.imports]
        return CodeReady(order_id, str(root))


def _is_same(root: Path, order: OfferCode) -> bool:
    """Return whether this host has the same files in the same place, because it shares the file system."""
    try:
        return pack(root, order.paths).digest == order.digest
    except (OpError, OSError):
        return False
