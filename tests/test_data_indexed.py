"""Shards in Megatron's format: read by an independent parser and by datatrove, complete or absent, and never silently damaged."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.data import IndexedShard, IndexedWriter
from octavo.data.indexed import token_dtype

BYTE = SimpleNamespace(name="byte", vocab_size=257, eot=256)


def random_documents(count: int = 40, high: int = 60_000) -> list[np.ndarray]:
    return [np.random.randint(high, size=np.random.randint(1, 90)) for _ in range(count)]


def write(prefix, documents, dtype="uint16", tokenizer=None) -> IndexedShard:
    with IndexedWriter(prefix, dtype, tokenizer) as writer:
        for ids in documents:
            writer.add(ids)
    return IndexedShard.open(prefix)


def read_by_definition(prefix) -> tuple[np.dtype, list[list[int]], list[int]]:
    """The sequences and the table of documents, by the description of the format alone: one `struct` after the other."""
    index, tokens = open(f"{prefix}.idx", "rb"), open(f"{prefix}.bin", "rb")
    with index, tokens:
        assert index.read(9) == b"MMIDIDX\x00\x00"
        assert struct.unpack("<Q", index.read(8)) == (1,)
        names = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
        dtype = np.dtype("<" + names[struct.unpack("<B", index.read(1))[0]])
        (sequences,) = struct.unpack("<Q", index.read(8))
        (documents,) = struct.unpack("<Q", index.read(8))
        lengths = struct.unpack(f"<{sequences}i", index.read(4 * sequences))
        pointers = struct.unpack(f"<{sequences}q", index.read(8 * sequences))
        indices = struct.unpack(f"<{documents}q", index.read(8 * documents))
        assert index.read() == b""
        found = []
        for length, pointer in zip(lengths, pointers, strict=True):
            tokens.seek(pointer)
            found.append(np.frombuffer(tokens.read(length * dtype.itemsize), dtype).tolist())
    return dtype, found, list(indices)


def write_by_definition(prefix, sequences, indices, dtype="<u2", code=8) -> None:
    """Files with any number of sequences a document."""
    arrays = [np.asarray(ids, dtype=dtype) for ids in sequences]
    lengths = [len(ids) for ids in arrays]
    pointers = np.cumsum([0, *(ids.nbytes for ids in arrays)])[:-1] if arrays else []
    with open(f"{prefix}.bin", "wb") as tokens, open(f"{prefix}.idx", "wb") as index:
        tokens.write(b"".join(ids.tobytes() for ids in arrays))
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(arrays), len(indices)))
        for values, kind in ((lengths, "<i4"), (pointers, "<i8"), (indices, "<i8")):
            index.write(np.asarray(values, dtype=kind).tobytes())


# --- the format


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_the_definition_reads_what_the_writer_writes(tmp_path, dtype, seed):
    documents = random_documents(high=min(60_000, np.iinfo(dtype).max + 1))
    shard = write(tmp_path / "shard", documents, dtype)
    found_dtype, sequences, indices = read_by_definition(tmp_path / "shard")
    assert found_dtype == dtype == shard.dtype
    assert sequences == [ids.tolist() for ids in documents]
    assert indices == list(range(len(documents) + 1))
    assert shard.tokens.tolist() == np.concatenate(documents).tolist() and not shard.tokens.flags.writeable
    assert shard.lengths.tolist() == [len(ids) for ids in documents] and shard.lengths.dtype == np.int32
    assert shard.offsets.tolist() == np.cumsum([0, *shard.lengths]).tolist() and shard.offsets.dtype == np.int64
    assert shard.count == sum(map(len, documents)) and shard.documents == len(documents)
    shard.verify()


def test_several_sequences_of_a_document_are_one_text(tmp_path, seed):
    sequences = [ids.tolist() for ids in random_documents(7)]
    write_by_definition(tmp_path / "foreign", sequences, [0, 2, 2, 3, 7])
    shard = IndexedShard.open(tmp_path / "foreign")
    sizes = [len(ids) for ids in sequences]
    assert shard.documents == 4 and shard.lengths.tolist() == [sum(sizes[:2]), 0, sizes[2], sum(sizes[3:])]
    assert shard.tokens.tolist() == sum(sequences, [])
    assert (shard.tokenizer, shard.vocab_size, shard.eot, shard.recorded) == (None,) * 4
    expected = np.repeat([0, 2, 3], [sum(sizes[:2]), sizes[2], sum(sizes[3:])])
    ids = shard.document_ids(0, shard.count)
    assert np.array_equal(np.diff(ids) > 0, np.diff(expected) > 0)
    shard.verify()


def test_datatrove_writes_the_same_index_and_each_opens_the_others(tmp_path, seed):
    datatrove = pytest.importorskip("datatrove.pipeline.tokens.megatron_tokenizer")
    for name, size, dtype in (("two", 2, "uint16"), ("four", 4, "int32")):
        documents = random_documents()
        theirs = datatrove.MegatronTokenizedFile(str(tmp_path), name, token_size=size)
        for ids in documents:
            theirs.write(ids.tolist())
        theirs.close()
        ours = write(tmp_path / f"{name}-ours", documents, dtype)
        opened = IndexedShard.open(tmp_path / name)
        assert opened.tokens.tolist() == ours.tokens.tolist() and opened.offsets.tolist() == ours.offsets.tolist()
        assert opened.checksum == ours.checksum  # the bytes of both files are equal, so its readers read ours
        for suffix in (".bin", ".idx"):
            assert (tmp_path / (name + suffix)).read_bytes() == (tmp_path / (name + "-ours" + suffix)).read_bytes()


def test_document_ids_of_any_part(tmp_path, seed):
    documents = random_documents(30)
    shard = write(tmp_path / "shard", documents)
    expected = np.repeat(np.arange(30), [len(ids) for ids in documents])
    for _ in range(200):
        begin, end = sorted(np.random.randint(shard.count + 1, size=2))
        if begin < end:
            assert np.array_equal(shard.document_ids(begin, end), expected[begin:end] - expected[begin])


def test_dtype_by_vocabulary():
    assert [token_dtype(size).name for size in (257, 65_536, 65_537, 200_000)] == ["uint16", "uint16", "int32", "int32"]


def test_empty_shard(tmp_path):
    shard = write(tmp_path / "empty", [])
    assert (shard.count, shard.documents, shard.offsets.tolist(), shard.tokens.tolist()) == (0, 0, [0], [])
    assert read_by_definition(tmp_path / "empty")[1:] == ([], [0])
    shard.verify()


def test_dots_in_a_name_belong_to_it(tmp_path):
    assert write(tmp_path / "wiki-v1.0", [np.arange(5)]).path.name == "wiki-v1.0.bin"


def test_equal_documents_give_equal_bytes_and_the_tokenizer_is_noted(tmp_path, seed):
    documents = random_documents()
    one, other = (write(tmp_path / name, documents, tokenizer=BYTE) for name in ("one", "other"))
    for suffix in (".bin", ".idx", ".json"):
        assert one.path.with_suffix(suffix).read_bytes() == other.path.with_suffix(suffix).read_bytes()
    assert (one.tokenizer, one.vocab_size, one.eot) == ("byte", 257, 256)
    assert one.checksum == other.checksum == IndexedShard.open(tmp_path / "one").checksum
    other.path.with_suffix(".json").unlink()
    bare = IndexedShard.open(tmp_path / "other")
    assert bare.tokenizer is None and bare.checksum == one.checksum
    # the checksum also knows where documents begin
    assert write(tmp_path / "third", [np.concatenate(documents)]).checksum != one.checksum


# --- complete or absent


def test_an_exception_publishes_nothing_and_keeps_the_old_shard(tmp_path):
    old = write(tmp_path / "shard", [np.arange(9)])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "shard", "uint16") as writer:
        writer.add([1, 2, 3])
        raise RuntimeError
    assert IndexedShard.open(tmp_path / "shard") == old
    assert len(list(tmp_path.iterdir())) == 3
    with IndexedWriter(tmp_path / "shard", "uint16") as writer:
        writer.add([4])
        writer.close()
    assert IndexedShard.open(tmp_path / "shard").tokens.tolist() == [4]


def test_a_killed_process_leaves_no_shard_and_the_next_one_writes_it(tmp_path):
    code = f"""
