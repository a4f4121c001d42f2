"""Stop and resume a run without changing a single bit.

    python examples/resume.py

`model.state_dict()` holds ordinary real-valued tensors under the names of the unconverted model, so any program can read it.
`optimizer.state_dict()` holds the moments as stored codes with their scales. Together they restore every byte: stochastic
rounding draws its bits from (seed, step, element), not from a random generator, so that the resumed steps round alike.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import octavo


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return octavo.initialize(model, optimizer, recipe="O2")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))  # the batch of this step
        nn.functional.mse_loss(model(x), x.roll(1, dims=1)).backward()
        octavo.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


model, optimizer = build()
train(model, optimizer, range(20))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "checkpoint.pt"
    first, first_optimizer = build()
    train(first, first_optimizer, range(10))
    torch.save({"model": first.state_dict(), "optimizer": first_optimizer.state_dict(), "step": 10}, path)
    print(f"checkpoint after 10 steps: {path.stat().st_size / 1e3:.0f} kB")

    resumed, resumed_optimizer = build()
    checkpoint = torch.load(path, weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    train(resumed, resumed_optimizer, range(checkpoint["step"], 20))

expected = model.state_dict()
same = all(torch.equal(value, expected[name]) for name, value in resumed.state_dict().items())
print(f"20 steps at once and 10 + 10 with a restart: {'identical' if same else 'DIFFERENT'}")
