"""Numbers with a special meaning, as in tf.data."""

from __future__ import annotations

from typing import Final

AUTOTUNE: Final = -1
"""As a number of parallel calls or of elements to prefetch: the operator chooses the number."""

INFINITE_CARDINALITY: Final = -1
"""`Dataset.cardinality` of a dataset without end."""

UNKNOWN_CARDINALITY: Final = -2
"""`Dataset.cardinality` where only reading the dataset would show it."""

SHARD_HINT: Final = -1
"""As `num_shards` of `Dataset.shard`: a data service replaces it by the number of workers (ShardingPolicy.HINT)."""
