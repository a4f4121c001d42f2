"""From text to batches: `read_documents` → `prepare` (token shards on the disk) → `TokenStream` (batches)."""

from octavo.data.indexed import IndexedShard, IndexedWriter
from octavo.data.sources import read_documents
from octavo.data.stream import TokenStream
from octavo.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from octavo.data.tokens import Corpus, prepare

__all__ = [
    "Corpus",
    "IndexedShard",
    "IndexedWriter",
    "TokenStream",
    "Tokenizer",
    "load_tokenizer",
    "prepare",
    "read_documents",
    "train_bpe",
]
