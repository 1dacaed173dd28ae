"""A dataset of interleave that is made and opened where it is read: in a thread of its own, while others open theirs.

Rules
    The functions run at once. The nodes are opened in the order of the inputs where elements keep their order: the n-th iterator over one
    dataset object has the n-th order of its shuffle, and which is the n-th must not depend on threads.

    What cannot be opened gives its error once, and then nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from zmqdist.data.interfaces import DatasetLike
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.errors import CancelledError


class DeferredNode:
    """Stands in a node's place, and makes it at the first read.

    Attributes:
      opened: set when it has been opened, or never will be.
    """

    def __init__(
        self, make_dataset: Callable[[], DatasetLike], context: Context, previous: threading.Event | None
    ) -> None:
        """
        Args:
          made: makes the dataset.
          before: `opened` of the one that is opened before this one.
        """
        self._make_dataset = make_dataset
        self._context = context
        self._previous = previous
        self._lock = threading.Lock()
        self._node: OperatorNode | None = None
        self._saved: dict[str, Any] | None = None
        self._failed = False
        self._abandoned = False
        self.opened = threading.Event()

    def stream(self) -> Iterator[Any]:
        """As `OperatorNode.stream`; the first call opens the dataset."""
        if self._failed:
            return iter(())
        return self.open().stream()

    def open(self) -> OperatorNode:
        """The node. Raises what the function raised, and CancelledError where the iterator is being closed."""
        if self._node is None:
            try:
                self._node = self._open()
            except BaseException:
                self._failed = True
                raise
            finally:
                self._previous = None
                self.opened.set()
            with self._lock:
                abandoned = self._abandoned
            if abandoned:  # it came too late to hear of it
                self._node.abandon()
        return self._node

    def _open(self) -> OperatorNode:
        dataset = self._make_dataset()
        if self._previous is not None:
            self._previous.wait()
        if self._abandoned:
            raise CancelledError("the iterator was closed")
        node = self._context.inner().open(dataset)
        if self._saved is not None:
            node.load_state_dict(self._saved)
        return node

    def restart(self) -> None:
        """As `OperatorNode.restart`."""
        if self._node is not None:
            self._node.restart()

    def abandon(self) -> None:
        """As `OperatorNode.abandon`; those that are to be opened behind this one do not wait for it any more."""
        with self._lock:
            self._abandoned = True
            node = self._node
        self.opened.set()
        if node is not None:
            node.abandon()

    def close(self) -> None:
        """As `OperatorNode.close`."""
        if self._node is not None:
            self._node.close()

    def state_dict(self) -> dict[str, Any]:
        """The node's state, None before it is opened."""
        return {"over": self._failed, "node": self._node and self._node.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Open it and go on where `state_dict` was called."""
        self._failed, self._saved = state["over"], state["node"]
        if self._failed:
            self.opened.set()
        else:
            self.open()
