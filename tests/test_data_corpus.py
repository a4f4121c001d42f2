"""Prepared corpora: written and opened again the same, movable, and refused with the reason when anything contradicts."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.data import IndexedWriter, load_tokenizer, train_bpe
from octavo.data.corpus import PreparedCorpus, write_manifest

BYTE = load_tokenizer("byte")


def write_shard(prefix, tokenizer=BYTE, documents=5):
    with IndexedWriter(prefix, "uint16", tokenizer) as writer:
        for _ in range(documents):
            ids = np.random.randint(1, tokenizer.vocab_size - 1, size=np.random.randint(10, 60))
            writer.add(np.append(ids, tokenizer.eot))


@pytest.fixture
def folder(tmp_path, seed):
    """Two sources with two shards and one, and held-out text."""
    for name, shards in (("web", 2), ("code", 1)):
        for number in range(shards):
            write_shard(tmp_path / "corpus" / f"shards/{name}/train-{number:05}")
        write_shard(tmp_path / "corpus" / f"shards/{name}/validation-00000")
    return tmp_path / "corpus"


def entries():
    return [
        ("web", 0.75, 4.0, ["shards/web/train-00000", "shards/web/train-00001"], ["shards/web/validation-00000"]),
        ("code", 0.25, None, ["shards/code/train-00000"], ["shards/code/validation-00000"]),
    ]


def edit(folder, change):
    path = folder / "corpus.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_folder_without_a_manifest_is_text_or_not_finished(folder, tmp_path):
    (tmp_path / "text").mkdir()
    assert not PreparedCorpus.is_one(tmp_path / "text") and not PreparedCorpus.is_one("demo")
    with pytest.raises(ValueError, match="corpus holds token shards and no corpus.json, which comes last"):
        PreparedCorpus.is_one(folder)


def test_what_is_written_is_opened(folder):
    corpus = write_manifest(folder, BYTE, entries())
    assert PreparedCorpus.is_one(folder) and PreparedCorpus.open(folder) == corpus
    assert (corpus.tokenizer, corpus.vocab_size, corpus.eot) == ("byte", 257, 256)
    web, code = corpus.sources
    assert (web.name, web.weight, web.max_epochs) == ("web", 0.75, 4.0) and code.max_epochs is None
    assert len(web.train) == 2 and web.documents == 10 and web.tokens == sum(shard.count for shard in web.train)
    assert code.validation_tokens == code.validation[0].count
    manifest = json.loads((folder / "corpus.json").read_text())
    assert set(manifest) == {"layout", "tokenizer", "vocab_size", "eot", "sources"}
    assert manifest["layout"] == "octavo-corpus-1"
    assert corpus.load_tokenizer().name == "byte"
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []


def test_a_folder_can_be_moved(folder, tmp_path):
    corpus = write_manifest(folder, BYTE, entries())
    shutil.move(folder, tmp_path / "elsewhere")
    moved = PreparedCorpus.open(tmp_path / "elsewhere")
    assert [s.checksum for s in moved.sources[0].train] == [s.recorded for s in corpus.sources[0].train]


def test_the_tokenizer_of_the_folder_is_checked(folder, tmp_path, seed):
    bpe = train_bpe(["some words to learn from " * 9], 300, folder / "tokenizer.json")
    for name in (
        "web/train-00000",
        "web/train-00001",
        "web/validation-00000",
        "code/train-00000",
        "code/validation-00000",
    ):
        write_shard(folder / "shards" / name, bpe)
    corpus = write_manifest(folder, bpe, entries())
    assert corpus.load_tokenizer().name == bpe.name
    train_bpe(["quite other words " * 9], 290, folder / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the tokenizer of .*corpus\.json: its name is"):
        PreparedCorpus.open(folder).load_tokenizer()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        corpus.load_tokenizer()


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "0.5", None, True])
def test_weights_must_be_positive_numbers(folder, value):
    changed = entries()
    changed[1] = ("code", value, *changed[1][2:])
    with pytest.raises(ValueError, match=r"corpus\.json: weight of source code is .*: it must be a positive number"):
        write_manifest(folder, BYTE, changed)
    assert not (folder / "corpus.json").exists()
    write_manifest(folder, BYTE, entries())
    edit(folder, lambda manifest: manifest["sources"][1].update(weight=value))
    with pytest.raises(ValueError, match="weight of source code"):
        PreparedCorpus.open(folder)


@pytest.mark.parametrize("value", [0, -2, float("nan"), "many"])
def test_epochs_must_be_positive_numbers(folder, value):
    write_manifest(folder, BYTE, entries())
    edit(folder, lambda manifest: manifest["sources"][0].update(max_epochs=value))
    with pytest.raises(ValueError, match="max_epochs of source web is"):
        PreparedCorpus.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(layout="other"), r"corpus\.json does not describe an octavo-corpus-1 folder"),
        (lambda m: m.pop("tokenizer"), "tokenizer of the corpus is None, not a str"),
        (lambda m: m.update(vocab_size="257"), "vocab_size of the corpus is '257', not a int"),
        (lambda m: m.update(eot=257), "vocab_size 257, eot 257"),
        (lambda m: m.update(sources=[]), "0 sources"),
        (lambda m: m.update(sources=["web"]), "a source that is no object"),
        (lambda m: m["sources"][0].pop("name"), "name of a source is None"),
        (lambda m: m["sources"][0].update(name="code"), r"two sources of one name \(code, code\)"),
        (lambda m: m["sources"][0].update(train=[]), "source web has no training shard"),
        (lambda m: m["sources"][0].update(train="shards/web/train-00000"), "train of source web is"),
        (lambda m: m["sources"][0].update(train=[3]), "must be a list of prefixes"),
        (lambda m: m["sources"][0].update(tokens=5), "source web has 5 tokens and its shards hold"),
        (lambda m: m["sources"][1].pop("validation_tokens"), "validation_tokens of source code is None"),
        (lambda m: m["sources"][1].update(train=["shards/code/train-00007"]), r"code/train-00007\.idx cannot be read"),
        (lambda m: m.update(tokenizer="tokenizer.json abc"), r"train-00000\.bin was written with tokenizer byte, and"),
        (lambda m: m.update(vocab_size=300), "was written with vocabulary 257, and .* says 300"),
    ],
)
def test_contradictions_are_named(folder, change, message):
    write_manifest(folder, BYTE, entries())
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        PreparedCorpus.open(folder)


def test_missing_and_broken_files(folder, tmp_path):
    with pytest.raises(ValueError, match=r"corpus\.json cannot be read .*give the folder of a prepared corpus"):
        PreparedCorpus.open(tmp_path)
    (folder / "corpus.json").write_text("{")
    with pytest.raises(ValueError, match=r"corpus\.json cannot be read"):
        PreparedCorpus.open(folder)
    with pytest.raises(ValueError, match=r"train-00009\.idx cannot be read"):
        write_manifest(folder, BYTE, [("web", 1.0, None, ["shards/web/train-00009"], [])])
    other = SimpleNamespace(name="other", vocab_size=257, eot=256)
    with pytest.raises(ValueError, match="was written with tokenizer byte, and .* says other"):
        write_manifest(folder, other, entries())
    assert (folder / "corpus.json").read_text() == "{"


def test_foreign_shards_without_notes_are_taken_at_their_word(folder):
    for path in folder.rglob("*.json"):
        path.unlink()
    corpus = write_manifest(folder, BYTE, entries())
    assert corpus.sources[0].train[0].tokenizer is None and corpus.vocab_size == 257
