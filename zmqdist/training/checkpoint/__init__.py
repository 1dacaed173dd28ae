"""Checkpoints of variables on disk. Users import from `zmqdist.checkpoint`."""
