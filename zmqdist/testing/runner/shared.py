"""`manager`: objects that the parent and the tasks of a run share, as the standard library's
`multiprocessing.Manager` makes them.

The objects are in a separate process. The first call of `manager` starts this process. The process
ends when its parent ends, because its standard input is then closed. Each access to an object is a
request to the separate process, which is quick enough for tests.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.managers import SyncManager

from zmqdist.child_command import child_command, path_variable

_lock = threading.Lock()
_manager: SyncManager | None = None
_process: subprocess.Popen[str] | None = None


def manager() -> SyncManager:
    """Return the manager of this process, whose methods make shared objects: `.Value`, `.list`,
    `.dict`, `.Queue`, `.Event`, ... These objects may be arguments of tasks.

    >>> numbers = zd.testing.manager().list()
    >>> spec = zd.testing.create_cluster_spec(num_workers=2)
    >>> _ = zd.testing.run(lambda numbers: numbers.append(1), spec, args=(numbers,))
    >>> list(numbers)
    [1, 1]
    """
    global _manager, _process
    with _lock:
        if _manager is None:
            _process = subprocess.Popen(
                child_command("zmqdist.testing.runner.shared"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **path_variable()},
                start_new_session=True,
            )
            assert _process.stdin is not None
            assert _process.stdout is not None
            authkey = bytes(multiprocessing.current_process().authkey)
            print(authkey.hex(), file=_process.stdin, flush=True)
            host, port = json.loads(_process.stdout.readline())
            _manager = SyncManager((host, port), authkey)
            _manager.connect()
            atexit.register(end_manager)
        return _manager


def end_manager() -> None:
    """End the process of the manager and thereby its objects. A second call does nothing; the next
    `manager()` starts a new process."""
    global _manager, _process
    with _lock:
        process, _process, _manager = _process, None, None
        if process is not None:
            atexit.unregister(end_manager)
            # `communicate` closes the standard input, and the process then ends
            process.communicate()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Serve the objects until standard input is closed."""
    authkey = bytes.fromhex(sys.stdin.readline())
    multiprocessing.current_process().authkey = authkey
    server = SyncManager(("127.0.0.1", 0), authkey).get_server()
    threading.Thread(target=_end_with_parent, name="zmqdist-lifeline", daemon=True).start()
    print(json.dumps(server.address), flush=True)
    server.serve_forever()
