"""`CausalLM`: a language model of transformers behind the interface that the trainer asks of a model.

Its parameters are those of the model, in FP32; products run in the compute dtype under autocast, and octavo's FP8 layers follow
it. The model's own dropout is applied in training.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.loss import IGNORE


class CausalLM(nn.Module):
    """`model(tokens)` gives logits, `model(tokens, targets)` the mean cross-entropy, as `octavo.models.Transformer` does."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    @property
    def max_seq_len(self) -> int | None:
        """Positions that the config names."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens int64 [B, T] → logits [B, T, V]; with `targets` int64 [B, T] the loss, 0-d FP32, those of -100 left out."""
        mixed = self.dtype is not torch.float32
        with torch.autocast(tokens.device.type, dtype=self.dtype if mixed else torch.bfloat16, enabled=mixed):
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)

    def compile_blocks(self) -> None:
        """`torch.compile` each block: the modules of the longest list."""
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        for block in max(lists, key=len, default=nn.ModuleList()):
            block.compile()

    def num_parameters(self) -> int:
        """Parameters of the model; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of training per token: 6 per parameter of two dims that is no lookup, and causal attention."""
        config = self.model.config.get_text_config()
        head = self.model.get_output_embeddings()
        tables = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        tables -= {id(head.weight)} if head is not None else set()
        products = sum(p.numel() for p in self.parameters() if p.ndim > 1 and id(p) not in tables)
        return 6.0 * products + 6.0 * config.num_hidden_layers * seq_len * config.hidden_size
