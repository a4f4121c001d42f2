"""Gradient release: the step of `clip_grad_norm_` and `AdamW` inside backward, its estimate of the norm, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training import assert_same_checkpoint, newest, small_config

from octavo.convert import initialize
from octavo.models import SIZES, Transformer
from octavo.optim import AdamW, clip_grad_norm_, release_gradients
from octavo.recipe import RECIPES
from octavo.tensor import ScaledTensor, uncast
from octavo.train.trainer import Trainer


def build(kind="gpt", recipe="O2", seed=0, **changes):
    config = dataclasses.replace(SIZES[{"gpt": "tiny", "llama": "tiny-llama"}[kind]], **changes)
    recipe = RECIPES.get(recipe) or dataclasses.replace(RECIPES["O2"], name="delayed", scaling="delayed")
    model = Transformer.build(config, recipe, seed=seed)
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, recipe=recipe)
    initialize(model, optimizer, recipe)
    return model, optimizer


def batches(steps, seed, length=24):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(257, (2, length + 1), generator=generator) for _ in range(steps)]
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def ordinary_step(model, optimizer, batch, max_norm):
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), math.inf if max_norm is None else max_norm)
    optimizer.step()
    return loss.detach(), norm


def tensors(model, optimizer, ignore=("grad_norm",)):
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.codes if isinstance(param, ScaledTensor) else param.detach()
        if isinstance(param, ScaledTensor):
            found[f"{name}.scale"] = param.scale
        for key, value in optimizer.state[param].items():
            if key not in ignore:
                found[f"{name}/{key}"] = value
    return {name: value.clone().contiguous().reshape(-1).view(torch.uint8) for name, value in found.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


CASES = [
    ("gpt", "bf16", "none"),
    ("llama", "O1", "none"),
    ("gpt", "O2", "none"),
    ("llama", "O2", "selective"),
    ("gpt", "O2", "full"),
    ("gpt", "paper", "none"),
    ("llama", "delayed", "full"),
]


@pytest.mark.parametrize(("kind", "recipe", "recompute"), CASES)
@pytest.mark.parametrize(("rule", "max_norm"), [("two_pass", 0.5), ("partial", None)], ids=["two_pass", "unclipped"])
def test_every_bit_is_that_of_the_ordinary_step(kind, recipe, recompute, rule, max_norm, seed):
    """Also with tied embeddings, which the tiny models have. Delayed scaling moves its windows once a step, not once a pass."""
    model, optimizer = build(kind, recipe, seed, recompute=recompute)
    other, reference = build(kind, recipe, seed, recompute=recompute)
    release = release_gradients(model, optimizer, max_norm, rule)
    for batch in batches(3, seed):
        loss = model(*batch)
        norm = release.step(loss)
        expected_loss, expected_norm = ordinary_step(other, reference, batch, max_norm)
        assert torch.equal(loss.detach(), expected_loss) and torch.equal(norm, expected_norm)
        assert all(param.grad is None for param in model.parameters())
    assert_same(tensors(model, optimizer), tensors(other, reference))
    assert optimizer.skipped_steps == 0 and release.partial_steps == 0


def test_no_two_gradients_live_at_a_time(seed):
    model, optimizer = build("gpt", "O2", seed, n_layers=3)
    most = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(p.grad is not None for p in model.parameters()))
        )
    release = release_gradients(model, optimizer)
    for batch in batches(2, seed):
        release.step(model(*batch))
    assert max(most) == 1


def test_partial_norm_is_exact_where_gradients_keep_their_proportions(seed):
    """With learning rate 0 the second step sees gradients a multiple of the first: every factor is then that of the exact rule."""
    model, optimizer = build("gpt", "bf16", seed, dtype=torch.float32)
    release = release_gradients(model, optimizer, 0.25)
    (batch,) = batches(1, seed)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    first = release.step(model(*batch))
    other, reference = build("gpt", "bf16", seed, dtype=torch.float32)
    for group in reference.param_groups:
        group["lr"] = 0.0
    ordinary_step(other, reference, batch, 0.25)
    factor = 3.0
    second = release.step(model(*batch) * factor)
    torch.testing.assert_close(second, factor * first)
    reference.zero_grad()
    (other(*batch) * factor).backward()
    clip_grad_norm_(other.parameters(), 0.25)
    reference.step()
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.state[param][key], reference.state[expected][key], rtol=1e-5, atol=1e-12
            )


def test_partial_norm_is_the_formula(seed):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = AdamW(model.parameters(), lr=1e-2, recipe="bf16")
    order = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(order.append)
    twin = copy.deepcopy(model)
    release = release_gradients(model, optimizer, 0.1)
    names = {id(param): name for name, param in model.named_parameters()}
    before, firsts = None, {}
    for _ in range(4):
        x = torch.randn(16, 8)
        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        twin(x).square().sum().backward()
        grads = {name: param.grad for name, param in twin.named_parameters()}
        order.clear()
        loss = model(x).square().sum()
        moments = {name: firsts.get(name, torch.zeros_like(g)) for name, g in grads.items()}
        norm = release.step(loss)
        backward = [names[id(param)] for param in order[-len(grads) :]]
        squares = {name: grads[name].double().square().sum() for name in backward}
        torch.testing.assert_close(norm, sum(squares.values()).sqrt())
        for k, name in enumerate(backward):
            total = sum(squares.values())
            if before is not None:
                seen = backward[: k + 1]
                total = sum(before.values()) * sum(squares[n] for n in seen) / sum(before[n] for n in seen)
            clipped = grads[name] * min(1.0, 0.1 / (total.sqrt().item() + 1e-6))
            firsts[name] = 0.9 * moments[name] + 0.1 * clipped
            torch.testing.assert_close(optimizer.state[dict(model.named_parameters())[name]]["exp_avg"], firsts[name])
        before = squares


@pytest.mark.parametrize("rule", ["partial", "two_pass"])
@pytest.mark.parametrize("recipe", ["bf16", "O2"])
def test_a_loss_that_is_not_finite_changes_nothing(recipe, rule, seed):
    model, optimizer = build("gpt", recipe, seed)
    release = release_gradients(model, optimizer, 1.0, rule)
    good, bad, after = batches(3, seed)
    release.step(model(*good))
    before, norms = tensors(model, optimizer), [optimizer.state[p]["grad_norm"].clone() for p in model.parameters()]
    for value in (math.nan, math.inf):
        release.step(model(*bad) * value)
    assert_same(tensors(model, optimizer), before)
    assert all(torch.equal(optimizer.state[p]["grad_norm"], n) for p, n in zip(model.parameters(), norms, strict=True))
    assert optimizer.skipped_steps == 2 and release.partial_steps == 0
    release.step(model(*after))
    assert optimizer.skipped_steps == 2
    assert all(uncast(param.detach()).isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("rule", ["partial", "two_pass"])
@pytest.mark.parametrize("recipe", ["bf16", "O2"])
def test_a_gradient_that_becomes_nan_half_way(recipe, rule, seed):
    """Two passes: nothing changes. Partial: what is nearer to the head has moved, the rest has not, all is finite, and it is counted."""
    model, optimizer = build("gpt", recipe, seed, tie_embeddings=False)
    release = release_gradients(model, optimizer, 1.0, rule)
    good, bad, after = batches(3, seed)
    release.step(model(*good))
    before = tensors(model, optimizer)
    handle = model.blocks[1].attention_norm.register_full_backward_hook(
        lambda module, grad_input, grad_output: tuple(g * math.nan for g in grad_input)
    )
    release.step(model(*bad))
    handle.remove()
    after_step = tensors(model, optimizer)
    moved = {
        name.split("/")[0].removesuffix(".scale") for name in before if not torch.equal(before[name], after_step[name])
    }
    if rule == "two_pass":
        assert not moved
    else:
        assert moved and {"lm_head.weight", "norm.weight"} <= moved
        assert not [name for name in moved if name.startswith(("blocks.0.", "embedding."))]
    assert optimizer.skipped_steps == 1 and release.partial_steps == (rule == "partial")
    release.step(model(*after))
    assert optimizer.skipped_steps == 1
    assert all(uncast(param.detach()).isfinite().all() for param in model.parameters())


def test_resume_is_bitwise(seed):
    data = batches(5, seed)
    model, optimizer = build("gpt", "O2", seed)
    release = release_gradients(model, optimizer, 0.5)
    for batch in data[:3]:
        release.step(model(*batch))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, resumed = build("gpt", "O2", seed + 1)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    continued = release_gradients(other, resumed, 0.5)
    for batch in data[3:]:
        release.step(model(*batch))
        continued.step(other(*batch))
    assert_same(tensors(model, optimizer, ignore=()), tensors(other, resumed, ignore=()))


def test_compiled_blocks(seed):
    pair = [build("gpt", "O2", seed, dtype=torch.float32) for _ in range(2)]
    for block in pair[0][0].blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    releases = [release_gradients(model, optimizer, 0.5) for model, optimizer in pair]
    for batch in batches(3, seed):
        norms = [release.step(model(*batch)) for release, (model, _) in zip(releases, pair, strict=True)]
        torch.testing.assert_close(*norms, rtol=2e-2, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_scheduler_and_hooks_see_the_step(seed):
    model, optimizer = build("gpt", "O2", seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    release = release_gradients(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(2, seed):
            release.step(model(*batch))
            scheduler.step()
    assert len(calls) == 2 and optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_frozen_and_unused_parameters(seed):
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4), "frozen": nn.Linear(4, 4)})
    model["frozen"].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    release = release_gradients(model, AdamW(model.parameters(), recipe="bf16"))
    for _ in range(2):
        release.step(model["frozen"](model["used"](torch.randn(3, 4))).square().sum())
    assert not model["frozen"].weight.requires_grad
    changed = {name.split(".")[0] for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"used"}


# --- several devices


class Copies(TorchDispatchMode):
    """Notes each copy to a device: (device, whether the host goes on)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            self.found.append((kwargs["device"], kwargs.get("non_blocking", False)))
        return func(*args, **kwargs)


