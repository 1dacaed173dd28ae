"""The code of the program on the host of an agent. If the host does not have the code, the agent
receives it, unpacks it, and removes it at the end of the run.

The agent unpacks the code into a folder below $TMPDIR. Its folder in memory is for secrets only.
The agent caches no code for later runs, because a cache would need a bound, while sending the code
again takes less than a second.
"""

from __future__ import annotations

import base64
import binascii
import os
import tempfile
import zlib
from pathlib import Path

from zmqdist.errors import OpError
from zmqdist.launch.agent_protocol import (
    AgentEvent,
    CodeReady,
    CodeWanted,
    OfferCode,
    OrderRefused,
    SendCode,
)
from zmqdist.launch.code_bundle import pack, unpack
from zmqdist.launch.folders import RunFolder
from zmqdist.limits import CODE_BYTES_MAX

TAR_BYTES_MAX = 2 * CODE_BYTES_MAX
"""The largest size of an unpacked archive, in bytes. It exceeds CODE_BYTES_MAX, because the archive
also has a header for each file."""


class ReceivedCode:
    """The code of one run on this host.

    Attributes:
      imports: the folders that roles have on their module path. Empty until the code is ready.
    """

    def __init__(self) -> None:
        self.imports: list[str] = []
        self._offer: OfferCode | None = None
        self._data = bytearray()
        self._folder: RunFolder | None = None

    def answer(self, order: OfferCode | SendCode) -> AgentEvent | None:
        """Carry out an order, and return the event that answers it. Return None for each part of
        the code except the last part."""
        try:
            return self._offered(order) if isinstance(order, OfferCode) else self._received(order)
        except (OpError, OSError, ValueError, zlib.error, binascii.Error) as error:
            reason = error.message if isinstance(error, OpError) else str(error)
            return OrderRefused(
                order.order_id, f"the code of the program cannot be unpacked there: {reason}"
            )

    def close(self) -> None:
        """Remove the received code. A second call does nothing."""
        if self._folder is not None:
            os.chdir("/")
            self._folder.close()
            self._folder = None

    def _offered(self, order: OfferCode) -> AgentEvent:
        self._offer, self._data = order, bytearray()
        root = Path(order.root)
        if root.is_dir() and _has_offered_files(root, order):
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
        working = root / self._offer.working
        # The archive contains files only, so it has not made the working directory if no file is
        # below it.
        working.mkdir(parents=True, exist_ok=True)
        os.chdir(working)  # the roles inherit the working directory of the agent
        self.imports = [os.path.normpath(root / folder) for folder in self._offer.imports]
        return CodeReady(order_id, str(root))


def _has_offered_files(root: Path, order: OfferCode) -> bool:
    """Return whether the files below `root` equal the offered files, for example because this host
    shares the launcher's file system."""
    try:
        return pack(root, order.paths).digest == order.digest
    except (OpError, OSError):
        return False
