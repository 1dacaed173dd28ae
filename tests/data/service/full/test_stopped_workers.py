"""Task processes of a worker that is stopped (SIGSTOP) for longer than its lease."""

from __future__ import annotations

import signal

from tests.data.service.helpers import Service, until
from tests.data.service.worker.test_task_process import READ_ALL, process_of, worker_process
from zmqdist.data.dataset import Dataset
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.transport.memory_limits import is_alive


def test_resumed_worker_reports_no_crash() -> None:
    with (
        DispatchServer(DispatcherConfig(lease_s=3.0)) as dispatcher,
        worker_process(dispatcher) as worker,
    ):
        service = Service(dispatcher, [])
        with iter(service.dealt(Dataset.range(READ_ALL).repeat().map(process_of))) as iterator:
            child = int(next(iterator))
            worker.signal(signal.SIGSTOP)
            until(lambda: not is_alive(child), "the end of the child")
            worker.signal(signal.SIGCONT)
            while (later := int(next(iterator))) == child:
                pass
            assert is_alive(later)
