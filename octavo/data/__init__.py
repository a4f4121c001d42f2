"""From text to batches: `read_documents` → `prepare` (token shards, see `indexed`) or a `PreparedCorpus` → `TokenStream` (batches)."""

from octavo.data.corpus import PreparedCorpus
from octavo.data.indexed import IndexedShard, IndexedWriter
from octavo.data.sources import read_documents
from octavo.data.stream import Source, TokenStream
from octavo.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from octavo.data.tokens import Corpus, prepare

__all__ = [
    "Corpus",
    "IndexedShard",
    "IndexedWriter",
    "PreparedCorpus",
    "Source",
    "TokenStream",
    "Tokenizer",
    "load_tokenizer",
    "prepare",
    "read_documents",
    "train_bpe",
]
