"""Observing a running system: a dispatcher's status as tables, benchmarks of this machine, and the checks of the doctor."""
