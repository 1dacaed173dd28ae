"""Child processes: the zygote that they are forked from, how they are reaped, and the pipe to each of them."""
