"""The version. setup.cfg and the hello read it from this module."""

__version__ = "0.1.0"
