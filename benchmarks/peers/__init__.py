"""The systems that are measured, one module for each. A system runs in a process of its own, and in
a Python of its own if its packages need it."""
