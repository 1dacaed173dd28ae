"""Checkpoints: save variables to a folder and restore them, into any number of shards.

    zd.checkpoint.save("model", variables)
    zd.checkpoint.restore("model", variables)

    checkpoint = zd.checkpoint.Checkpoint(model=variables, epoch=0)
    with zd.checkpoint.CheckpointManager(checkpoint, "checkpoints", every_s=60) as manager:
        manager.restore_or_initialize()

docs/checkpoints.md says how to use this module. training/checkpoint/manifest.py describes the files
on disk.
"""

from zmqdist.training.checkpoint.checkpoint_iterator import checkpoints_iterator, latest_checkpoint
from zmqdist.training.checkpoint.manager import CheckpointManager
from zmqdist.training.checkpoint.objects import Checkpoint
from zmqdist.training.checkpoint.recovery import Recovered, Recovery, RecoverySnapshot
from zmqdist.training.checkpoint.save_restore import load, restore, save

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Recovered",
    "Recovery",
    "RecoverySnapshot",
    "checkpoints_iterator",
    "latest_checkpoint",
    "load",
    "restore",
    "save",
]
__dir__ = __all__.copy  # dir() and completion show no other names
