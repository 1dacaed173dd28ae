"""One task of a cluster: its server, the sessions that use it, and its exchanges with the other tasks."""
