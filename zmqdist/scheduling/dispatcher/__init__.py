"""The dispatcher: its machine (machine.py) and its server
(runtime.py)."""
