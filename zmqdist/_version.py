"""The version of zmqdist, which setup.cfg and all other modules read from here."""

__version__ = "0.1.0"
