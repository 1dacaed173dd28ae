"""The coordinator of a program: it schedules functions, holds their values and ends rounds."""
