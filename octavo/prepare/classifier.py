"""Keep-like-reference filter: a linear classifier that tells reference text from other text, as GPT-3's and LLaMA's did.

A text becomes a vector x of 2^18 numbers: each word and each pair of words adds to the place that its hash names (Weinberger et
al. 2009), and places hold the square root of their count, divided by the square root of the number of all words and pairs, so
that |x| = 1 up to collisions. Logistic regression (scikit-learn, by L-BFGS, which is deterministic) finds w
and b with σ(w·x + b) the probability that the text is reference text; both classes weigh the same however many texts they have.
The score of a long text is the mean of w·x + b over segments of the length that it was trained on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from octavo.prepare.ngrams import ngram_hashes, word_hashes
from octavo.prepare.reference import SEGMENT, limit_at, load_model, percentiles, save_model, segments, split_held_out
from octavo.prepare.steps import KindFilter

BITS = 18
VERSION = 1
MOST_WORDS = 10_000_000
"""Words of either class that are read."""
PENALTY = 10.0
"""scikit-learn's C: how much the training texts weigh against small weights."""


def train_classifier(positives: Iterable[str], negatives: Iterable[str], out: str | Path) -> dict[str, Any]:
    """Trains on reference text (`positives`) and text as it comes (`negatives`); writes the model into the folder `out`.

    Returns its settings, with "accuracy" on the held-out tenth of both, each class weighing one half. Raises `ValueError` if
    there is too little text.
    """
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    good, good_held_out = split_held_out(segments(positives, MOST_WORDS), "reference text of the classifier")
    other, other_held_out = split_held_out(
        segments(negatives, MOST_WORDS), "text that the classifier tells from the reference"
    )
    vectors = [features(words) for words in good + other]
    bounds = np.cumsum([0] + [len(places) for places, _ in vectors])
    data = np.concatenate([values for _, values in vectors]), np.concatenate([places for places, _ in vectors]), bounds
    matrix = csr_matrix(data, shape=(len(vectors), 1 << BITS))
    labels = np.repeat([1, 0], [len(good), len(other)])
    fitted = LogisticRegression(C=PENALTY, class_weight="balanced", max_iter=300).fit(matrix, labels)
    arrays = {"weights": fitted.coef_[0].astype(np.float32), "bias": fitted.intercept_.astype(np.float32)}
    model = LinearModel(arrays, {})
    kept = [model.score_words(words) for words in good_held_out]
    dropped = [model.score_words(words) for words in other_held_out]
    settings = {
        "format": f"octavo-classifier-{VERSION}",
        "positive_segments": len(good),
        "negative_segments": len(other),
        "accuracy": round((float(np.mean(np.array(kept) > 0)) + float(np.mean(np.array(dropped) <= 0))) / 2, 4),
        "percentiles": percentiles(kept),
    }
    save_model(Path(out), "classifier", arrays, settings)
    return settings


class ClassifierFilter(KindFilter):
    """Drops documents that score less than the reference text does at `quantile`. Adds "reference_score" to the metadata."""

    name = "classifier"

    def __init__(
        self,
        model: str | Path,
        quantile: float = 0.05,
        kinds: Collection[str] = ("prose",),
        exclusion_writer: DiskWriter | None = None,
    ) -> None:
        """`model`: a folder that `train_classifier` wrote. Raises `ValueError` if it holds no such model."""
        super().__init__(kinds, exclusion_writer)
        self.model = str(model)
        self.limit = limit_at(load_classifier(self.model).settings, quantile)

    def reason(self, doc: Document) -> str | None:
        score = load_classifier(self.model).score(doc.text)
        doc.metadata["reference_score"] = round(score, 4)
        return None if score >= self.limit else "unlike_reference"


@lru_cache(maxsize=2)
def load_classifier(folder: str) -> LinearModel:
    """The model in a folder, loaded once per process. Raises `ValueError` naming a file that is missing or damaged."""
    arrays, settings = load_model(folder, "classifier", VERSION)
    if {name: array.shape for name, array in arrays.items()} != {"weights": (1 << BITS,), "bias": (1,)}:
        raise ValueError(
            f"{Path(folder) / 'classifier.npz'} holds no classifier of {1 << BITS:,} weights: train it again"
        )
    return LinearModel(arrays, settings)


class LinearModel:
    """Weights of the places, float32 [2^BITS], and a bias."""

    def __init__(self, arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
        self.weights, self.bias = arrays["weights"], float(arrays["bias"][0])
        self.settings = settings

    def score(self, text: str) -> float:
        """Log odds of being reference text, the mean over the segments of `text`; minus infinity without words."""
        words = word_hashes(text)
        parts = [words[start : start + SEGMENT] for start in range(0, len(words), SEGMENT)]
        sizes = [len(part) for part in parts]
        return float(np.average([self.score_words(part) for part in parts], weights=sizes)) if parts else float("-inf")

    def score_words(self, words: np.ndarray) -> float:
        places, values = features(words)
        return float(self.weights[places] @ values) + self.bias


def features(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places int64 [k], values float32 [k]) of the vector of a text of n ≥ 1 words; its length is 1."""
    hashes = np.concatenate([words, ngram_hashes(words, 2)])
    places, counts = np.unique((hashes >> np.uint64(64 - BITS)).astype(np.int64), return_counts=True)
    return places, np.sqrt(counts / len(hashes)).astype(np.float32)
