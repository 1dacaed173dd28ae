"""Dispatcher and workers under the names of the data service."""

from zmqdist.dispatch.config import DispatcherConfig, WorkerConfig
from zmqdist.dispatch.server import DispatchServer
from zmqdist.dispatch.worker import WorkerServer

__all__ = ["DispatchServer", "DispatcherConfig", "WorkerConfig", "WorkerServer"]
