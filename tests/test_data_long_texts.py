"""Long texts in pieces: joined they are the text, their ids those of the text as a whole, and no piece is a long one."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from octavo.data.long_texts import PIECE_CHARACTERS, encode_pieces

IDS = np.dtype("<i4")
WORDS = ["the", "café", "naïve", "x1", "'s", "(a)", "12345", "漢字", "🙂", "--", "under_score", "e\u0301"]
GAPS = [" "] * 12 + ["\n"] * 3 + ["\n\n", "  ", "\r\n", "\n    ", "\t", " \n", "\u3000"]
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def some_text(rng: random.Random, words: int, gaps: list[str] = GAPS) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(gaps) for _ in range(words))


def text_with_spaces(rng: random.Random, words: int) -> str:
    """Every 64 characters have a space between words: no piece is cut at a line break, which tokens of some kinds reach over."""
    return "".join("the " + some_text(rng, 2) + rng.choice(WORDS) + " " for _ in range(-(-words // 4))).strip()


def byte_ids(text: str) -> list[int]:
    return list(text.encode())


def trained(kind: str, rng: random.Random) -> tokenizers.Tokenizer:
    """A BPE as of GPT-2, of the models after GPT-4, or as SentencePiece's are: no split, and a space before each text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="?" if kind == "sentencepiece" else None))
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "cl100k":
        split = pre_tokenizers.Split(Regex(CL100K), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["?"], show_progress=False, max_token_length=8)
    texts = [some_text(rng, 400) for _ in range(20)]
    if kind == "sentencepiece":  # its trainer lets no token reach over a space, and the tokenizer then splits nowhere
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "sentencepiece":
        content = json.loads(tokenizer.to_str())
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": None}))
    return tokenizer


@pytest.mark.parametrize("kind", ["byte", "gpt2", "cl100k", "metaspace", "sentencepiece"])
def test_ids_are_those_of_the_whole_text(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = None if kind == "byte" else trained(kind, rng)

    def encode(text: str) -> list[int]:
        return byte_ids(text) if tokenizer is None else tokenizer.encode(text, add_special_tokens=False).ids

    make = text_with_spaces if kind in ("metaspace", "sentencepiece") else some_text
    for _ in range(60):
        text, size = make(rng, rng.randrange(1, 400)), rng.randrange(150, 400)
        pieces = list(encode_pieces(encode, text, IDS, size))
        assert "".join(piece for piece, _ in pieces) == text
        assert all(0 < len(piece) <= size for piece, _ in pieces)
        assert np.concatenate([ids for _, ids in pieces]).tolist() == encode(text)
        assert all(ids.dtype == IDS for _, ids in pieces)


def test_a_text_without_seams_is_cut_and_kept(seed: int) -> None:
    """Chinese, white space, one word: the pieces decode to the text."""
    rng = random.Random(seed)
    tokenizer = trained("gpt2", rng)
    for alphabet in ("漢字電腦", " \n\t", "a", "🙂\u200d"):
        text = "".join(rng.choice(alphabet) for _ in range(500))
        pieces = list(encode_pieces(lambda part: tokenizer.encode(part).ids, text, IDS, 64))
        assert "".join(piece for piece, _ in pieces) == text and max(len(piece) for piece, _ in pieces) <= 64
        assert len(pieces) <= 1 + 2 * 500 // 64
        known = byte_ids(text)
        found = encode_pieces(byte_ids, text, IDS, 64)
        assert np.concatenate([ids for _, ids in found]).tolist() == known


def test_a_short_text_is_one_piece() -> None:
    for text in ("", "x", "a b\nc" * (PIECE_CHARACTERS // 5)):
        ((piece, ids),) = encode_pieces(byte_ids, text, IDS)
        assert piece == text and ids.tolist() == byte_ids(text)
