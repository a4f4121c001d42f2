"""AdamW: the same as torch where it can be, nothing lost where torch loses, and nothing changed where it must not be."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo.kernels as kernels
from octavo.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from octavo.optim import Adam, AdamW, clip_grad_norm_
from octavo.recipe import RECIPES, get_recipe
from octavo.tensor import ScaledTensor, cast, uncast

O2 = get_recipe("O2")
ROWS = ["O2", "paper", "paper-2b", "paper-3", "paper-4"]
MASTERS = (FP16, BF16, E4M3)


def weight(x: Tensor, fmt: Format = FP16) -> nn.Parameter:
    """A converted parameter."""
    return nn.Parameter(cast(x.detach(), fmt))


def fp8(grad: Tensor) -> ScaledTensor:
    return cast(grad, E4M3, residual_on_add=True)


def bits(*tensors: Tensor) -> list[Tensor]:
    """Copies of the bytes of tensors, a ScaledTensor as codes and scale."""
    out = []
    for tensor in tensors:
        parts = (tensor.codes, tensor.scale) if isinstance(tensor, ScaledTensor) else (tensor.detach(),)
        out += [part.contiguous().view(-1).view(torch.uint8).clone() for part in parts]
    return out


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def state_bits(optimizer: AdamW) -> list[Tensor]:
    return bits(*(value for state in optimizer.state.values() for _, value in sorted(state.items())))


@pytest.mark.parametrize("ours, theirs", [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
@pytest.mark.parametrize("maximize", [False, True])
def test_plain_fp32_is_torch(seed, ours, theirs, maximize):
    mine, other = nn.Parameter(torch.randn(31, 17)), None
    other = nn.Parameter(mine.detach().clone())
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": maximize}
    a, b = ours([mine], **options), theirs([other], **options)
    for _ in range(30):
        mine.grad = torch.randn(31, 17)
        other.grad = mine.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", ROWS)
def test_rows_of_table_6_follow_fp32(seed, row):
    """All recipes keep within the resolution of their formats for a while; formats and bytes are those of the row."""
    recipe = RECIPES[row]
    start = torch.randn(64, 40) * 0.02
    mine, exact = weight(start, recipe.master), nn.Parameter(start.clone())
    optimizer = AdamW([mine], lr=1e-3, recipe=recipe)
    other = torch.optim.AdamW([exact], lr=1e-3)
    for _ in range(20):
        grad = torch.randn(64, 40)
        mine.grad, exact.grad = fp8(grad), grad
        optimizer.step()
        other.step()
    state = optimizer.state[mine]
    assert state["exp_avg"].dtype == recipe.exp_avg.dtype
    assert state["exp_avg_sq"].dtype == recipe.exp_avg_sq.dtype
    assert isinstance(mine, ScaledTensor) and mine.format is recipe.master
    moved = (exact - start).norm()
    noise = start.norm() * recipe.master.eps * 4 + 0.1 * moved  # 3 mantissa bits in the gradient and in m
    assert (mine.dequantize() - exact).norm() < noise


def test_bytes_per_parameter(seed):
    mine = weight(torch.randn(128, 128))
    optimizer = AdamW([mine])
    mine.grad = fp8(torch.randn(128, 128))
    optimizer.step()
    tensors = [mine.codes, mine.scale, mine.grad.codes, mine.grad.scale, *optimizer.state[mine].values()]
    assert sum(t.numel() * t.element_size() for t in tensors) / mine.numel() == pytest.approx(6 + 4 / 128, abs=0.01)


@pytest.mark.parametrize("master", [FP16, BF16])
def test_D1_weight_decay_of_a_millionth_is_not_lost(seed, master):
    """p = 1, no gradient, lr·wd = 1e-6: after n steps p is e^(-n/1e6), and rounded to nearest it would still be 1."""
    steps, numel = 500, 40_000
    p = weight(torch.ones(numel), master)
    optimizer = AdamW([p], lr=1e-4, weight_decay=0.01)
    p.grad = fp8(torch.zeros(numel))
    for _ in range(steps):
        optimizer.step()
    decayed = 1 - p.dequantize().double().mean().item()
    sampling = 4 * math.sqrt(1e-6 * steps * master.eps / 2 / numel) / (1e-6 * steps)
    assert decayed == pytest.approx(1 - math.exp(-1e-6 * steps), rel=0.02 + sampling)


@pytest.mark.parametrize("master, update", [(FP16, 2e-4), (FP16, 1e-5), (BF16, 6e-4), (E4M3, 1e-3)])
def test_D2_constant_updates_below_half_a_step_drift_as_in_fp32(seed, master, update):
    p = weight(torch.ones(16384), master)
    optimizer = AdamW([p], lr=update, weight_decay=0.0)
    p.grad = fp8(torch.ones(16384))
    for _ in range(100):
        optimizer.step()
    sampling = 4 * math.sqrt(100 * update * master.eps / 16384) / (100 * update)
    assert 1 - p.dequantize().double().mean().item() == pytest.approx(100 * update, rel=0.02 + sampling)


def test_D2_plain_bf16_and_fp16_parameters_drift_too(seed):
    for dtype, update in ((torch.bfloat16, 6e-4), (torch.float16, 1e-4)):
        p = nn.Parameter(torch.ones(16384, dtype=dtype))
        optimizer = AdamW([p], lr=update, weight_decay=0.0)
        p.grad = torch.ones_like(p)
        for _ in range(100):
            optimizer.step()
        assert 1 - p.double().mean().item() == pytest.approx(100 * update, rel=0.05)


class Bigrams(nn.Module):
    """A byte model small enough for a unit test: two bytes predict the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.hidden = nn.Linear(64, 96)
        self.head = nn.Linear(96, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.embed(x[:, :2]).flatten(1))))


