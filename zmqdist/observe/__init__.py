"""Observation of a running system: a dispatcher's status as tables, benchmarks on this host, and
the checks of the doctor."""
