"""Tokenizers and shards: lossless, cached under their content, complete or absent."""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import pytest

from octavo.data import IndexedShard, load_tokenizer, prepare, train_bpe
from octavo.data.long_texts import PIECE_CHARACTERS
from octavo.data.tokens import SPLITS, is_held_out

TEXTS = ["plain", "Ünïcödé 漢字 🙂", "tabs\tand\nlines\n", "a<|endoftext|>b", "1234567", " "]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    return train_bpe(["the quick brown fox jumps over the lazy dog 12345 " * 3, "naïve"] * 20, 280, path), path


@pytest.fixture
def corpus(tmp_path):
    """A folder of 200 documents and a place for shards."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(200):
        (folder / f"{i:03}.txt").write_text(f"Document {i}: " + f"word{i} " * (i % 7 + 1))
    return folder, tmp_path / "cache"


def documents_of(shard: IndexedShard, tokenizer) -> list[str]:
    ends = np.flatnonzero(np.asarray(shard.tokens) == shard.eot)
    assert ends[-1] == shard.count - 1
    return [tokenizer.decode(part.tolist()) for part in np.split(np.asarray(shard.tokens), ends[:-1] + 1)]


# --- tokenizers


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_every_text_decodes_to_itself(kind, bpe):
    tokenizer = load_tokenizer("byte") if kind == "byte" else bpe[0]
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.eot not in ids and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.eot]) == ""


def test_byte_tokenizer_drops_what_is_no_byte():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([72, 105, 256, 300, 33]) == "Hi!"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_trained_bpe_compresses_and_is_named_by_its_file(bpe):
    tokenizer, path = bpe
    assert tokenizer.vocab_size == 280
    (ids,) = tokenizer.encode_batch(["the quick brown fox"])
    assert len(ids) < 19
    assert load_tokenizer(path).name == load_tokenizer(path.parent).name == tokenizer.name
    other = path.parent / "other.json"
    other.write_bytes(path.read_bytes() + b"\n")
    assert load_tokenizer(other).name != tokenizer.name
    assert [p.name for p in path.parent.iterdir() if "partial" in p.name] == []


def test_bpe_keeps_numbers_in_groups_of_three(tmp_path):
    tokenizer = train_bpe(["123456"] * 50, 400, tmp_path / "t.json")
    (ids,) = tokenizer.encode_batch(["123456"])
    assert [tokenizer.decode([i]) for i in ids.tolist()] == ["123", "456"]


def test_tokenizer_errors(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\): give 'byte' or the path"):
        load_tokenizer(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is no tokenizer\.json"):
        load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="vocab_size=256 is too small"):
        train_bpe(["x"], 256, tmp_path / "t.json")


def test_tokenizer_without_end_of_text(tmp_path, bpe):
    state = json.loads(bpe[1].read_text())
    state["added_tokens"] = []
    state["model"]["vocab"]["!eot"] = state["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "t.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="has no end-of-text token: looked for"):
        load_tokenizer(tmp_path / "t.json")


# --- shards


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_prepare_keeps_every_document_on_one_side(corpus, bpe, kind):
    folder, cache = corpus
    tokenizer = load_tokenizer("byte") if kind == "byte" else bpe[0]
    result = prepare(folder, tokenizer, cache, validation=0.2)
    train, held_out = (documents_of(shard, tokenizer) for shard in result)
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    assert train == [text for text in texts if not is_held_out(text, 0.2)]
    assert held_out == [text for text in texts if is_held_out(text, 0.2)]
    assert 15 < len(held_out) < 70
    for shard in result:
        shard.verify()
        assert shard.dtype == "uint16" and not shard.tokens.flags.writeable
        assert (shard.tokenizer, shard.vocab_size, shard.eot) == (tokenizer.name, tokenizer.vocab_size, tokenizer.eot)
        ends = np.flatnonzero(np.asarray(shard.tokens) == tokenizer.eot) + 1
        assert shard.offsets.tolist() == [0, *ends.tolist()]


def test_held_out_choice_depends_on_the_text_alone(seed):
    texts = [f"{seed} {i}" for i in range(4000)]
    held = {share: {t for t in texts if is_held_out(t, share)} for share in (0.01, 0.1)}
    assert held[0.01] < held[0.1]
    assert 0.08 < len(held[0.1]) / 4000 < 0.12


def test_large_vocabularies_take_four_bytes(corpus):
    folder, cache = corpus

    class Wide:
        name, vocab_size, eot = "wide", 100_000, 99_999

        def encode_batch(self, texts):
            return [np.full(len(text), 90_000) for text in texts]

        def decode(self, ids):
            return ""

    shard = prepare(folder, Wide(), cache).train
    assert shard.dtype == "int32" and set(np.unique(shard.tokens)) == {90_000, 99_999}
    assert os.path.getsize(shard.path) == 4 * shard.count


@pytest.mark.parametrize("text", ["just one book. " * 100, "x"])
def test_one_document_holds_out_its_end(tmp_path, text):
    """Whichever side its hash falls on."""
    path = tmp_path / "book.txt"
    path.write_text(text)
    for validation in (0.05, 0.999):
        train, held_out = prepare(path, load_tokenizer("byte"), tmp_path / "cache", validation=validation)
        tokens = [*train.tokens.tolist(), *held_out.tokens.tolist()]
        assert tokens == [*text.encode(), 256]
        assert train.documents == (train.count > 0) and held_out.documents == 1
        assert train.count == int(len(tokens) * (1 - validation)) and held_out.count > 0
        held_out.verify()


def test_cache_is_used_until_the_text_the_tokenizer_or_the_settings_change(corpus, bpe):
    folder, cache = corpus
    byte = load_tokenizer("byte")
    first = prepare(folder, byte, cache)
    stamp = first.train.path.stat().st_mtime_ns
    assert prepare(folder, byte, cache) == first and first.train.path.stat().st_mtime_ns == stamp
    others = [
        prepare(folder, bpe[0], cache),
        prepare(folder, byte, cache, validation=0.3),
        prepare(folder, byte, cache, max_bytes=1000),
    ]
    (folder / "000.txt").write_text("changed")
    others.append(prepare(folder, byte, cache))
    folders = {result.train.path.parent for result in [first, *others]}
    assert len(folders) == 5
    assert set(cache.iterdir()) == folders  # no unfinished folder is left


def test_a_failure_leaves_nothing_behind(corpus):
    folder, cache = corpus

    class Failing:
        name, vocab_size, eot = "failing", 257, 256

        def encode_batch(self, texts):
            raise OSError(28, "No space left on device")

        def decode(self, ids):
            return ""

    with pytest.raises(OSError, match=rf"{cache} \(No space left on device\): free space"):
        prepare(folder, Failing(), cache)
    assert list(cache.iterdir()) == []
    (folder / "bad.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1"):
        prepare(folder, load_tokenizer("byte"), cache)
    assert list(cache.iterdir()) == []


def test_processes_that_prepare_at_once_agree(corpus):
    folder, cache = corpus
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(prepare(folder, load_tokenizer("byte"), cache)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(result == results[0] for result in results)
    assert len(list(cache.iterdir())) == 1


def test_a_damaged_cache_says_what_to_delete(corpus):
    folder, cache = corpus
    train = prepare(folder, load_tokenizer("byte"), cache).train
    train.path.write_bytes(train.path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=rf"train.bin has .* bytes and train.idx says .*: delete {train.path.parent} "):
        prepare(folder, load_tokenizer("byte"), cache)


@pytest.mark.parametrize("validation", [0, 1, -0.1, 2])
def test_share_must_be_a_share(corpus, validation):
    with pytest.raises(ValueError, match=f"validation={validation}"):
        prepare(corpus[0], load_tokenizer("byte"), corpus[1], validation=validation)


def test_files_of_a_cache(corpus):
    folder, cache = corpus
    shard = prepare(folder, load_tokenizer("byte"), cache).train
    expected = {f"{split}{suffix}" for split in SPLITS for suffix in (".bin", ".idx", ".json")}
    assert {path.name for path in shard.path.parent.iterdir()} == expected


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_long_document_is_tokenized_in_pieces(kind, bpe, tmp_path, seed, monkeypatch):
    """Its ids are those of the whole, in the order of the documents, and the tokenizer never gets much at once."""
    rng = np.random.default_rng(seed)
    tokenizer = load_tokenizer("byte") if kind == "byte" else bpe[0]
    words = np.array(["the", "quick", "brøwn", "fox\n", "12345", "lazy,", "漢字", "dog. "])
    long = " ".join(rng.choice(words, 600_000))
    assert len(long) > 2 * PIECE_CHARACTERS
    folder = tmp_path / "text"
    folder.mkdir()
    texts = [" ".join(rng.choice(words, 50)) for _ in range(20)]
    texts.insert(int(rng.integers(20)), long)
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text, newline="")
    whole = tokenizer.encode_batch([long])[0]
    taken, encode_batch = [], type(tokenizer).encode_batch

    def watched(self, batch):
        taken.append(sum(map(len, batch)))
        return encode_batch(self, batch)

    monkeypatch.setattr(type(tokenizer), "encode_batch", watched)
    corpus = prepare(folder, tokenizer, tmp_path / "cache", validation=0.3)
    assert max(taken) <= PIECE_CHARACTERS + 1
    for shard, held_out in zip(corpus, (False, True), strict=True):
        assert documents_of(shard, tokenizer) == [text for text in texts if is_held_out(text, 0.3) == held_out]
    tokens = np.asarray(corpus[is_held_out(long, 0.3)].tokens)
    longest = max(np.split(tokens, np.flatnonzero(tokens == tokenizer.eot)), key=len)
    assert longest[longest != tokenizer.eot].tolist() == whole.tolist()
