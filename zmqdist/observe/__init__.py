"""Showing things: what a dispatcher says about itself as tables, and what this machine does per second."""
