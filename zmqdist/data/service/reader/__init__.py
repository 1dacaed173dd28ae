"""The reader of a distributed dataset: its runtime, and a delivery machine for each guarantee."""
