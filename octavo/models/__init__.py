"""The decoder-only transformer that octavo trains, in two dialects and the sizes of the paper."""

from octavo.models.config import SIZES, TransformerConfig
from octavo.models.layers import Linear
from octavo.models.transformer import Transformer

__all__ = ["SIZES", "Linear", "Transformer", "TransformerConfig"]
