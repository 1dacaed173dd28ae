"""The dispatcher of the data service: its machine, its runtime, and their files (the journal and
the descriptions of datasets)."""
