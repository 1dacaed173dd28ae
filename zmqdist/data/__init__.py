"""The data service's names. Its dispatcher and workers are those that schedule functions: one broker for both."""

from zmqdist.data import service

__all__ = ["service"]
