"""Tokenizers of exported models: transformers gives the ids that training had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.data.tokenizers import ByteTokenizer, FileTokenizer, train_bpe
from octavo.hf.tokenizer_files import copy_tokenizer, same_tokenizer, write_tokenizer

TEXTS = [
    "Heißer Tee, 12345 mal.",
    "  two  spaces\n\n\ttab",
    "日本語 😀 é\u0301",
    "\x00\x7f\x80\xa0\xad\u200b",
    "<|endoftext",
    "",
]


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_transformers_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    name = "byte" if kind == "byte" else tmp_path / "mine.json"
    ours = ByteTokenizer() if kind == "byte" else train_bpe(TEXTS * 3, 300, tmp_path / "mine.json")
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"model_type": "llama"}')
    assert write_tokenizer(name, out) == ours.eot
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token == "<|endoftext|>" and theirs.eos_token_id == ours.eot and len(theirs) == ours.vocab_size
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert theirs(text).input_ids == ids.tolist()
        assert theirs.decode(ids.tolist()) == text
    again = FileTokenizer(out)
    assert again.vocabulary() == ours.vocabulary()
    assert [ids.tolist() for ids in again.encode_batch(TEXTS)] == [ids.tolist() for ids in ours.encode_batch(TEXTS)]


def test_files_that_belong_together_are_copied_together(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    train_bpe(TEXTS, 300, source / "tokenizer.json")
    for name in ("tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        (source / name).write_text("{}")
    (out / "merges.txt").write_text("of another tokenizer")
    copy_tokenizer(source / "tokenizer.json", out)
    assert {path.name for path in out.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    copy_tokenizer(source, out)
    (source / "tokenizer.json").rename(source / "bpe.json")
    copy_tokenizer(source / "bpe.json", out)
    assert {path.name for path in out.iterdir()} == {"tokenizer.json"}


def test_the_same_tokenizer_by_what_it_does(tmp_path: Path) -> None:
    """Written otherwise, or with other special tokens around a text, it is the same; with other merges or another normalizer not."""
    one = tmp_path / "tokenizer.json"
    train_bpe(TEXTS * 3, 300, one)
    content = json.loads(one.read_text())
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    for changes, same in (
        ({}, True),
        ({"post_processor": template}, True),
        ({"model": {**content["model"], "merges": merges}}, True),
        ({"model": {**content["model"], "merges": content["model"]["merges"][::-1]}}, False),
        ({"normalizer": {"type": "Lowercase"}}, False),
    ):
        (tmp_path / "other.json").write_text(json.dumps(content | changes))
        assert same_tokenizer(tmp_path, tmp_path / "other.json") == same, changes
    write_tokenizer("byte", tmp_path)
    assert same_tokenizer("byte", tmp_path) and not same_tokenizer("byte", tmp_path / "other.json")
