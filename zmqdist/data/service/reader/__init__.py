"""The reader of a distributed dataset: the runtime, and a delivery machine for each kind of
reading."""
