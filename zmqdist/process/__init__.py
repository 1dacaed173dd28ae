"""Child processes of a worker: the template that they are forked from, and the pipe to each of them."""
