"""Numbers with a special meaning, as in tf.data."""

from __future__ import annotations

from typing import Final

AUTOTUNE: Final = -1
"""A number of parallel calls, or of elements to prefetch, that the operator chooses itself."""

INFINITE_CARDINALITY: Final = -1
"""`Dataset.cardinality` of a dataset without end."""

UNKNOWN_CARDINALITY: Final = -2
"""`Dataset.cardinality` if only reading the dataset would show it."""

SHARD_HINT: Final = -1
"""A value for `num_shards` of `Dataset.shard` that a data service replaces by the number of workers (ShardingPolicy.HINT)."""
