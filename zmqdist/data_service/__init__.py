"""Pipelines that run on other processes: what a dispatcher, a worker and a reader do for it."""
