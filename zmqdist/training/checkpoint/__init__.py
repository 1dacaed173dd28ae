"""Checkpoints on the disk; `zmqdist.checkpoint` has what users call."""
