"""Distributed snapshots: all workers together compute a pipeline once, and write its elements into
a folder."""
