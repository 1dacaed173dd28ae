"""The dispatcher: its machine (broker.py puts membership and dispatch together) and its server (runtime.py)."""
