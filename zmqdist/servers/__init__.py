"""The servers of a cluster, put together from the queue of functions and the data service."""
