"""One module a system: what is measured, in a process of its own, in a Python of its own where its packages want one."""
