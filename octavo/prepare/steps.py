"""What the filters of this package share: a filter that judges documents of some kinds and lets all others pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

KINDS = ("prose", "code", "dialogue", "reference")
"""Kinds of sources: running text; source code; conversations; dictionaries, manuals and tables."""


class KindFilter(BaseFilter):
    """A datatrove filter for documents whose `metadata["kind"]` is in `kinds`; without a kind a document counts as prose."""

    def __init__(self, kinds: Collection[str], exclusion_writer: DiskWriter | None = None) -> None:
        """Raises `ValueError` for a kind that is not in `KINDS`."""
        super().__init__(exclusion_writer)
        if unknown := sorted(set(kinds) - set(KINDS)):
            raise ValueError(f"kind {', '.join(map(repr, unknown))} is unknown: choose from {', '.join(KINDS)}")
        self.kinds = frozenset(kinds)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        if kind_of(doc) not in self.kinds:
            return True
        reason = self.reason(doc)
        return True if reason is None else (False, reason)

    @abstractmethod
    def reason(self, doc: Document) -> str | None:
        """Why `doc` is to be left out, in one word for statistics; None if it is good."""


def kind_of(doc: Document) -> str:
    """The kind of a document, "prose" if it does not say."""
    return str(doc.metadata.get("kind", "prose"))
