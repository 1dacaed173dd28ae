"""Numbers with a special meaning, as in tf.data."""

from __future__ import annotations

from typing import Final

AUTOTUNE: Final = -1
"""If it is passed as a number of parallel calls, of datasets that `interleave` has open, or of
elements to prefetch, the operator chooses the number."""

INFINITE_CARDINALITY: Final = -1
"""`Dataset.cardinality` of a dataset without end."""

UNKNOWN_CARDINALITY: Final = -2
"""`Dataset.cardinality` of a dataset whose length is unknown until it is read."""

SHARD_HINT: Final = -1
"""A value for `num_shards` and `index` of `Dataset.shard`. With ShardingPolicy.HINT, a data service
replaces it by the number of workers and the index of the worker."""
