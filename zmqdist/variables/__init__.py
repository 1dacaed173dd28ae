"""Variables that live in the processes of parameter servers: the ps's end (host.py) and the end of whoever uses them (client.py)."""
