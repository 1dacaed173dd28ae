"""Variables on parameter servers: variable_host.py is the side of the ps, client.py that of the programs that use the variables."""
