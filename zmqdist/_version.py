"""The version, in the one place from which setup.cfg and the hello read it."""

__version__ = "0.1.0"
