"""The simulations of the machines: a whole cluster, a data service and single machines, in virtual
time."""
