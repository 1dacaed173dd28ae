"""The dispatcher of the data service: the machine that decides, its runtime, and what both keep on disk."""
