"""Functions that run elsewhere: the dispatcher, its workers, and the coordinator of a program."""
