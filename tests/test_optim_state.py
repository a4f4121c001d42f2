"""The state of AdamW: plain tensors, bitwise resume, no cast on loading, no sharing."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo.formats import E4M3, FP16
from octavo.optim import Adam, AdamW
from octavo.recipe import RECIPES
from octavo.tensor import ScaledTensor, cast

ROWS = ["O2", "paper", "paper-2b", "paper-3", "paper-4"]


class Pair:
    """A converted and a plain parameter with their optimizer."""

    def __init__(
        self, recipe: str = "O2", values: list[Tensor] | None = None, kind: type[AdamW] = AdamW, **options: Any
    ):
        values = values or [torch.randn(20, 30), torch.randn(30)]
        fmt = RECIPES[recipe].master
        assert fmt is not None
        self.params = [nn.Parameter(cast(values[0], fmt)), nn.Parameter(values[1].clone())]
        self.optimizer = kind(self.params, lr=1e-2, recipe=recipe, **options)

    def step(self, grads: tuple[Tensor, Tensor]) -> None:
        self.params[0].grad, self.params[1].grad = cast(grads[0], E4M3), grads[1].clone()
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [self.params[0].dequantize().detach(), self.params[1].detach()]

    def bits(self) -> list[Tensor]:
        w = self.params[0]
        states = [v for p in self.params for _, v in sorted(self.optimizer.state[p].items())]
        tensors = [w.codes, w.scale, self.params[1].detach(), *states]
        return [t.contiguous().view(-1).view(torch.uint8).clone() for t in tensors]


def gradients() -> tuple[Tensor, Tensor]:
    return torch.randn(20, 30), torch.randn(30)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def through_file(state: dict) -> dict:
    """As a user saves and loads it, with nothing but plain tensors allowed."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("row", ROWS)
def test_D23_resume_is_bitwise(seed, row):
    """Real-valued weights and the optimizer's state_dict in a fresh pair: the same codes and scales, and the same run."""
    pair, stream = Pair(row), [gradients() for _ in range(8)]
    for grads in stream[:5]:
        pair.step(grads)
    state = pair.optimizer.state_dict()
    saved, weights = through_file(state), [value.clone() for value in pair.values()]
    assert {"master_scale", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "step"} == set(
        saved["state"][0]
    )

    fresh = Pair(row)
    with torch.no_grad():
        for param, value in zip(fresh.params, weights, strict=True):
            param.copy_(value)
    fresh.optimizer.load_state_dict(saved)
    assert same(pair.bits(), fresh.bits())
    for grads in stream[5:]:
        pair.step(grads)
        fresh.step(grads)
        assert same(pair.bits(), fresh.bits())


def test_the_saved_master_scale_is_restored_but_never_loses_values(seed):
    pair = Pair()
    for _ in range(3):
        pair.step(gradients())
    saved = through_file(pair.optimizer.state_dict())
    stored = saved["state"][0]["master_scale"]
    coarse = Pair(values=pair.values())
    saved["state"][0]["master_scale"] = stored / 2
    coarse.optimizer.load_state_dict(saved)
    assert same([pair.values()[0]], [coarse.values()[0]])
    saved["state"][0]["master_scale"] = stored * 2**20  # would saturate
    coarse.optimizer.load_state_dict(saved)
    assert same([pair.values()[0]], [coarse.values()[0]])


def test_F5_states_keep_their_dtypes_and_go_to_the_parameter(seed):
    """torch's own loading would cast all of these to the dtype of the parameter."""
    pair = Pair()
    pair.step(gradients())
    state = pair.optimizer.state_dict()
    state["state"][0]["step"] = 1  # as other optimizers save it
    fresh = Pair()
    fresh.optimizer.load_state_dict(state)
    for mine, theirs in zip(fresh.params, pair.params, strict=True):
        for key, value in pair.optimizer.state[theirs].items():
            loaded = fresh.optimizer.state[mine][key]
            assert (loaded.dtype, loaded.shape, loaded.device) == (value.dtype, value.shape, mine.device)
    fresh.step(gradients())
    assert fresh.optimizer.state[fresh.params[0]]["step"] == 2