import os, signal
from octavo.data.indexed import IndexedWriter
writer = IndexedWriter({str(tmp_path / "shard")!r}, "uint16")
writer.add(range(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"shard\.idx cannot be read"):
        IndexedShard.open(tmp_path / "shard")
    assert write(tmp_path / "shard", [np.arange(3)]).tokens.tolist() == [0, 1, 2]
    assert sorted(os.listdir(tmp_path)) == ["shard.bin", "shard.idx", "shard.json"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([70_000], r"shard: document 1 has 1 tokens with ids 70000 to 70000, and uint16 takes 0 to 65535"),
        ([5, -1], "ids -1 to 5"),
        ([], "document 1 must be a list of token ids, at least one"),
        ([[1, 2]], "must be a list"),
        ([0.5], "must be a list"),
    ],
)
def test_ids_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path, ids, message):
    with IndexedWriter(tmp_path / "shard", "uint16") as writer:
        writer.add([1, 2])
        with pytest.raises(ValueError, match=message):
            writer.add(ids)
    assert IndexedShard.open(tmp_path / "shard").tokens.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", ["uint32", "float32", "bool"])
def test_dtypes_of_no_shard(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"cannot hold tokens of dtype {dtype}: use one of"):
        IndexedWriter(tmp_path / "shard", dtype)


