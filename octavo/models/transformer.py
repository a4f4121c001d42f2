"""One decoder in two dialects (see `octavo.models.config`), built for FP8: the residual stream is in `config.dtype` from the
embedding on, no autocast anywhere, queries, keys and values come from one GEMM and so do gate and up, so that each input is
cast to FP8 once.

`Transformer.build` makes a model of any size without ever holding it whole in FP32: it is described on the meta device, then
each block is allocated, initialised and converted before the next. The values of a parameter depend on the seed and the
parameter's name alone, so every recipe starts from the same model.

Initialisation is GPT-2's: N(0, 0.02²), for the projections that write into the residual stream divided by √(2·layers), so that
its variance does not grow with depth; norm gains 1, norm biases 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo.convert import convert
from octavo.formats import Format
from octavo.linear import FP8Linear, HeadLinear
from octavo.models.config import TransformerConfig
from octavo.models.fused import FusedBlock
from octavo.models.layers import Block, Linear, best_attention, document_places, make_norm, rotary_table
from octavo.models.loss import chunk_loss, cross_entropy, linear_cross_entropy
from octavo.recipe import Recipe

INIT_STD = 0.02


class Transformer(nn.Module):
    """The decoder. Its parameters are uninitialised memory in FP32: use `Transformer.build`, or load a checkpoint."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.dim)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_seq_len, config.dim) if learned else None
        block = FusedBlock if config.fused else Block
        self.blocks = nn.ModuleList(block(config) for _ in range(config.n_layers))
        self.norm = make_norm(config)
        self.lm_head = None if config.tie_embeddings else Linear(config.dim, config.padded_vocab_size, bias=False)
        self._chunk_loss = chunk_loss

    @classmethod
    def build(
        cls,
        config: TransformerConfig,
        recipe: str | Recipe | None = None,
        device: str | torch.device = "cpu",
        seed: int = 0,
        fill: Callable[[str, Tensor], None] | None = None,
    ) -> Transformer:
        """An initialised model on `device`, its blocks converted to `recipe` if there is one.

        `fill(name, parameter)` writes the values of a parameter in place of those of the seed, say from a checkpoint.
        The peak of memory is the finished model and one block in FP32. Equal seeds give equal models on devices of one kind.
        """
        with torch.device("meta"):
            model = cls(config)
        names = {module: name for name, module in model.named_modules()}
        for part in model.parts():
            for module in part.modules():
                module.to_empty(device=device, recurse=False)
                for name, parameter in module.named_parameters(recurse=False):
                    if fill is None:
                        model._initialize(f"{names[module]}.{name}", parameter, seed)
                    else:
                        with torch.no_grad():
                            fill(f"{names[module]}.{name}", parameter)
            if recipe is not None and isinstance(part, Block):
                convert(part, recipe)
        if recipe is not None:
            convert(model, recipe)  # the blocks are; this records why the rest stays
        return model

    def parts(self) -> list[nn.Module]:
        """The modules that hold the parameters, in the order of the forward: embedding, positions, blocks, norm, head."""
        parts = [self.embedding, self.positions, *self.blocks, self.norm, self.lm_head]
        return [part for part in parts if part is not None]

    @torch.no_grad()
    def _initialize(self, name: str, parameter: Tensor, seed: int) -> None:
        """Fills one parameter in place with values that depend on its name and the seed."""
        if parameter.ndim < 2:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            return
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        std = INIT_STD / math.sqrt(2 * self.config.n_layers) if name.endswith("out.weight") else INIT_STD
        parameter.normal_(std=std, generator=generator)

    def hidden(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens int64 [B, T] → the normalised output of the last block, [B, T, C] in `config.dtype`; `documents` as in `forward`."""
        config, device = self.config, tokens.device
        if tokens.shape[1] > config.max_seq_len:
            raise ValueError(
                f"the sequence has {tokens.shape[1]} tokens and max_seq_len is {config.max_seq_len}: cut it, or build with more"
            )
        if documents is not None and documents.shape != tokens.shape:
            raise ValueError(
                f"documents {list(documents.shape)} must have a number for each of tokens {list(tokens.shape)}"
            )
        x = self.embedding(tokens).to(config.dtype)
        places, mask = (slice(tokens.shape[1]), None) if documents is None else document_places(documents)
        if self.positions is not None:
            x = x + self.positions.weight[places].to(config.dtype)
        cos, sin = rotary_table(tokens.shape[1], config.head_dim, config.rope_theta, device, config.rope_scaling)
        cos, sin = cos[places], sin[places]
        recomputed = config.recomputed_layers if torch.is_grad_enabled() else 0
        with best_attention(device):
            for layer, block in enumerate(self.blocks):
                if layer < recomputed:
                    x = checkpoint(_run, block, x, cos, sin, mask, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = block(x, cos, sin, mask)
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """tokens int64 [B, T] → logits [B, T, vocab_size] in `config.dtype`.

        With `targets` int64 [B, T], the mean cross-entropy instead, 0-d FP32; targets of -100 do not count. `documents`, integers
        [B, T], keeps neighbours of different numbers apart: no token sees another document, and positions restart in each.
        Raises `ValueError` if shapes differ, and on a CPU if a target is neither -100 nor a token.
        """
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(
                f"targets {list(targets.shape)} must have one for each of tokens {list(tokens.shape)}: "
                "those of tokens[:, :-1] are tokens[:, 1:]"
            )
        x = self.hidden(tokens, documents)
        head = self.lm_head
        if targets is None or not (head is None or _is_product(head)):
            logits = F.linear(x, self.embedding.weight.to(x.dtype)) if head is None else head(x)
            logits = logits[..., : self.config.vocab_size]
            if targets is None:
                return logits
            return cross_entropy(logits.flatten(0, 1), targets.flatten())
        weight = self.embedding.weight if head is None else head.weight
        return linear_cross_entropy(
            x.flatten(0, 1),
            weight,
            targets.flatten(),
            classes=self.config.vocab_size,
            chunk_loss=self._chunk_loss,
            grad_output=self._head_grad_output(),
        )

    def _head_grad_output(self) -> Format | None:
        """The format of the gradient of the logits: that of a converted head; one tied to the embedding goes with the blocks."""
        if self.lm_head is not None:
            return self.lm_head.recipe.head_grad_output if isinstance(self.lm_head, HeadLinear) else None
        layers = (module for module in self.blocks[-1].modules() if isinstance(module, FP8Linear))
        return next((layer.recipe.head_grad_output for layer in layers), None)

    def compile_blocks(self) -> None:
        """`torch.compile` each block, which share one compilation, and the loss; parameter names stay as they are."""
        for block in self.blocks:
            block.compile(fullgraph=True)
        self._chunk_loss = torch.compile(chunk_loss, fullgraph=True)

    def num_parameters(self) -> int:
        """Parameters of the model; a tied embedding counts once."""
        return self.config.num_parameters

    def flops_per_token(self, seq_len: int | None = None) -> float:
        """Model FLOPs of training per token, see `TransformerConfig.flops_per_token`; at `max_seq_len` unless said otherwise."""
        return self.config.flops_per_token(seq_len or self.config.max_seq_len)

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, n: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """`tokens` int64 [B, T] followed by n sampled ones, [B, T + n]; `temperature` 0 takes the most probable.

        Each token costs a forward over the last `max_seq_len` tokens: there is no cache of keys and values. Blocks run
        uncompiled, because every length would be compiled anew. Raises `ValueError` for sequences without a token, or a negative n.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0 or n < 0:
            raise ValueError(
                f"tokens {list(tokens.shape)} must be [B, T] with at least one token to go on from, and n = {n} at least 0"
            )
        with torch.compiler.set_stance("force_eager"):
            for _ in range(n):
                logits = self(tokens[:, -self.config.max_seq_len :])[:, -1].float()
                if temperature == 0:
                    following = logits.argmax(dim=-1, keepdim=True)
                else:
                    probabilities = (logits / temperature).softmax(dim=-1)
                    following = torch.multinomial(probabilities, 1, generator=generator)
                tokens = torch.cat((tokens, following), dim=1)
        return tokens


def _is_product(head: nn.Module) -> bool:
    """Whether the chunked loss may read the weight of the head instead of calling it."""
    return type(head) is Linear or type(head) is HeadLinear and head.plain_class is Linear


def _run(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """One block; it is run again in backward, outside the forward that chose the kind of attention."""
    with best_attention(x.device):
        return block(x, cos, sin, mask)
