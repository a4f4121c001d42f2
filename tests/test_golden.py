"""A checkpoint that version 0.1 wrote is part of the repository: later versions load it, and go on from it bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo.tensor import ScaledTensor

GOLDEN = Path(__file__).parent / "golden" / "o2_0.1.pt"
"""State of model and optimizer after three steps at O2, the gradients of a fourth, and the model after it."""


def test_F16_an_old_checkpoint_loads_and_goes_on():
    saved = torch.load(GOLDEN, weights_only=True)
    model = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 48))
    plain = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 48))
    plain.load_state_dict(saved["state"]["model"])
    model, optimizer = octavo.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.5), "O2")
    model.load_state_dict(saved["state"]["model"])
    optimizer.load_state_dict(saved["state"]["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for name, param in model.named_parameters():
        param.grad = saved["gradients"][name]
        assert isinstance(param.grad, ScaledTensor) == isinstance(param, ScaledTensor)
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved["after"][name]), name
        assert not torch.equal(value, saved["state"]["model"][name])


@pytest.mark.parametrize("entry", ["codes", "scale"])
def test_F16_an_entry_that_is_missing_is_named(entry):
    gradient = next(
        g for g in torch.load(GOLDEN, weights_only=True)["gradients"].values() if isinstance(g, ScaledTensor)
    )
    rebuild, (state,) = gradient.__reduce_ex__(2)
    with pytest.raises(KeyError, match=entry):
        rebuild({name: value for name, value in state.items() if name != entry})
