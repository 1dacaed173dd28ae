"""Child processes: the zygote that forks them, how they are reaped, and the pipe to each of them."""
