"""A worker: its machine (machine.py), its server (runtime.py), its slots, and the stores of
payloads."""
