"""The model's probabilities sum to one, are those of its formula, and part running text from shuffled words and menus."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from datatrove.data import Document
from prose import navigation, prose, shuffled

from octavo.prepare.ngrams import word_hashes
from octavo.prepare.perplexity import NgramModel, PerplexityFilter, fit, load_perplexity, train_perplexity


def toy(seed, texts=12):
    """Texts over a small vocabulary, with some words that come once."""
    rng = random.Random(seed)
    words = ["the", "cat", "dog", "sees", "a", "big", "red", "house"]
    return [
        [rng.choice(words) if rng.random() < 0.95 else f"rare{rng.randrange(10**9)}" for _ in range(30)]
        for _ in range(texts)
    ]


def fitted(texts):
    return NgramModel(*fit([word_hashes(" ".join(text)) for text in texts]))


class Direct:
    """Interpolated Kneser-Ney by dictionaries, from its definition."""

    def __init__(self, texts):
        counts = Counter(word for text in texts for word in text)
        self.rare = sum(count == 1 for count in counts.values())
        self.vocabulary = {word for word, count in counts.items() if count > 1}
        texts = [["<s>", "<s>", *(self.known(word) for word in text)] for text in texts]
        self.counts = {3: Counter(tuple(text[i - 2 : i + 1]) for text in texts for i in range(2, len(text)))}
        for n in (2, 1):
            self.counts[n] = Counter(gram[1:] for gram in self.counts[n + 1])
        self.discounts, self.totals, self.types = {}, {}, {}
        for n, grams in self.counts.items():
            once, twice = (sum(count == k for count in grams.values()) for k in (1, 2))
            self.discounts[n] = min(max(once / (once + 2 * twice), 0.1), 0.9) if once else 0.5
            self.totals[n], self.types[n] = defaultdict(int), defaultdict(int)
            for gram, count in grams.items():
                self.totals[n][gram[:-1]] += count
                self.types[n][gram[:-1]] += 1

    def known(self, word):
        return word if word in self.vocabulary else "<unk>"

    def p(self, *gram):
        n = len(gram)
        if n == 1:
            lower = 1 / len(self.vocabulary | {"<unk>"})
            kept = sum(max(count - self.discounts[1], 0) for count in self.counts[1].values()) / self.totals[1][()]
            return max(self.counts[1][gram] - self.discounts[1], 0) / self.totals[1][()] + (1 - kept) * lower
        lower, context = self.p(*gram[1:]), gram[:-1]
        if not self.totals[n][context]:
            return lower
        gamma = self.discounts[n] * self.types[n][context] / self.totals[n][context]
        return max(self.counts[n][gram] - self.discounts[n], 0) / self.totals[n][context] + gamma * lower


@pytest.mark.parametrize("seed", range(6))
def test_probabilities_are_those_of_the_formula(seed):
    texts = toy(seed)
    model, direct = fitted(texts), Direct(texts)
    for text in [*texts[:3], *toy(seed + 100, 3)]:
        tokens = ["<s>", "<s>", *map(direct.known, text)]
        wanted = [np.log(direct.p(*tokens[i : i + 3])) for i in range(len(text))]
        wanted = [log_p - np.log(max(1, direct.rare)) * (tokens[i + 2] == "<unk>") for i, log_p in enumerate(wanted)]
        np.testing.assert_allclose(model.log_probabilities(word_hashes(" ".join(text))), wanted, rtol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_unknown_words_share_what_is_left(seed):
    texts = toy(seed)
    model, direct = fitted(texts), Direct(texts)
    assert direct.rare > 5 and model.settings["unknown_words"] == direct.rare
    for start in (["the", "cat"], ["rarest", "dog"], ["never", "seen"], []):
        words = sorted(direct.vocabulary)
        total = sum(np.exp(model.log_probabilities(word_hashes(" ".join([*start, word])))[-1]) for word in words)
        unknown = np.exp(model.log_probabilities(word_hashes(" ".join([*start, "unheardof"])))[-1])
        assert total + direct.rare * unknown == pytest.approx(1, abs=1e-5)
        tokens = ["<s>", "<s>", *map(direct.known, [*start, "unheardof"])]
        assert unknown * direct.rare == pytest.approx(direct.p(*tokens[-3:]), rel=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of every other document of the reference text, and the others."""
    folder = tmp_path_factory.mktemp("model")
    return folder, train_perplexity(prose()[::2], folder), prose()[1::2]


def test_running_text_is_told_from_shuffled_words_and_menus(trained):
    folder, settings, others = trained
    model = load_perplexity(str(folder))
    real = np.array([model.score(text) for text in others])
    mixed = np.array([model.score(shuffled(text, seed)) for seed, text in enumerate(others)])
    menus = np.array([model.score(navigation(seed)) for seed in range(20)])
    assert (mixed > real).all()
    assert menus.min() > np.quantile(real, 0.99)
    step = PerplexityFilter(folder, 0.95)
    kept = np.array([step.filter(Document(text, "0")) is True for text in others])
    assert kept.mean() > 0.8
    assert all(step.filter(Document(navigation(seed), "0")) == (False, "perplexity") for seed in range(20))
    assert np.mean([step.filter(Document(shuffled(text, 1), "0")) is True for text in others]) < 0.2


def test_quantiles_are_those_of_held_out_text(trained):
    folder, settings, others = trained
    assert settings["held_out_segments"] >= 10 and len(settings["percentiles"]) == 101
    assert settings["percentiles"] == sorted(settings["percentiles"])
    assert PerplexityFilter(folder, 0.5).limit < PerplexityFilter(folder, 0.95).limit


def test_training_is_deterministic(trained, tmp_path):
    folder, settings, _ = trained
    assert train_perplexity(iter(prose()[::2]), tmp_path) == settings
    first, again = (np.load(path / "perplexity.npz") for path in (folder, tmp_path))
    assert all((first[name] == again[name]).all() for name in first.files)


def test_texts_without_words_and_kinds(trained):
    step = PerplexityFilter(trained[0])
    assert step.filter(Document("... --", "0")) == (False, "perplexity")
    document = Document(navigation(1), "0", metadata={"kind": "code"})
    assert step.filter(document) is True and "perplexity" not in document.metadata


def test_filter_is_copied_and_sent_to_other_processes(trained):
    step = PerplexityFilter(trained[0])
    for other in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert other.reason(Document(navigation(1), "0")) == "perplexity"
    assert len(pickle.dumps(step)) < 10_000  # the model is loaded where it is used


def test_what_is_no_model(trained, tmp_path):
    with pytest.raises(ValueError, match="perplexity.json does not exist"):
        PerplexityFilter(tmp_path)
    (tmp_path / "perplexity.json").write_bytes((trained[0] / "perplexity.json").read_bytes())
    np.savez(tmp_path / "perplexity.npz", keys1=np.arange(3, dtype=np.uint64))
    with pytest.raises(ValueError, match="perplexity.npz holds no perplexity model"):
        PerplexityFilter(tmp_path)
    with pytest.raises(ValueError, match="the reference text of the perplexity filter has 0 words"):
        train_perplexity([], tmp_path)