def text() -> Tensor:
    source = "".join(open(module.__file__).read() for module in (copy, dataclasses, warnings))
    return torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).long()


def train(recipe: str | None, steps: int, seed: int) -> float:
    """Mean loss of the last steps, with FP32 torch.optim.AdamW where recipe is None."""
    torch.manual_seed(seed)
    model, data = Bigrams(), text()
    if recipe is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    else:
        for layer in (model.hidden, model.head):
            layer.weight = weight(layer.weight, RECIPES[recipe].master)
        optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), recipe=recipe)
    losses = []
    for _ in range(steps):
        at = torch.randint(len(data) - 3, (256,))
        batch = torch.stack([data[at + i] for i in range(3)], 1)
        loss = F.cross_entropy(model(batch), batch[:, 2])
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            if recipe is not None and isinstance(param, ScaledTensor):
                grad = param.grad
                param.grad = fp8(grad.dequantize() if isinstance(grad, ScaledTensor) else grad)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-50:]) / 50


def test_D3_a_small_language_model_trains_as_in_fp32(seed):
    exact, ours = train(None, 300, seed), train("O2", 300, seed)
    assert ours < exact * 1.01, (exact, ours)


def test_D5_rare_rows_keep_their_moments(seed):
    """An embedding of which three rows get gradients near 1e-6 and one 1e2: converted or not, no row's moments are lost or blow up."""
    rare, grad = [3, 300, 700], torch.zeros(1000, 16)
    grad[rare] = 1e-6 * torch.empty(3, 16).uniform_(0.5, 2.0)
    grad[999] = 1e2
    for converted in (False, True):
        p = weight(torch.randn(1000, 16)) if converted else nn.Parameter(torch.randn(1000, 16))
        optimizer = AdamW([p], lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
        before = p.detach().clone()
        for _ in range(20):
            p.grad = grad  # plain: one FP8 scale cannot span eight decades
            optimizer.step()
        state = optimizer.state[p]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        if converted:
            m = kernels.uncast(m.view(-1), state["exp_avg_scale"], block=128).view(1000, 16)
            v = kernels.uncast(v, state["exp_avg_sq_scale"]) ** 2
        for rows in (rare, [999]):
            true_m, true_v = grad[rows] * (1 - 0.9**20), grad[rows] ** 2 * (1 - 0.95**20)
            assert (m[rows] - true_m).norm() <= (0.1 if rows == rare else 0.2) * true_m.norm(), (converted, rows)
            assert (v[rows] - true_v).norm() <= 0.01 * true_v.norm(), (converted, rows)
        moved = (uncast(p.detach()) - uncast(before)).abs()
        assert moved.max() <= 0.05  # 20·lr·c_t, and the rounding of weights of size 4
        assert moved[[row for row in range(1000) if row not in (*rare, 999)]].max() == 0


def test_D6_a_parameter_without_gradient_is_left_alone(seed):
    used, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = AdamW([*used.parameters(), *unused.parameters()], weight_decay=0.5)
    before = bits(*unused.parameters())
    used(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert same(before, bits(*unused.parameters()))
    assert all(param not in optimizer.state for param in unused.parameters())
    assert len(optimizer.state) == 2


@pytest.mark.parametrize("master", [None, *MASTERS])
def test_D7_zero_gradients_change_no_bit(seed, master):
    x = torch.randn(33, 9)
    x[0, :2] = torch.tensor([0.0, -0.0])
    p = nn.Parameter(x) if master is None else weight(x, master)
    optimizer = AdamW([p], weight_decay=0.0)
    p.grad = torch.zeros(33, 9) if master is None else fp8(torch.zeros(33, 9))
    before = bits(p) if master is None else [p.dequantize()]
    for _ in range(10):
        optimizer.step()
    assert same(before, bits(p) if master is None else [p.dequantize()])


def test_D8_two_hundred_infinite_gradients_change_nothing(seed):
    p, q = weight(torch.randn(8, 16)), nn.Parameter(torch.randn(5))
    optimizer = AdamW([p, q])
    p.grad, q.grad = fp8(torch.randn(8, 16)), torch.randn(5)
    optimizer.step()
    before = bits(p, q) + state_bits(optimizer)
    q.grad[2] = math.inf
    for _ in range(200):
        optimizer.step()
    assert same(before, bits(p, q) + state_bits(optimizer))
    assert optimizer.skipped_steps == 200 and optimizer.state[p]["step"] == 1
    q.grad[2] = 1.0
    optimizer.step()
    assert not same(before[:2], bits(p)) and optimizer.skipped_steps == 200


def test_a_poisoned_fp8_gradient_skips_all_groups(seed):
    p, q = weight(torch.randn(8, 16)), nn.Parameter(torch.randn(5))
    optimizer = AdamW([{"params": [p], "lr": 0.1}, {"params": [q]}])
    bad = torch.randn(8, 16)
    bad[3, 3] = math.nan
    p.grad, q.grad = fp8(bad), torch.randn(5)
    before = bits(p, q)
    optimizer.step()
    assert same(before, bits(p, q)) and optimizer.skipped_steps == 1


def test_D9_two_optimizers_share_a_grad_scaler(seed):
    p, q = weight(torch.randn(16, 16)), nn.Parameter(torch.randn(16))
    a, b = AdamW([p], lr=0.1), AdamW([q], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for bad in (False, True, False):
        before = bits(p), bits(q)
        for param in (p, q):
            param.grad = None
        x = torch.randn(4, 16)
        scaler.scale((F.linear(x, p) * q).square().mean()).backward()
        p.grad = fp8(p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad)
        if bad:
            q.grad[0] = math.inf
        scaler.step(a)
        scaler.step(b)
        scaler.update()
        assert not same(before[0], bits(p))
        assert same(before[1], bits(q)) == bad


def test_D13_a_learning_rate_schedule_recompiles_nothing(seed):
    layer = nn.Linear(8, 8)
    optimizer = AdamW(layer.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(4, 8)
    for _ in range(3):
        step(x)
        schedule.step()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(50):
            step(x)
            schedule.step()


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_set_the_learning_rate(seed, tensor_lr):
    p, q = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    a, b = AdamW([p], lr=lr), torch.optim.AdamW([q], lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (a, b)]
    for _ in range(6):
        p.grad = torch.randn(5)
        q.grad = p.grad.clone()
        for optimizer, schedule in zip((a, b), schedules, strict=True):
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(p, q)


def test_D17_unscale_then_clip_is_the_unscaled_run(seed):
    """A loss scale of 1024, taken back before clipping, gives the same bits as none."""
    start, grad = torch.randn(16, 16), torch.randn(16, 16)
    results = []
    for scale in (1.0, 1024.0):
        p, q = weight(start), nn.Parameter(start[0].clone())
        optimizer = AdamW([p, q], lr=0.01)
        p.grad, q.grad = fp8(grad * scale), grad[0] * scale
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_([p, q], 1.0)
        scaler.step(optimizer)
        results.append((norm, bits(p, q)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_D18_gradients_cannot_be_unscaled_twice(seed):
    p = weight(torch.randn(16, 16))
    optimizer = AdamW([p])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    p.grad = fp8(torch.randn(16, 16))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)


def test_D22_a_learning_rate_that_is_lost_is_reported(seed):
    p = weight(torch.rand(64) + 0.5)
    with pytest.warns(UserWarning, match="lr 1e-09 of parameter group 0 is lost"):
        AdamW([p], lr=1e-9).check_numerics()
    with pytest.warns(UserWarning, match="FP16 change in steps of about"):
        AdamW([p], lr=1e-5, recipe="paper").check_numerics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamW([p], lr=1e-5).check_numerics()


@pytest.mark.parametrize("row", ROWS)
def test_D24_extreme_settings(seed, row):
    recipe = RECIPES[row]
    x, grad = torch.randn(20, 30), torch.randn(20, 30)
    p = weight(x, recipe.master)
    before = bits(p)
    optimizer = AdamW([p], lr=0.0, weight_decay=0.0, recipe=recipe)
    for _ in range(3):
        p.grad = fp8(grad)
        optimizer.step()
    assert p.scale.item() != 1 or recipe.master is BF16
    real = kernels.uncast(before[0].view(recipe.master.dtype), before[1].view(torch.float32)[0]).view(x.shape)
    assert same(bits(p.dequantize()), bits(real))  # lr = 0 is the identity

    p = weight(x, recipe.master)
    optimizer = AdamW([p], lr=1e6, recipe=recipe)
    for _ in range(5):
        p.grad = fp8(grad)
        optimizer.step()
        assert p.dequantize().isfinite().all() and 0 < p.scale < math.inf
    assert optimizer.skipped_steps == 0

    for betas in ((0.0, 0.95), (0.0, 0.0), (0.9, 0.0)):
        p = weight(x, recipe.master)
        optimizer = AdamW([p], betas=betas, eps=0.0, recipe=recipe)
        for step in range(4):
            p.grad = fp8(grad * (step > 0))
            optimizer.step()
            assert p.dequantize().isfinite().all()
        assert optimizer.skipped_steps == 0


def test_lr_zero_keeps_codes_and_scale(seed):
    p = weight(torch.randn(20, 30))
    optimizer = AdamW([p], lr=0.0)
    before = bits(p)
    for _ in range(3):
        p.grad = fp8(torch.randn(20, 30))
        optimizer.step()
    assert same(before, bits(p))


@pytest.mark.parametrize("converted", [False, True])
def test_B13_strided_parameters_and_gradients(seed, converted):
    base, big = torch.randn(48, 32), torch.randn(32, 96)
    results = []
    for strided in (False, True):
        x, g = base.t(), big[:, ::2]
        if not strided:
            x, g = x.contiguous(), g.contiguous()
        if converted:
            reference = cast(base, FP16)
            codes = reference.codes.t() if strided else reference.codes.t().contiguous()
            p = nn.Parameter(ScaledTensor(codes.clone(), reference.scale.clone()))
            assert p.codes.is_contiguous() != strided
        else:
            p = nn.Parameter(x.clone())
            assert p.is_contiguous() != strided
        optimizer = AdamW([p], lr=0.1)
        for _ in range(3):
            p.grad = g
            optimizer.step()
        results.append(bits(p) + state_bits(optimizer))
    assert same(*results)


def test_gradient_forms(seed):
    """A gradient is an E4M3 tensor, one with a residual, or plain; other ScaledTensors are de-quantised."""
    x, grad = torch.randn(24, 16), torch.randn(24, 16)
    summed = fp8(grad)
    summed.add_(fp8(grad))
    assert summed.residual is not None
    for g in (fp8(grad), summed, grad, grad.bfloat16(), grad.half(), cast(grad, E5M2), cast(grad, FP16)):
        p, q = weight(x), weight(x)
        a, b = AdamW([p], lr=0.1), AdamW([q], lr=0.1)
        p.grad = g if g.dtype == p.dtype else None
        if p.grad is None:
            p = nn.Parameter(x.to(g.dtype))
            q = nn.Parameter(x.to(g.dtype))
            a, b = AdamW([p], lr=0.1), AdamW([q], lr=0.1)
            p.grad = g
        q.grad = (g.dequantize() if isinstance(g, ScaledTensor) else g).to(q.dtype)
        for _ in range(2):
            a.step()
            b.step()
        assert same(bits(p), bits(q))


def test_a_weight_changed_between_steps_is_seen(seed):
    """Loading, scaling or filling a parameter or a moment makes remembered maxima void: nothing saturates."""
    p = weight(torch.randn(30, 30))
    optimizer = AdamW([p], lr=1e-3, recipe=dataclasses.replace(RECIPES["paper"], clamp_update=True))
    p.grad = fp8(torch.randn(30, 30))
    optimizer.step()
    with torch.no_grad():
        p.copy_(torch.randn(30, 30) * 1000)
        optimizer.state[p]["exp_avg"].fill_(448.0)
    before = p.dequantize().clone()
    optimizer.step()
    assert (p.dequantize() - before).abs().max() < 0.5 + before.abs().max() * FP16.eps
    p.data = cast(torch.randn(30, 30) * 1e4, FP16)
    before = p.dequantize().clone()
    optimizer.step()
    assert (p.dequantize() - before).abs().max() <= before.abs().max() * FP16.eps


def test_the_cached_weight_cast_is_dropped_and_the_version_rises(seed):
    p = weight(torch.randn(8, 8))
    optimizer = AdamW([p])
    p.grad = fp8(torch.randn(8, 8))
    p._octavo_cast = object()
    version = p._version
    optimizer.step()
    assert not hasattr(p, "_octavo_cast") and p._version > version


def test_closure_groups_and_zero_grad(seed):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = AdamW([("p", p)], lr=0.1, weight_decay=0.0)
    optimizer.add_param_group({"params": [("q", q)], "lr": 0.2})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.sum() + q.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 6
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))
    torch.testing.assert_close(q.detach(), torch.full((3,), 0.8))
    optimizer.zero_grad()
    assert p.grad is None
    assert optimizer.step() is None


def test_C6_empty_parameters(seed):
    """A shard may own nothing; its state is complete and its step does nothing."""
    p, q, r = nn.Parameter(torch.empty(0, 64)), weight(torch.randn(4, 4)), weight(torch.empty(0, 8))
    optimizer = AdamW([p, q, r])
    for _ in range(2):
        p.grad, q.grad, r.grad = torch.empty(0, 64), fp8(torch.randn(4, 4)), fp8(torch.empty(0, 8))
        optimizer.step()
    assert all(optimizer.state[x]["step"] == 2 for x in (p, q, r))
    assert optimizer.state[r]["exp_avg_scale"].shape == (0,)


def test_reruns_are_bitwise_and_seeds_differ(seed):
    def run(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        p = weight(torch.randn(40, 40, generator=generator))
        optimizer = AdamW([p], seed=seed)
        for _ in range(5):
            p.grad = fp8(torch.randn(40, 40, generator=generator))
            optimizer.step()
        return bits(p) + state_bits(optimizer)

    assert same(run(3), run(3))
    assert not same(run(3), run(4))


def test_deepcopy_continues_alike(seed):
    p = weight(torch.randn(12, 12))
    optimizer = AdamW([p], recipe="paper-4", seed=5)
    p.grad = fp8(torch.randn(12, 12))
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    q = twin.param_groups[0]["params"][0]
    p.grad = fp8(torch.randn(12, 12))
    q.grad = p.grad.clone()
    optimizer.step()
    twin.step()
    assert q is not p and same(bits(p), bits(q))
    assert twin.recipe == optimizer.recipe


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": torch.ones(2)}, "lr has 2 elements"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] is -0.1"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay -0.1"),
        ({"betas": (0.9, 0.95, 0.9)}, "betas has 3 elements"),
        ({"eps": math.inf}, "eps is inf"),
        ({"weight_decay": math.inf}, "weight_decay inf"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"recipe": "O9"}, "no recipe is called 'O9'"),
    ],
)
def test_hyper_parameters_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.ones(2))], **options)


