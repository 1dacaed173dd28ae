"""Measurements of zmqdist and of other systems. Each file answers one question: `python -m
benchmarks NAME`.

The measurements of `zmqdist bench` are in zmqdist/observe/bench.py."""
