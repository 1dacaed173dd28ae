"""Running a program's functions on other processes: the dispatcher, its workers, and the
coordinator in the program."""
