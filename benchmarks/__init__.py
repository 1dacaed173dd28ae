"""Measurements, one file a question: `python -m benchmarks NAME`. What `zmqdist bench` needs is in zmqdist/observe/bench.py."""
