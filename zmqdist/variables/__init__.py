"""Variables in the processes of parameter servers: variable_host.py is the end of the ps, client.py that of the programs that use them."""
