"""One view of two kinds of tokenizer: those of transformers, and octavo's own.

A codec turns a string into ids with or without the tokenizer's special tokens, and says which token stands before a text that
has no context: the beginning-of-text token if there is one, else the end-of-text token. octavo's tokenizers add no special
tokens, as in training; a run that began from a Hugging Face checkpoint is scored with the tokenizer of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from octavo.data.tokenizers import Tokenizer


class Codec(Protocol):
    """What evaluation asks of a tokenizer."""

    name: str
    size: int
    """One more than the largest id."""
    bos: int | None
    eos: int

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """The ids; `special` adds the tokenizer's special tokens or not, None leaves it to the tokenizer."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of some ids."""

    def vocabulary(self) -> dict[str, int]:
        """The id of each token by its name."""


class OctavoCodec:
    """A tokenizer of `octavo.data`."""

    bos: int | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name, self.size, self.eos = tokenizer.name, tokenizer.vocab_size, tokenizer.eot

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        return self._tokenizer.encode_batch([text])[0].tolist()

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        # The end of the text has no spelling in a byte tokenizer, so it is never part of a decoded text.
        return self._tokenizer.decode(ids)

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.vocabulary()


class TransformersCodec:
    """A tokenizer of transformers. Raises `ValueError` if it has no end-of-text token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has no end-of-text token: set eos_token in its tokenizer_config.json"
            )
        self.name = f"{type(tokenizer).__name__} of {len(tokenizer):,} tokens"
        self.size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        options = {} if special is None else {"add_special_tokens": special}
        return self._tokenizer.encode(text, **options)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()
