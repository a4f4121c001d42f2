"""Fine-tune with a small learning rate: do the updates survive in a 16-bit master?

    python examples/finetune.py

A step of fine-tuning changes a weight by less than half a unit in the last place of FP16. Round-to-nearest loses such steps for
ever; octavo rounds the master stochastically, so they arrive on average. The same model is fine-tuned three times from the same
weights on the same batches: with FP32 weights and states, with recipe O2, and with the FP8-LM paper's master (nearest).
"""

import copy

import torch
from torch import nn

import octavo

DIM, STEPS, LR = 64, 200, 6e-6
torch.manual_seed(0)
pretrained = nn.Sequential(nn.Linear(DIM, 256), nn.GELU(), nn.Linear(256, DIM))
teacher = copy.deepcopy(pretrained)  # the task: weights a little away from the pretrained ones
with torch.no_grad():
    for p in teacher.parameters():
        p.add_(0.02 * torch.randn_like(p))


def finetune(recipe: str) -> tuple[nn.Module, float]:
    """The fine-tuned model with plain weights, and its loss on held-out inputs."""
    model = copy.deepcopy(pretrained)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    model, optimizer = octavo.initialize(model, optimizer, recipe=recipe)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(128, DIM, generator=generator)
        with torch.no_grad():
            target = teacher(x)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    octavo.export(model)
    x = torch.randn(2048, DIM, generator=generator)
    with torch.no_grad():
        return model, nn.functional.mse_loss(model(x), teacher(x)).item()


def movement(model: nn.Module, reference: nn.Module) -> float:
    """Share of the reference's movement away from the pretrained weights that the model made too."""
    weights = [
        (p, q, r) for p, q, r in zip(model.parameters(), pretrained.parameters(), reference.parameters(), strict=True)
    ]
    moved = torch.cat([(p - q).flatten() for p, q, _ in weights if p.ndim == 2])
    wanted = torch.cat([(r - q).flatten() for _, q, r in weights if r.ndim == 2])
    return (moved @ wanted / (wanted @ wanted)).item()


with torch.no_grad():
    x = torch.randn(2048, DIM)
    start = nn.functional.mse_loss(pretrained(x), teacher(x)).item()
print(f"{'before':8s} loss {start:.6f}")
reference, loss = finetune("bf16")
print(f"{'FP32':8s} loss {loss:.6f}")
for recipe in ("O2", "paper"):
    model, loss = finetune(recipe)
    print(f"{recipe:8s} loss {loss:.6f}  movement kept {movement(model, reference):.0%}")