class Stub(AdamW):
    """Updates nothing, but wants its flag, and gives it back, where the parameter is."""

    def update_parameter(self, group, param, offset, ok):
        assert ok.device == param.device
        self.state[param]["step"] = torch.zeros((), device=param.device)
        return ok & torch.ones((), dtype=torch.bool, device=param.device)


class StubLoss:
    """Backward that only finishes the gradients, last parameter first: that of tensors which hold nothing cannot run."""

    def __init__(self, params):
        self.params = params

    def detach(self):
        return torch.empty((), device=self.params[-1].device)

    def backward(self, retain_graph):
        for param in reversed(self.params):
            param.grad = torch.empty_like(param.detach())
            for hook in list(param._post_accumulate_grad_hooks.values()):
                hook(param)


@pytest.mark.parametrize("max_norm", [0.5, None])
@pytest.mark.parametrize("rule", ["partial", "two_pass"])
@pytest.mark.parametrize(
    "devices", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cuda:0")]
)
def test_scalars_of_parameters_on_several_devices(devices, rule, max_norm, monkeypatch):
    """Tensors of no memory on devices that need not exist: PyTorch checks that no operation mixes them. Nothing waits for a GPU but
    what a parameter on the CPU needs, and on one device nothing is copied."""
    monkeypatch.setattr(
        "octavo.optim.release.gradient_norms",
        lambda grads: [[torch.ones((), dtype=torch.float64, device=grads[0].device)]],
    )

    def scale(grad, factor, positive):
        assert factor.device == grad.device

    monkeypatch.setattr("octavo.optim.release.scale_gradient", scale)
    devices = [torch.device(device) for device in devices]
    home = next(device for device in devices if device.type == "cuda")
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
        params = nn.ParameterList([nn.Parameter(torch.empty(4, 4, device=device)) for device in devices])
        optimizer = Stub(params, recipe="bf16")
        release = release_gradients(params, optimizer, max_norm, rule)
        for _ in range(3):
            norm = release.step(StubLoss(list(params)))
            assert norm.device == release.partial_steps.device == optimizer.skipped_steps.device == home
            assert [optimizer.state[param]["grad_norm"].device for param in params] == devices
            assert all(param.grad is None for param in params)
    assert bool(copies.found) == (len(set(devices)) > 1)
    assert all(goes_on == (device.type == "cuda") for device, goes_on in copies.found)


