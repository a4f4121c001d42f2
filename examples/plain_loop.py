"""A plain PyTorch training loop in FP8: one line more than in BF16.

    python examples/plain_loop.py

Trains a byte-level language model on the source of Python's own standard library, on a GPU if there is one.
"""

import json
from pathlib import Path

import torch
from torch import nn

import octavo

device = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, BATCH, DIM, STEPS = 64, 16, 128, 60


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, DIM // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(DIM, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.blocks(x))


text = b"".join(path.read_bytes() for path in sorted(Path(json.__file__).parent.glob("*.py")))
data = torch.tensor(list(text))
torch.manual_seed(0)

model = ByteModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
# The one line. Layers as small as these are faster in BF16, and on a GPU octavo would leave them: break_even=False shows FP8 all the same.
model, optimizer = octavo.initialize(model, optimizer, recipe="O2", break_even=False)

for step in range(STEPS):
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,))
    batch = torch.stack([data[s : s + LENGTH + 1] for s in starts]).to(device)
    with torch.autocast(device, torch.bfloat16):
        logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    octavo.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step == STEPS - 1:
        print(octavo.memory_report(model, optimizer))
    optimizer.zero_grad()
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:3d}  loss {loss.item():.3f}")

for layer in octavo.convert_report(model):
    print(layer)
