"""Descriptions of datasets, by fingerprint."""

from __future__ import annotations


class DatasetStore:
    """In memory."""

    def __init__(self, folder: str | None) -> None:
        self._texts: dict[str, str] = {}

    def put(self, id: str, text: str) -> None:
        self._texts[id] = text

    def get(self, id: str) -> str:
        return self._texts[id]

    def path(self, id: str) -> str | None:
        return None
