"""The simulations of a cluster and of a data service. Users import from `zmqdist.testing`."""
