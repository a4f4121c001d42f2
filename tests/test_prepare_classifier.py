"""The classifier keeps text like its reference and drops text like what it was told apart from."""

from __future__ import annotations

import numpy as np
import pytest
from datatrove.data import Document
from prose import code, navigation, prose

from octavo.prepare.classifier import ClassifierFilter, features, load_classifier, train_classifier
from octavo.prepare.ngrams import word_hashes


def negatives():
    return [*(text for _, text in code()[:12]), *(navigation(seed, 300) for seed in range(100))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, train_classifier(prose()[::2], negatives(), folder)


def test_text_like_the_reference_is_kept_and_other_text_dropped(trained):
    folder, settings = trained
    assert settings["accuracy"] > 0.9
    model = load_classifier(str(folder))
    good = np.array([model.score(text) for text in prose()[1::2]])
    bad = {
        "code": [model.score(text) for _, text in code()[40:70]],
        "menus": [model.score(navigation(seed)) for seed in range(1000, 1020)],
    }
    for name, scores in bad.items():
        # share of pairs in the right order
        assert np.mean(good[:, None] > np.array(scores)) > 0.99, name
    step = ClassifierFilter(folder, 0.05)
    assert np.mean([step.filter(Document(text, "0")) is True for text in prose()[1::2]]) > 0.85
    assert all(
        step.filter(Document(navigation(seed), "0")) == (False, "unlike_reference") for seed in range(1000, 1020)
    )


def test_quantiles_move_the_limit(trained):
    folder, settings = trained
    limits = [ClassifierFilter(folder, quantile).limit for quantile in (0, 0.05, 0.5, 1)]
    assert limits == sorted(limits) and limits[0] == settings["percentiles"][0]
    assert ClassifierFilter(folder).filter(Document("", "0")) == (False, "unlike_reference")
    assert ClassifierFilter(folder).filter(Document("", "0", metadata={"kind": "code"})) is True


def test_training_is_deterministic(trained, tmp_path):
    folder, settings = trained
    assert train_classifier(iter(prose()[::2]), iter(negatives()), tmp_path) == settings
    first, again = (np.load(path / "classifier.npz") for path in (folder, tmp_path))
    assert (first["weights"] == again["weights"]).all()


def test_vectors_have_length_one_and_do_not_depend_on_the_length_of_the_text():
    words = word_hashes(" ".join(prose()[0].split()[:50]))
    places, values = features(words)
    assert np.sum(values.astype(np.float64) ** 2) == pytest.approx(1, abs=1e-5)
    assert len(np.unique(places)) == len(places)
    doubled, more = features(np.concatenate([words, words]))
    assert np.sum(more.astype(np.float64) ** 2) == pytest.approx(1, abs=1e-5)
    assert len(features(words[:1])[0]) == 1


def test_a_long_text_scores_as_its_segments_do(trained):
    model = load_classifier(str(trained[0]))
    text = " ".join(prose()[0].split())
    words = word_hashes(text)
    part = words[:250]
    repeated = " ".join([" ".join(f"{i}" for i in range(250))] * 8)
    assert model.score(repeated) == pytest.approx(model.score_words(word_hashes(repeated)[:250]), rel=1e-5)
    assert np.isfinite(model.score_words(part))


def test_what_is_no_model(trained, tmp_path):
    with pytest.raises(ValueError, match="classifier.json does not exist"):
        ClassifierFilter(tmp_path)
    (tmp_path / "classifier.json").write_bytes((trained[0] / "classifier.json").read_bytes())
    np.savez(tmp_path / "classifier.npz", weights=np.zeros(3), bias=np.zeros(1))
    with pytest.raises(ValueError, match="holds no classifier of 262,144 weights"):
        ClassifierFilter(tmp_path)
    with pytest.raises(ValueError, match="the text that the classifier tells from the reference has"):
        train_classifier(prose(), ["few words"], tmp_path)
