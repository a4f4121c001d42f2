"""Train a Hugging Face model in FP8 with an ordinary loop, and save it as any other Hugging Face model.

    pip install ".[hf]"
    python examples/huggingface.py

The model is a small LLaMA with random weights, so that nothing is downloaded; `from_pretrained` works the same way.
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import octavo

device = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, BATCH, STEPS = 64, 8, 40

config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR  # any scheduler drives octavo.AdamW

# Layers as small as these are faster in BF16, and on a GPU octavo would leave them: break_even=False shows FP8 all the same.
model, optimizer = octavo.initialize(model, optimizer, recipe="O2", break_even=False)
scheduler = schedule(optimizer, STEPS, eta_min=2e-4)

text = b"".join(path.read_bytes() for path in sorted(Path(json.__file__).parent.glob("*.py")))
data = torch.tensor(list(text))
for step in range(STEPS):
    starts = torch.randint(len(data) - LENGTH, (BATCH,))
    tokens = torch.stack([data[s : s + LENGTH] for s in starts]).to(device)
    with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # PyTorch's own works too
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:3d}  loss {loss.item():.3f}  lr {scheduler.get_last_lr()[0]:.1e}")

# export() turns the model back into plain tensors and classes: save it, serve it, or hand it to another library.
with tempfile.TemporaryDirectory() as folder:
    octavo.export(model).save_pretrained(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder).to(device)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
print(f"saved as safetensors and loaded by transformers: {'identical' if same else 'DIFFERENT'}")