def test_hooks_of_several_threads_come_one_by_one(seed, monkeypatch):
    """Backward has a thread for each device. Here two threads of the test finish gradients at once."""
    model = nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(2))
    release = release_gradients(model, AdamW(model.parameters(), recipe="bf16"), None)
    inside, most, update = [], [], AdamW.update_parameter

    def slow(self, group, param, offset, ok):
        inside.append(param)
        time.sleep(0.05)
        most.append(len(inside))
        result = update(self, group, param, offset, ok)
        inside.pop()
        return result

    monkeypatch.setattr(AdamW, "update_parameter", slow)
    x = torch.randn(4)
    parts = [layer(x).sum() for layer in model]

    def backward_of_parts(_):
        threads = [threading.Thread(target=part.backward) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    trunk = torch.ones((), requires_grad=True) * 1
    trunk.register_hook(backward_of_parts)
    norm = release.step(trunk * 1)
    assert most == [1, 1]
    torch.testing.assert_close(norm.float(), math.sqrt(2) * x.norm())


@pytest.mark.multigpu
@pytest.mark.parametrize(("rule", "max_norm"), [("two_pass", 0.05), ("partial", None)])
@pytest.mark.parametrize("recipe", ["bf16", "O2"])
def test_two_devices_step_as_ordinary(recipe, rule, max_norm, seed):
    first = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda:0")
    last = nn.Sequential(nn.GELU(), nn.Linear(256, 512)).to("cuda:1")
    models = [nn.ModuleDict({"first": first, "last": last})]
    models.append(copy.deepcopy(models[0]))
    optimizers = [AdamW(model.parameters(), lr=1e-2, recipe=recipe) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        initialize(model, optimizer, recipe)
    release = release_gradients(models[0], optimizers[0], max_norm, rule)

    def loss_of(model, x):
        return model["last"](model["first"](x).to("cuda:1")).square().mean()

    for factor in (1.0, 1.0, math.nan, 1.0):
        x = torch.randn(64, 256, device="cuda:0")
        norm = release.step(loss_of(models[0], x) * factor)
        optimizers[1].zero_grad()
        (loss_of(models[1], x) * factor).backward()
        expected = clip_grad_norm_(models[1].parameters(), math.inf if max_norm is None else max_norm)
        optimizers[1].step()
        torch.testing.assert_close(norm, expected, equal_nan=True)
    assert_same(tensors(models[0], optimizers[0]), tensors(models[1], optimizers[1]))
    assert optimizers[0].skipped_steps == 1 and release.partial_steps == 0


# --- what is refused


def build_segments(recipe, seed, shared=True):
    """A model of two checkpointed segments, and its loss of (x, use_reentrant)."""
    torch.manual_seed(seed)
    recipe = RECIPES.get(recipe) or dataclasses.replace(RECIPES["O2"], name="delayed", scaling="delayed")
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("stem", "one", "other", "head")})
    if shared:
        del model["other"]
    optimizer = AdamW(model.parameters(), lr=1e-2, recipe=recipe)
    initialize(model, optimizer, recipe)

    def loss(x, use_reentrant):
        hidden = model["stem"](x)
        for name in ("one", "one" if shared else "other"):
            hidden = checkpoint(lambda h, layer=model[name]: layer(h).tanh(), hidden, use_reentrant=use_reentrant)
        return model["head"](hidden).square().mean()

    return model, optimizer, loss


