"""One task of a cluster: its server, the sessions that use the server, and the exchanges with other
tasks."""
