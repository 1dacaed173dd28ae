"""Distributed snapshots: a pipeline computed once, by all workers, into a folder."""
