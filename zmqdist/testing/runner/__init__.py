"""The runners of zmqdist.testing: they run functions of a test in processes, one for each task of a
cluster.

runner.py        MultiProcessRunner and run: run a function once in every task
pool.py          MultiProcessPoolRunner: processes that stay alive between functions
process_pool.py  ProcessCrew, which both use: the processes, their environment, their pipes and
their output
barrier.py       get_barrier: tasks wait for each other; the parent counts them
task_pipe.py     messages between the parent and the process of one task
child.py         the program of a task's process: `python -m zmqdist.testing.runner.child`
ports.py         create_cluster_spec: addresses whose ports stay free until a task listens there
in_process.py    create_in_process_cluster: the servers of a cluster in this process
shared.py        manager: objects that the parent and the tasks share
"""
