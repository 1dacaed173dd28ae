"""A dataset of interleave that is created and opened by the thread that reads it, while other threads open theirs.

Rules
    The user functions run concurrently. If elements keep their order, the nodes are opened in the order of the inputs: the n-th iterator
    over a dataset object has the n-th order of its shuffle, and which iterator is the n-th must not depend on threads.

    A dataset that cannot be opened raises its error once, and then ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from zmqdist.data.interfaces import DatasetLike
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.errors import CancelledError


class DeferredNode:
    """Takes the place of a node, and creates it at the first read.

    Attributes:
      opened: set once the node has been opened, or never will be.
    """

    def __init__(
        self, make_dataset: Callable[[], DatasetLike], context: Context, previous: threading.Event | None
    ) -> None:
        """Prepare to open a node; nothing is called yet.

        Args:
          make_dataset: returns the dataset.
          previous: the event `opened` of the node that has to be opened before this one; None: any order.
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
        """See `OperatorNode.stream`. The first call opens the dataset."""
        if self._failed:
            return iter(())
        return self.open().stream()

    def open(self) -> OperatorNode:
        """Return the node; the first call opens it.

        Raises:
          CancelledError: the iterator is being closed. Any error of the function, or of opening its dataset.
        """
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
            if abandoned:  # `abandon` was called before the node existed
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
        """See `OperatorNode.restart`."""
        if self._node is not None:
            self._node.restart()

    def abandon(self) -> None:
        """See `OperatorNode.abandon`. Nodes that are to be opened after this one no longer wait for it."""
        with self._lock:
            self._abandoned = True
            node = self._node
        self.opened.set()
        if node is not None:
            node.abandon()

    def close(self) -> None:
        """See `OperatorNode.close`."""
        if self._node is not None:
            self._node.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the node, or None for a node that is not opened yet."""
        return {"over": self._failed, "node": self._node and self._node.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Open the node and continue from a state that `state_dict` returned."""
        self._failed, self._saved = state["over"], state["node"]
        if self._failed:
            self.opened.set()
        else:
            self.open()
