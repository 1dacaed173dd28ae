"""Variables on parameter servers. variable_host.py runs in the ps, and client.py in the programs
that use the variables."""
