"""The coordinator of a program: it schedules functions, keeps their values and ends their rounds."""
