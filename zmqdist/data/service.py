"""Dispatcher and workers under the names of the data service."""

from zmqdist.dispatch.server import DispatcherConfig, DispatchServer
from zmqdist.dispatch.worker import WorkerConfig, WorkerServer

__all__ = ["DispatchServer", "DispatcherConfig", "WorkerConfig", "WorkerServer"]
