"""Cluster resolvers, one file each; `zmqdist.resolvers` exports their names."""
