"""A worker: its decisions (machine.py), its server (runtime.py), and what runs functions in threads and processes."""
