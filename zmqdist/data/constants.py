"""The numbers with a meaning, as in tf.data."""

from __future__ import annotations

from typing import Final

AUTOTUNE: Final = -1
"""As a number of parallel calls or of prefetched elements: the operator chooses."""

INFINITE_CARDINALITY: Final = -1
"""What `Dataset.cardinality` says of a dataset without an end."""

UNKNOWN_CARDINALITY: Final = -2
"""What `Dataset.cardinality` says where only reading would tell."""

SHARD_HINT: Final = -1
"""As `num_shards` of `Dataset.shard`: a data service puts its numbers here (ShardingPolicy.HINT)."""