def test_parameters_that_cannot_be_optimized(seed):
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    for dtype in (torch.float64, torch.complex64):
        with pytest.raises(ValueError, match=f"parameter 1 is {dtype}: convert it"):
            AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=dtype))])
    with pytest.raises(ValueError, match="stored in E5M2"):
        AdamW([weight(torch.ones(2), E5M2)])
    optimizer = AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="lr is -2.0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -2.0})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError):
        AdamW([nn.Parameter(torch.ones(2))], amsgrad=True)


def test_gradients_that_cannot_be_used_leave_everything(seed):
    p, embedding = nn.Parameter(torch.randn(3)), nn.Embedding(10, 4, sparse=True)
    optimizer = AdamW([p, embedding.weight])
    before = bits(p, embedding.weight)
    p.grad = torch.randn(3)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    assert same(before, bits(p, embedding.weight)) and not optimizer.state


def test_plain_parameters_have_fp32_state_and_fp8_gradients_the_recipes(seed):
    p, q = nn.Parameter(torch.randn(4, 4).bfloat16()), nn.Parameter(torch.randn(4, 4))
    optimizer = AdamW([p, q])
    p.grad, q.grad = torch.randn(4, 4).bfloat16(), fp8(torch.randn(4, 4))
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == optimizer.state[p]["exp_avg_sq"].dtype == FP32.dtype
    assert optimizer.state[q]["exp_avg"].dtype == E4M3.dtype