# --- damage


def damaged(prefix, suffix, change) -> None:
    path = prefix.with_name(prefix.name + suffix)
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data) or data)


def put(offset: int, kind: str, value: int):
    return lambda data: struct.pack_into(kind, data, offset, value)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda data: b"\x00" * 200, r"shard\.idx is no index of token shards"),
        (".idx", lambda data: b"PK\x03\x04 zip", r"shard\.idx is no index"),
        (".idx", lambda data: data[:20], r"shard\.idx is truncated: it has 20 bytes"),
        (".idx", lambda data: data[:-1], r"shard\.idx is damaged: it has \d+ bytes instead of the \d+"),
        (".idx", lambda data: data + b"\x00", r"shard\.idx is damaged: it has"),
        (".idx", put(9, "<Q", 2), "version 2"),
        (".idx", put(17, "<B", 7), "dtype code 7"),
        (".idx", put(18, "<Q", 1 << 60), "is damaged: it has"),
        (".idx", put(34, "<i", -5), "sequence 0 has -5 tokens"),
        (".idx", put(34 + 4 * 3, "<i", 7), "is damaged: sequence"),
        (".idx", put(34 + 4 * 10 + 8 * 4, "<q", 1), "sequence 4 has .* tokens at byte 1,"),
        (".idx", put(34 + 12 * 10, "<q", 1), "first sequences of its documents do not begin with 0"),
        (".idx", put(34 + 12 * 10 + 8 * 5, "<q", 2), "are not in order"),
        (".idx", put(34 + 12 * 10 + 8 * 10, "<q", 11), "last document ends with sequence 11 of 10"),
        (".bin", lambda data: data[:-1], r"shard\.bin has \d+ bytes and shard\.idx says"),
        (".bin", lambda data: data + data, r"shard\.bin has"),
        (".json", lambda data: b"{", r"shard\.json cannot be read"),
        (".json", lambda data: b"[]", r"shard\.json does not describe"),
        (".json", lambda data: b'{"eot": "x"}', r"shard\.json does not describe"),
        (".json", lambda data: b'{"other": 1}', r"shard\.json does not describe"),
        (
            ".json",
            lambda data: b'{"tokens": 1}',
            r"shard\.json is of another shard than shard\.idx, which has \d+ tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_is_named(tmp_path, suffix, change, message):
    write(tmp_path / "shard", [np.arange(3 + i) for i in range(10)])
    damaged(tmp_path / "shard", suffix, change)
    with pytest.raises(ValueError, match=message):
        IndexedShard.open(tmp_path / "shard")


def test_missing_files_are_named(tmp_path):
    write(tmp_path / "shard", [np.arange(9)])
    with pytest.raises(ValueError, match=r"shard\.bin\.idx cannot be read .*named by its prefix"):
        IndexedShard.open(tmp_path / "shard.bin")
    (tmp_path / "shard.bin").unlink()
    with pytest.raises(ValueError, match=r"shard\.bin cannot be read .*shard\.idx belongs to it"):
        IndexedShard.open(tmp_path / "shard")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_changed_byte_is_found_by_verify(tmp_path, suffix, seed):
    shard = write(tmp_path / "shard", [np.array([7, 9, 11])])
    shard.verify()

    def flip(data):
        data[3 if suffix == ".bin" else 30] ^= 1

    damaged(tmp_path / "shard", suffix, flip)
    with pytest.raises(ValueError, match=r"shard\.bin or its \.idx has changed"):
        shard.verify()


def test_notes_are_plain_json(tmp_path):
    write(tmp_path / "shard", [np.arange(9)], tokenizer=BYTE)
    notes = json.loads((tmp_path / "shard.json").read_text())
    assert set(notes) == {"tokens", "documents", "tokenizer", "vocab_size", "eot", "checksum"}
