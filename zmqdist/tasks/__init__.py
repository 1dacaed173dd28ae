"""One task of a cluster: its server, sessions with it, and its exchanges with the other tasks."""
