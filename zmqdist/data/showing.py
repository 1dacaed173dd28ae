"""A progress bar over a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zmqdist.data.tree import Tree


def progress(dataset: Tree, desc: str | None = None, **options: Any) -> Iterator[Any]:
    """The elements, with a progress bar of tqdm that knows the end where the dataset does.

    Args:
      desc: what stands before the bar.
      options: for `tqdm.auto.tqdm`.

    Raises:
      ImportError: the extra `progress` is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError('a progress bar needs tqdm: pip install "zmqdist[progress]"') from error
    count = dataset.cardinality()
    options = {"unit": " elements", "total": count if count >= 0 else None, **options}
    return iter(tqdm(iter(dataset), desc=desc, **options))
