"""Child processes: the zygote that forks them, the code that reaps them, and the pipe to each of
them."""
