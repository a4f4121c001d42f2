"""Tokenizers: bytes, which need nothing, and any `tokenizer.json` through the optional package `tokenizers`.

Documents are encoded without special tokens: one that a text spells out ("<|endoftext|>") is text. The end-of-text token is
put after each document by the shard writer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Names of the end-of-text token, in the order in which they are looked for."""


class Tokenizer(Protocol):
    """What the rest of octavo asks of a tokenizer."""

    @property
    def name(self) -> str:
        """Identifies the mapping: equal names give equal ids."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, the end-of-text token included."""

    @property
    def eot(self) -> int:
        """Id of the end-of-text token."""

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        """The ids of each text, without an end-of-text token."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, end-of-text tokens left out, incomplete characters replaced."""

    def vocabulary(self) -> dict[str, int]:
        """The id of each token by its name: equal for tokenizers whose ids mean the same, however their files are written."""


class ByteTokenizer:
    """The UTF-8 bytes of the text, and 256 for its end."""

    name = "byte"
    vocab_size = 257
    eot = 256

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def vocabulary(self) -> dict[str, int]:
        return {**{byte_symbol(byte): byte for byte in range(256)}, END_OF_TEXT[0]: self.eot}


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face. Raises `ValueError` if the file is no such thing or has no end-of-text token."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): give 'byte' or the path of a tokenizer.json"
            ) from None
        try:
            self._tokenizer = _library().Tokenizer.from_buffer(content)
        except ValueError as error:
            raise ValueError(f"{path} is no tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        eot = next((vocabulary[token] for token in END_OF_TEXT if token in vocabulary), None)
        if eot is None:
            raise ValueError(f"{path} has no end-of-text token: looked for {', '.join(END_OF_TEXT)}")
        self.eot: int = eot
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.name = f"tokenizer.json {hashlib.blake2b(content, digest_size=16).hexdigest()}"

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i != self.eot])

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)


def byte_symbol(byte: int) -> str:
    """The character that stands for a byte in a byte-level BPE: itself where it prints, else one from 256 on, in order."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    if byte in printing:
        return chr(byte)
    return chr(256 + sum(other not in printing for other in range(byte)))


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The byte tokenizer for "byte", else the one of a `tokenizer.json` or of a folder that holds one."""
    return ByteTokenizer() if name == ByteTokenizer.name else FileTokenizer(name)


def train_bpe(documents: Iterable[str], vocab_size: int, path: str | Path) -> FileTokenizer:
    """Trains a byte-level BPE of `vocab_size` tokens, end-of-text included, and writes it to `path` as `tokenizer.json`.

    Byte-level: every text can be encoded and decodes to itself. Numbers are split into digits of up to three.
    """
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for 256 bytes and an end-of-text token: use at least 257"
        )
    library = _library()
    split = library.pre_tokenizers.Split(library.Regex(r"\p{N}{1,3}"), behavior="isolated")
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    tokenizer.save(str(partial))
    partial.replace(path)
    return FileTokenizer(path)


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ImportError(
            "a tokenizer.json needs the package tokenizers (pip install tokenizers), or use 'byte'"
        ) from None
    return tokenizers
