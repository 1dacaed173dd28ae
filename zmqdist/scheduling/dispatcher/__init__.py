"""The dispatcher: its decisions (broker.py: membership and dispatch together), and its server (runtime.py)."""