def test_F6_frozen_parameters_and_partial_states_round_trip(seed):
    pair = Pair()
    pair.step(gradients())
    pair.params[0].requires_grad_(False)
    pair.params[0].grad = None
    pair.params[1].grad = torch.randn(30)
    pair.optimizer.step()
    fresh = Pair(values=pair.values())
    fresh.params[0].requires_grad_(False)
    fresh.optimizer.load_state_dict(through_file(pair.optimizer.state_dict()))
    assert same(pair.bits(), fresh.bits())

    partial = Pair()
    partial.params[1].grad = torch.randn(30)
    partial.optimizer.step()
    fresh = Pair()
    fresh.optimizer.load_state_dict(through_file(partial.optimizer.state_dict()))
    assert set(fresh.optimizer.state) == {fresh.params[1]}
    fresh.step(gradients())


def test_F7_step_is_a_scalar_and_the_state_plain(seed):
    pair = Pair()
    pair.step(gradients())
    for state in pair.optimizer.state_dict()["state"].values():
        assert state["step"].shape == () and state["step"].dtype == torch.float32
        assert all(type(value) is Tensor for value in state.values())


def test_F11_loading_fills_the_present_state_and_shares_nothing(seed):
    pair, other = Pair(), Pair()
    pair.step(gradients())
    other.step(gradients())
    state = pair.optimizer.state_dict()
    pointers = {key: value.data_ptr() for key, value in other.optimizer.state[other.params[0]].items()}
    other.optimizer.load_state_dict(state)
    for key, value in other.optimizer.state[other.params[0]].items():
        assert value.data_ptr() == pointers[key]
    fresh = Pair(values=pair.values())
    fresh.optimizer.load_state_dict(state)  # into no state at all
    before = pair.bits()
    fresh.step(gradients())
    other.step(gradients())
    assert same(before, pair.bits())


def test_a_state_of_other_formats_is_refused_before_anything_changes(seed):
    saved, fresh = Pair("paper"), Pair("O2")
    saved.step(gradients())
    fresh.step(gradients())
    before = fresh.bits()
    with pytest.raises(ValueError, match=r"saved with exp_avg E4M3, .* but recipe 'O2' keeps .*sqrt of FP16"):
        fresh.optimizer.load_state_dict(saved.optimizer.state_dict())
    assert same(before, fresh.bits())


@pytest.mark.parametrize("ours, theirs", [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
def test_a_state_of_torch_goes_on_in_fp32(seed, ours, theirs):
    values = [cast(torch.randn(20, 30), FP16).dequantize(), torch.randn(30)]
    params = [nn.Parameter(value.clone()) for value in values]
    other = theirs(params, lr=1e-2)
    pair = Pair(values=values, kind=ours)
    for step in range(6):
        grads = gradients()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        other.step()
        if step == 2:
            with torch.no_grad():
                for mine, param in zip(pair.params, params, strict=True):
                    mine.copy_(param)
            pair.optimizer.load_state_dict(other.state_dict())
        elif step > 2:
            for mine, grad in zip(pair.params, grads, strict=True):
                mine.grad = grad.clone()
            pair.optimizer.step()
    assert pair.optimizer.state[pair.params[0]]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(pair.values()[1], params[1].detach())
    torch.testing.assert_close(pair.values()[0], params[0].detach(), rtol=4 * FP16.eps, atol=1e-5)
    amsgrad = torch.optim.AdamW(params, amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad"):
        pair.optimizer.load_state_dict(amsgrad.state_dict())


def test_hooks_of_the_user_see_plain_states(seed):
    pair, fresh = Pair(), Pair()
    pair.step(gradients())
    seen = []
    fresh.optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(type(state["state"][0]["exp_avg"])))
    fresh.optimizer.register_load_state_dict_post_hook(lambda o: seen.append(type(o.state[fresh.params[0]]["exp_avg"])))
    for _ in range(2):
        fresh.optimizer.load_state_dict(pair.optimizer.state_dict())
    assert seen == [Tensor] * 4


def test_a_mismatched_state_raises_as_in_torch(seed):
    pair = Pair()
    pair.step(gradients())
    other = AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="doesn't match the size"):
        other.load_state_dict(pair.optimizer.state_dict())


def test_groups_are_restored(seed):
    pair = Pair(seed=11, weight_decay=0.3)
    pair.optimizer.param_groups[0]["lr"] = 0.123
    fresh = Pair()
    fresh.optimizer.load_state_dict(through_file(pair.optimizer.state_dict()))
    assert {k: v for k, v in fresh.optimizer.param_groups[0].items() if k != "params"} == {
        k: v for k, v in pair.optimizer.param_groups[0].items() if k != "params"
    }
    assert isinstance(fresh.params[0], ScaledTensor)
