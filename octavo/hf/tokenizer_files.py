"""The tokenizer of an exported model: the files of the source, or those that make transformers read ours.

A `tokenizer.json` is enough for the ids; `tokenizer_config.json` names the class and the end-of-text token. Our byte tokenizer has
no file: it becomes a byte-level BPE without merges, whose token for byte b has the id b.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from octavo.data.tokenizers import END_OF_TEXT, ByteTokenizer, byte_symbol, load_tokenizer
from octavo.hf.checkpoint import TOKENIZER_FILES


def write_tokenizer(tokenizer: str | Path, folder: Path) -> int:
    """Puts `tokenizer` ("byte", a tokenizer.json or a folder with one) into `folder`, in place of one that is there.

    Returns the id of the end-of-text token. Raises `ValueError` if it cannot be read.
    """
    eot = load_tokenizer(tokenizer).eot
    if tokenizer == ByteTokenizer.name:
        _remove_tokenizer(folder)
        _bytes().save(str(folder / "tokenizer.json"))
    else:
        copy_tokenizer(tokenizer, folder)
    settings = folder / "tokenizer_config.json"
    if not settings.exists():
        token = _token(folder / "tokenizer.json", eot)
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": token, "eos_token": token}
        settings.write_text(json.dumps(values | {"clean_up_tokenization_spaces": False}, indent=2) + "\n")
    return eot


def copy_tokenizer(tokenizer: str | Path, folder: Path) -> None:
    """Copies a tokenizer.json and the files that belong to it to `folder`, in place of those that are there."""
    path = Path(tokenizer).expanduser()
    _remove_tokenizer(folder)
    if path.is_file() and path.name != "tokenizer.json":
        shutil.copyfile(path, folder / "tokenizer.json")
        return
    source = path if path.is_dir() else path.parent
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def same_tokenizer(one: str | Path, other: str | Path) -> bool:
    """Whether both ("byte", a tokenizer.json or a folder with one) give every text the same ids, however their files are written.

    What a tokenizer.json says of special tokens around a text, of cutting and of padding is left out, as octavo's encoding does.
    """
    return _rules(one) == _rules(other)


def _rules(tokenizer: str | Path) -> dict[str, Any]:
    from tokenizers import Tokenizer

    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    rules = json.loads((_bytes() if tokenizer == ByteTokenizer.name else Tokenizer.from_file(str(file))).to_str())
    return {key: value for key, value in rules.items() if key not in ("post_processor", "truncation", "padding")}


def _remove_tokenizer(folder: Path) -> None:
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)


def _token(path: Path, number: int) -> str:
    from tokenizers import Tokenizer

    token = Tokenizer.from_file(str(path)).id_to_token(number)
    assert token is not None
    return token


def _bytes() -> Any:
    """The byte tokenizer as the library's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={byte_symbol(byte): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT[0], special=True, normalized=False)])
    return tokenizer
