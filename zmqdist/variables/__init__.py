"""Variables on parameter servers: variable_host.py is the part of the ps, client.py the part of the programs that use the variables."""
