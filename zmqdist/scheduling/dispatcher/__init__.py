"""The dispatcher: its machine (broker.py combines membership and dispatch) and its server
(runtime.py)."""
