"""Child processes: the zygote that a starting process forks them from, the template of a worker, and the pipe to each of them."""