@pytest.mark.parametrize(("rule", "max_norm"), [("two_pass", 0.05), ("two_pass", None), ("partial", 0.05)])
@pytest.mark.parametrize("recipe", ["bf16", "O2", "delayed"])
def test_a_weight_of_several_reentrant_segments(recipe, rule, max_norm, seed):
    """The pass for the norms finds out, before anything changes; with the other kind of checkpointing the run goes on as if nothing was."""
    model, optimizer, loss = build_segments(recipe, seed)
    other, reference, expected_loss = build_segments(recipe, seed)
    release = release_gradients(model, optimizer, max_norm, rule)
    before = tensors(model, optimizer)
    x = torch.randn(16, 32)
    with pytest.raises(
        RuntimeError, match=r"one\.(weight|bias) \(32.*second gradient in one backward pass: .*use_reentrant=False"
    ):
        release.step(loss(x, True))
    assert all(param.grad is None for param in model.parameters())
    assert_same(tensors(model, optimizer), before)
    norm = release.step(loss(x, False))
    expected_loss(x, False).backward()
    assert torch.equal(norm, clip_grad_norm_(other.parameters(), math.inf if max_norm is None else max_norm))
    reference.step()
    assert_same(tensors(model, optimizer), tensors(other, reference))
    assert optimizer.skipped_steps == 0 and release.partial_steps == 0


