"""Choose the precision of every quantity, which layers are converted, and see what it costs in memory and in accuracy.

    python examples/custom_recipe.py

A recipe is a frozen value; a variant names only what differs. Here the second moment goes to FP8 in blocks, the scales of the
GEMM operands come from past maxima, and the first and the last layer stay as they are.
"""

import dataclasses

import torch
from torch import nn

import octavo
from octavo.linear import collect_stats

O2 = octavo.RECIPES["O2"]
mine = dataclasses.replace(O2, name="mine", exp_avg_sq=octavo.E4M3, exp_avg_sq_block=128, scaling="delayed")

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32)
)


def inner(module: nn.Module, fqn: str) -> bool:
    """Convert all linear layers but the first ("0") and the last ("6")."""
    return isinstance(module, nn.Linear) and fqn not in ("0", "6")


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = octavo.initialize(model, optimizer, mine, filter=inner)
for layer in octavo.convert_report(model):
    print(layer)

target = nn.Linear(64, 32)
for step in range(100):
    x = torch.randn(256, 64)
    loss = nn.functional.mse_loss(model(x), target(x).detach())
    loss.backward()
    optimizer.step()
    if step < 99:
        optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")

print(octavo.memory_report(model, optimizer))

# Which casts saturate, and which flush small values to zero?
with collect_stats(model) as stats:
    nn.functional.mse_loss(model(x), target(x).detach()).backward()
for fqn, counts in stats.items():
    print(fqn, counts)
