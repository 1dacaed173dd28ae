"""Functions of a test in processes of their own, one for each task of a cluster; the names are those of zmqdist.testing.

runner.py        MultiProcessRunner and run: one function, once, in every task
pool.py          MultiProcessPoolRunner: processes that stay for the next function
process_pool.py  what both share: the processes, their lines, their output, their environment
barrier.py       get_barrier: tasks wait for each other; the parent counts them
task_pipe.py     messages between the parent and one process
child.py         a process: `python -m zmqdist.testing.runner.child`
ports.py         create_cluster_spec: addresses whose ports stay free until a task listens there
in_process.py    create_in_process_cluster: the servers of a cluster in this process
shared.py        manager: objects that parent and tasks share
"""