@pytest.mark.parametrize("max_norm", [0.05, None])
def test_a_weight_of_several_reentrant_segments_without_a_pass_for_the_norms(max_norm, seed):
    model, optimizer, loss = build_segments("O2", seed)
    release = release_gradients(model, optimizer, max_norm)
    x = torch.randn(16, 32)
    release.step(loss(x, False))
    with pytest.raises(RuntimeError, match=r"after the first has updated it \(go on from a checkpoint\): use torch"):
        release.step(loss(x, True))
    assert all(param.grad is None for param in model.parameters())
    release.step(loss(x, False))
    assert optimizer.skipped_steps == 0 and release.partial_steps == 0


@pytest.mark.parametrize(("rule", "max_norm"), [("two_pass", 0.05), ("partial", None)])
def test_reentrant_segments_that_share_nothing(rule, max_norm, seed):
    model, optimizer, loss = build_segments("O2", seed, shared=False)
    other, reference, expected_loss = build_segments("O2", seed, shared=False)
    release = release_gradients(model, optimizer, max_norm, rule)
    for _ in range(2):
        x = torch.randn(16, 32)
        release.step(loss(x, True))
        reference.zero_grad()
        expected_loss(x, False).backward()
        clip_grad_norm_(other.parameters(), math.inf if max_norm is None else max_norm)
        reference.step()
    assert_same(tensors(model, optimizer), tensors(other, reference))


@pytest.mark.parametrize("rule", ["partial", "two_pass"])
def test_a_parameter_without_its_hook(rule, seed):
    model, optimizer = build("gpt", "O2", seed)
    other, reference = build("gpt", "O2", seed)
    release = release_gradients(model, optimizer, 0.5, rule)
    (batch,) = batches(1, seed)
    before, loss = tensors(model, optimizer), model(*batch)
    names = [name for name, _ in model.named_parameters()]
    name = names[int(torch.randint(len(names), ()))]
    param = model.get_parameter(name)
    hooks = param._post_accumulate_grad_hooks
    for key in [key for key, hook in hooks.items() if hook == release._finished]:
        del hooks[key]
    with pytest.raises(RuntimeError, match=rf"^{name} \({param.shape[0]},.*call remove\(\) .* release_gradients again"):
        release.step(loss)
    assert_same(tensors(model, optimizer), before)
    release.remove()
    # Backward has not run.
    norm = release_gradients(model, optimizer, 0.5, rule).step(loss)
    assert torch.equal(norm, ordinary_step(other, reference, batch, 0.5)[1])
    assert_same(tensors(model, optimizer), tensors(other, reference))


