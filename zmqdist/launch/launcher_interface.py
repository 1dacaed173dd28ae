"""The interface of launchers. A launcher places roles on hosts and starts them there.

A *role* is a worker or a task of a cluster (`roles.py`). A launcher starts roles, knows the host of
each role, passes on its output, reports its end, and stops all roles. Its constructor gets a
function `on_exit`, which it calls with each role that has ended. `tasks.py` decides for all
launchers which roles run and whether a role is restarted.

Promises, which `tests/launch/conformance.py` checks for each launcher:
  R1  `start_role` returns at once. `on_exit` is called exactly once for each started role, even if
      the role could not be started.
  R2  `on_line` is called once for each line of output, in order, and for the last line before
      `on_exit`.
  R3  When `close` has returned, no role runs on any host that can be reached, and `on_exit` was
      called for each role.
  R4  When the launching process ends in any way, even by SIGKILL, its roles end themselves: at once
      if their lifeline breaks, otherwise after `orphan_limit_s`.
  R5  A role has the environment of its host, with the variables that were passed to `start_role`
      added or replaced.

A launcher has these methods:
  start_role(config, environment, on_line): start a role on a host that the launcher chooses, and
      return it. A restarted role stays on its host, unless the host is lost.
  running: the roles that were started and have not ended.
  stranded(name): why no host can run this role any more, and what the user can do; "" if one can.
  release(name): free the place of a role that has ended and is not restarted, so that its host can
      run another role.
  close(grace_s): stop all roles. Each gets SIGTERM, has up to `grace_s` seconds to drain, and then
      gets SIGKILL. A second call does nothing.

A role that a launcher has started has these attributes:
  name: the name of the role, such as "worker:0".
  host: the name of the role's host, as the user wrote it. "" means the host of the launcher.
  pid: the pid of the role on its host. 0 means that the launcher does not know it yet.
  exit_code: in the form of `subprocess`, in which -9 means that SIGKILL ended the process. None
      means that the process runs.
  tail: the last lines of the role's output. If the role could not be started, a sentence that says
      why and what to do.
  ended: an event that is set when the exit code is known, before `on_exit` is called with the role.
  signal(number): send a signal to the role. After the role has ended, this does nothing.

`Children` is the launcher for this host. The other launchers place roles through a `HostAgent`
(agent.py, hosts.py).
"""

from __future__ import annotations

from collections.abc import Callable

LineHandler = Callable[[str], object]
