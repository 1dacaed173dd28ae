"""One file a question; `python -m benchmarks` lists them, `python -m benchmarks NAME` answers one and prints JSON with --json."""