def test_a_frozen_or_later_parameter_without_its_hook(seed):
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    optimizer = AdamW(model.parameters(), recipe="bf16")
    release = release_gradients(model, optimizer)
    model[1].weight._post_accumulate_grad_hooks = None
    model[1].requires_grad_(False)
    release.step(model[0](torch.randn(2, 4)).sum())
    model[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"^1\.weight \(4, 4\) is without the hook"):
        release.step(model[0](torch.randn(2, 4)).sum())
    release.remove()
    release = release_gradients(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3))]})
    with pytest.raises(RuntimeError, match=r"^a parameter \(3,\) is without the hook"):
        release.step(model[0](torch.randn(2, 4)).sum())


def test_backward_outside_of_step_is_an_error(seed):
    model, optimizer = build("gpt", "O2", seed)
    release = release_gradients(model, optimizer)
    (batch,) = batches(1, seed)
    with pytest.raises(RuntimeError, match=r"GradientRelease.step\(loss\) instead"):
        model(*batch).backward()
    optimizer.zero_grad()
    release.step(model(*batch))
    release.remove()
    ordinary_step(model, optimizer, batch, 1.0)
    assert all(param.grad is not None for param in model.parameters())
    with pytest.raises(RuntimeError, match="was removed"):
        release.step(model(*batch))


def test_accumulation_is_refused(seed):
    model, optimizer = build("gpt", "O2", seed)
    (batch,) = batches(1, seed)
    model(*batch).backward()
    with pytest.raises(ValueError, match="one micro-batch a step"):
        release_gradients(model, optimizer)
    optimizer.zero_grad()
    release = release_gradients(model, optimizer)
    model.norm.weight.grad = torch.ones_like(model.norm.weight)
    with pytest.raises(ValueError, match="cannot add to it"):
        release.step(model(*batch))


def test_arguments(seed, monkeypatch):
    model, optimizer = build("gpt", "O2", seed)
    with pytest.raises(ValueError, match="SGD cannot"):
        release_gradients(model, torch.optim.SGD(model.norm.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="rule is 'guess'"):
        release_gradients(model, optimizer, rule="guess")  # type: ignore[arg-type]
    for norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm is"):
            release_gradients(model, optimizer, norm)
    with pytest.raises(ValueError, match=r"embedding.weight is trainable, but not in the optimizer"):
        release_gradients(model, AdamW(model.blocks.parameters(), recipe="O2"))
    with pytest.raises(ValueError, match="train on one GPU"):
        release_gradients(nn.DataParallel(model), optimizer)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="reduced over processes"):
        release_gradients(model, optimizer)
    assert not any(param._post_accumulate_grad_hooks for param in model.norm.parameters())


# --- in the trainer


@pytest.mark.parametrize("rule", ["partial", "two_pass"])
def test_a_run_that_stops_and_resumes_gives_the_same_bits(rule, tmp_path):
    settings = ["train.micro_batches=1", f"optim.release={rule}", "optim.clip=0.5", "train.steps=6", "recipe=O2"]
    whole = small_config(tmp_path, *settings, "checkpoint.every=3", "checkpoint.keep=2", f"out={tmp_path}/whole")
    Trainer(whole).run()
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000006")
    half = small_config(tmp_path, *settings, f"out={tmp_path}/half")
    Trainer(half, resume=True).run()
    assert_same_checkpoint(newest(whole), newest(half))


def test_the_trainer_refuses_accumulation(tmp_path):
    config = small_config(tmp_path, "train.micro_batches=2", "optim.release=partial")
    with pytest.raises(ValueError, match=r"optim.release=partial .* train.micro_batches=2: set it to 1"):
        Trainer(config)
