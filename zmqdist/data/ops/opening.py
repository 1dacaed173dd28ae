"""The node of a dataset in a parallel interleave. The thread that reads the dataset creates and
opens it, while other threads create and open other datasets.

Rules
    The user functions run concurrently, and in any order: the random numbers of a dataset depend on
    the number of its input element (`NumberedNode.inner_context`), and not on which thread is the
    fastest.

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
    """Takes the place of the node of one dataset in a parallel interleave, and creates that node at
    the first read."""

    def __init__(self, make_dataset: Callable[[], DatasetLike], context: Context) -> None:
        """Prepare to open a node. `make_dataset` is not called yet.

        Args:
          make_dataset: a function that returns the dataset.
          context: the context for this dataset alone.
        """
        self._make_dataset = make_dataset
        self._context = context
        self._lock = threading.Lock()
        self._node: OperatorNode | None = None
        self._saved: dict[str, Any] | None = None
        self._failed = False
        self._abandoned = False

    def stream(self) -> Iterator[Any]:
        """Return the generator of the node, as `OperatorNode.stream` does. The first call opens the
        dataset."""
        if self._failed:
            return iter(())
        return self.open().stream()

    def open(self) -> OperatorNode:
        """Return the node. The first call opens it.

        Raises:
          CancelledError: the iterator is being closed.
          Exception: any error of the function, or of opening the dataset.
        """
        if self._node is None:
            try:
                self._node = self._open()
            except BaseException:
                self._failed = True
                raise
            with self._lock:
                abandoned = self._abandoned
            if abandoned:
                # abandon the new node too, because `abandon` was called before it was created
                self._node.abandon()
        return self._node

    def _open(self) -> OperatorNode:
        dataset = self._make_dataset()
        if self._abandoned:
            raise CancelledError("the iterator was closed")
        node = self._context.open(dataset)
        if self._saved is not None:
            node.load_state_dict(self._saved)
        return node

    def restart(self) -> None:
        """Restart the node if it exists, as `OperatorNode.restart` does."""
        if self._node is not None:
            self._node.restart()

    def abandon(self) -> None:
        """Interrupt a blocking call of the node, as `OperatorNode.abandon` does."""
        with self._lock:
            self._abandoned = True
            node = self._node
        if node is not None:
            node.abandon()

    def close(self) -> None:
        """Close the node if it exists, as `OperatorNode.close` does."""
        if self._node is not None:
            self._node.close()

    def state_dict(self) -> dict[str, Any]:
        """Return whether opening the node has failed ("over"), and the state of the node ("node"),
        which is None until the node is open."""
        return {"over": self._failed, "node": self._node and self._node.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned. Opens the node, unless the state says
        that opening it has failed."""
        self._failed, self._saved = state["over"], state["node"]
        if not self._failed:
            self.open()
