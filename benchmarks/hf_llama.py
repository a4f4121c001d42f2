"""A LLaMA of transformers, `octavo.initialize` and nothing else, beside the same model in BF16: forward and backward.

    python benchmarks/hf_llama.py [--layers 8] [--micro-batch 8] [--csv benchmarks/results/hf_llama_h200.csv]

The sizes are those of LLaMA 3 8B (d 4096, FFN 14,336, 32 heads, 8 key-value heads, 128,256 tokens), with random weights made from the
config; sequences of 2,048 random tokens. O2 runs as it is and with the backward of the head in FP8. All variants compute in BF16, take
the fastest attention, and are timed eager and under `torch.compile`, in one process; the loss of the first call must be within 2% of
that of BF16. Medians of `--repeats` with their spread.

No token is padding, so attention is causal and needs no mask. Compiled with torch before 2.14, transformers makes one all the same,
and attention with a mask takes three times as long: all variants here are told that there is none.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import octavo
from octavo.bench.rows import Record, Row, conditions
from octavo.bench.run import SEED, Run
from octavo.models.layers import best_attention

SEQUENCE = 2048
BASELINE = "bf16"
RECIPES = {
    "octavo O2": octavo.RECIPES["O2"],
    "octavo O2, BF16 head": dataclasses.replace(octavo.RECIPES["O2"], head_grad_output=None),
}
VARIANTS = (BASELINE, *RECIPES)
CAUSAL = "sdpa_causal"
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL, lambda *args, **kwargs: None)
BOUND = 0.02
"""Of the loss, relative to that of BF16."""
SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
}
VOCABULARY = {"8b": 128_256, "tiny": 512}


def build(variant: str, size: str, layers: int, device: torch.device, break_even: octavo.BreakEven) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size],
        num_hidden_layers=layers,
        vocab_size=VOCABULARY[size],
        dtype=torch.bfloat16,
        use_cache=False,
        attn_implementation=CAUSAL,
    )
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if variant != BASELINE:
        optimizer = torch.optim.AdamW(model.parameters())
        model, _ = octavo.initialize(model, optimizer, RECIPES[variant], break_even=break_even)
    return model


def measure(run: Run, row: Row, size: str, layers: int, micro_batch: int, losses: dict[str, float]) -> Row:
    rule = octavo.BreakEven(micro_batch * SEQUENCE, compiled=row.mode == "compiled")
    model = build(row.variant, size, layers, run.device, rule)
    forward = torch.compile(model) if row.mode == "compiled" else model
    generator = torch.Generator(run.device).manual_seed(SEED)
    shape = (micro_batch, SEQUENCE if run.is_cuda else 64)
    tokens = torch.randint(VOCABULARY[size], shape, device=run.device, generator=generator)

    def function() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    with best_attention(run.device):
        loss = function().item()
        expected = losses.setdefault(BASELINE, loss)
        for _ in range(2):
            function()
        run.forget_peak()
        timing = run.time(function)
    return dataclasses.replace(row.timed(timing), error=abs(loss / expected - 1), peak_gib=run.peak_gib())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--only", default=";".join(VARIANTS), help="variants, with ; between")
    parser.add_argument("--modes", default="compiled,eager")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = Record(conditions(device), print, options.csv)
    print(", ".join(f"{name} {value}" for name, value in record.conditions.items() if value))
    run = Run(device, options.repeats, octavo.RECIPES["O2"], record, None, ("compiled", "eager"), ())
    losses: dict[str, float] = {}
    for mode in options.modes.split(","):
        for variant in options.only.split(";"):
            row = Row(
                "hf_llama",
                f"{options.layers} layers of LLaMA {options.size}, {SEQUENCE} tokens",
                variant,
                mode,
                tokens=options.micro_batch * SEQUENCE,
                micro_batch=options.micro_batch,
                bound=BOUND,
            )

            def timed(row: Row) -> Row:
                return measure(run, row, options.size, options.layers, options.micro_batch, losses)

            run.add(row, timed, BASELINE, "compiled")


if __name__ == "__main__":
    main()
