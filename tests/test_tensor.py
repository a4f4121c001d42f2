"""ScaledTensor as a value, a parameter, a gradient and a citizen of PyTorch: copies, files, modules, optimizers, autograd, compile.

Single operations are in test_tensor_ops.py.
"""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from octavo.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from octavo.tensor import ScaledTensor, cast, uncast

FORMATS = (E4M3, E5M2, FP16, BF16)
HALF_STEP = {E4M3: 2**-4, E5M2: 2**-3, FP16: 2**-11, BF16: 2**-8}


class ScaledGradient(torch.autograd.Function):
    """A linear map whose weight gradient leaves backward in FP8."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ uncast(weight.detach()).t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ uncast(weight), cast(grad.t() @ x, E4M3, residual_on_add=True)


def parameter(x: Tensor, fmt: Format | None) -> nn.Parameter:
    return nn.Parameter(x.clone() if fmt is None else cast(x, fmt))


def snr(value: Tensor, exact: Tensor) -> float:
    """Signal-to-noise ratio in dB."""
    return 10 * math.log10(exact.detach().square().sum() / (value - exact).detach().square().sum())


def same(a: ScaledTensor, b: ScaledTensor) -> bool:
    """Whether codes, scale and residual agree bit for bit."""
    if (a.residual is None) != (b.residual is None):
        return False
    parts = [(a.codes, b.codes), (a.scale, b.scale)] + ([] if a.residual is None else [(a.residual, b.residual)])
    return all(x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y)) for x, y in parts)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


# --- values


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_are_within_half_a_step(seed, fmt):
    for exponent in (-30, -3, 0, 12, 40):
        x = torch.randn(33, 17) * 2.0**exponent
        t = cast(x, fmt)
        bound = x.abs() * HALF_STEP[fmt] + fmt.smallest / 2 / t.scale
        assert ((t.dequantize() - x).abs() <= bound).all()
        assert t.codes.dtype is fmt.dtype and t.format is fmt and t.dtype is torch.float32
        assert torch.equal(t.dequantize(), t.codes.float() / t.scale)
        assert math.frexp(t.scale.item())[0] == 0.5, "a power of two"


@pytest.mark.parametrize("fmt", FORMATS)
def test_A1_zero_tensor(fmt):
    t = cast(torch.zeros(64, 64), fmt)
    assert t.scale == 1 and (t.dequantize() == 0).all()
    x = torch.randn(4, 512)
    x[1, 128:256] = 0
    blocked = cast(x, fmt, block=128)
    assert (blocked.dequantize()[1, 128:256] == 0).all() and blocked.scale.isfinite().all()
    t.add_(0.0).mul_(2.0)
    assert (t.dequantize() == 0).all() and t.scale.isfinite()


@pytest.mark.parametrize("amax", [1e-38, 1e-40, 1e-45])
@pytest.mark.parametrize("fmt", FORMATS)
def test_A4_tiny_amax_gives_a_finite_scale(fmt, amax):
    x = torch.full((16, 16), amax)
    for t in (cast(x, fmt), cast(torch.ones(16, 16), fmt).copy_(x), cast(x, fmt, block=4)):
        assert t.scale.isfinite().all() and (t.scale > 0).all()
        value = t.dequantize()
        assert value.isfinite().all()
        # FP32 division may flush results below 2^-126.
        assert ((value - x).abs() <= amax * HALF_STEP[fmt] + 2.0**-126).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_value_that_is_not_finite_poisons_the_whole(seed, fmt, bad):
    x = torch.randn(8, 8)
    x[3, 4] = bad
    written = cast(torch.randn(8, 8), fmt)
    written[3, 4] = bad
    accumulated = cast(torch.randn(8, 8), E4M3, residual_on_add=True).add_(x)
    multiplied = cast(torch.randn(8, 8), fmt).mul_(torch.tensor(math.nan))
    for t in (cast(x, fmt), written, accumulated, multiplied, cast(torch.ones(8, 8), fmt).copy_(x)):
        assert t.dequantize().isnan().all()
        assert t.scale.isfinite() and t.scale > 0
        assert not torch.isfinite(t).any() and t.norm().isnan()
        t.zero_().add_(1.0)
        assert (t == 1).all(), "writing finite values cures it"
    blocked = cast(x, fmt, block=4)
    assert blocked.dequantize().isnan().sum() == 4, "of a blocked tensor only the block"


@pytest.mark.parametrize("fmt", FORMATS)
def test_F10_casting_again_changes_nothing(seed, fmt):
    x = torch.randn(10_000, 16) * torch.exp2(torch.randint(-40, 40, (10_000, 1)))
    t = cast(x, fmt, block=16)
    again = cast(t.dequantize(), fmt, block=16)
    # A block whose largest value was rounded down to a power of two may get the next scale; values are what must not change.
    assert torch.equal(again.dequantize(), t.dequantize())
    assert same(again, cast(again.dequantize(), fmt, block=16))
    exact = (fmt.max / x.abs().amax(-1, keepdim=True)).clamp(max=2.0**126)
    t = cast(x, fmt, exact, block=16)
    again = cast(t.dequantize(), fmt, exact, block=16)
    assert torch.equal(again.codes.float(), t.codes.float()), "with exact scales, too"


def test_B14_slices_are_cast_as_their_copies(seed):
    big = torch.randn(12, 40)
    for part in (big[3], big[:, 5:37], big[::3, ::2], big.t(), big.expand(2, 12, 40), big[0, 0], big[:0]):
        for fmt in FORMATS:
            assert same(cast(part, fmt), cast(part.clone(), fmt))


def test_given_scale_and_rounding(seed):
    x = torch.randn(64, 64)
    scale = torch.tensor(100.0)
    t = cast(x, E4M3, scale)
    t.mul_(2.0)
    assert t.scale == 50 and scale == 100, "the scale given is not the tensor's own"
    key = torch.tensor(seed, dtype=torch.int32)
    mean = sum(cast(x, E4M3, rounding="stochastic", key=key, offset=i * x.numel()).dequantize() for i in range(64)) / 64
    assert snr(mean, x) > snr(cast(x, E4M3).dequantize(), x) + 10


def test_logical_dtype_hides_but_keeps_the_values(seed):
    t = cast(torch.randn(32, 32), FP16)
    low = t.bfloat16()
    assert isinstance(low, ScaledTensor) and low.dtype is torch.bfloat16 and same(low, t)
    assert torch.equal(low.dequantize(), t.dequantize().bfloat16())
    assert torch.equal(low.float().dequantize(), t.dequantize())
    assert torch.equal(low.dequantize(torch.float32), t.dequantize())
    assert type(t.int()) is Tensor and type(t.to(torch.float8_e5m2)) is Tensor


def test_errors_say_what_to_do():
    codes, scale = torch.zeros(4, 8, dtype=torch.float8_e4m3fn), torch.ones(())
    cases = {
        "x.float\\(\\)": lambda: cast(torch.ones(3, dtype=torch.int64), E4M3),
        "fmt is 'e4m3'.*E4M3, E5M2": lambda: cast(torch.ones(3), "e4m3"),
        "keep the plain tensor": lambda: cast(torch.ones(3), FP32),
        "block is 0": lambda: cast(torch.ones(3), E4M3, block=0),
        "codes are torch.float32": lambda: ScaledTensor(torch.ones(3), scale),
        "logical dtype": lambda: ScaledTensor(codes, scale, torch.float8_e5m2),
        "need float32": lambda: ScaledTensor(codes, scale.half()),
        "block=4": lambda: ScaledTensor(codes, scale, block=4),
        "a residual extends E4M3": lambda: ScaledTensor(codes.half(), scale, residual_on_add=True),
        "need int8": lambda: ScaledTensor(codes, scale, residual=torch.zeros(4, 8)),
        "no scale of its own": lambda: cast(torch.ones(4, 8), E4M3, block=4)[0].scale,
    }
    for message, action in cases.items():
        with pytest.raises(ValueError, match=message):
            action()
    with pytest.raises(NotImplementedError, match="changes the shape"):
        cast(torch.ones(2, 3), FP16).t_()


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_scales_that_cannot_be(value):
    for scale in (value, torch.tensor(value)):
        with pytest.raises(ValueError, match=f"scale is {value}"):
            cast(torch.ones(3), E4M3, scale)
    with pytest.raises(ValueError, match=f"scale is {value}"):
        cast(torch.ones(2, 8), E4M3, torch.tensor([[1.0, 2.0], [value, 1.0]]), block=4)


def test_a_scale_may_be_a_number(seed):
    x = torch.randn(30)
    a, b = cast(x, E4M3, 8.0), cast(x, E4M3, torch.tensor(8.0))
    assert torch.equal(a.codes.float(), b.codes.float()) and a.scale == b.scale


def test_looks_like_a_tensor(seed):
    t = cast(torch.tensor([[1.0, -2.0]]), E4M3)
    assert repr(t) == "ScaledTensor([[ 1., -2.]], format=E4M3, scale=128.0)"
    assert "requires_grad=True" in repr(nn.Parameter(t)) and "meta" in repr(t.to("meta"))
    assert "blocks of 2" in repr(cast(torch.ones(1, 4), FP16, block=2))
    assert {t: 1}[t] == 1 and hash(t) == id(t)
    assert t.tolist() == [[1.0, -2.0]] and t.numpy().tolist() == t.tolist()
    with pytest.raises(RuntimeError, match="requires grad"):
        nn.Parameter(t).numpy()
    assert isinstance(t, Tensor) and isinstance(nn.Parameter(t), nn.Parameter) and not isinstance(t, nn.Parameter)
    assert type(torch.zeros_like(t)) is Tensor, "new values start in full precision"


# --- views


def test_views_share_memory_and_version(seed):
    t = cast(torch.randn(6, 8), FP16)
    for view in (t.detach(), t.data, t.t(), t[2:4], t.view(-1), t.unbind(1)[0]):
        assert view.codes.untyped_storage().data_ptr() == t.codes.untyped_storage().data_ptr()
    version = t._version
    t[0].zero_()
    assert t._version > version and (t[0] == 0).all()


def test_residual_is_shared_with_views(seed):
    t = cast(torch.randn(6, 8), E4M3, residual_on_add=True)
    alias, row = t.detach(), t[2]
    t.add_(torch.randn(6, 8))
    assert torch.equal(alias.dequantize(), t.dequantize()) and torch.equal(row.dequantize(), t.dequantize()[2])
    alias.mul_(1.7)
    row.mul_(torch.tensor(-0.3))
    assert torch.equal(alias.dequantize(), t.dequantize()) and torch.equal(row.dequantize(), t.dequantize()[2])


def test_setting_data(seed):
    t = cast(torch.randn(3, 4), E4M3)
    old, x = t.detach(), torch.randn(3, 4)
    before = old.dequantize()
    t.data = x
    assert same(t, cast(x, E4M3)) and torch.equal(old.dequantize(), before), "data is replaced, not written"
    other = cast(torch.randn(5), FP16)
    t.data = other
    assert same(t, other) and t.shape == (5,)
    t.add_(1)
    assert torch.equal(t.dequantize(), other.dequantize()), "and shared with a ScaledTensor"


# --- copies and files


@pytest.mark.parametrize("kind", ["tensor", "parameter", "residual", "blocked", "frozen"])
def test_F15_saves_without_pickled_code(seed, tmp_path, kind):
    x = torch.randn(6, 10)
    t = {
        "tensor": lambda: cast(x, E4M3),
        "parameter": lambda: nn.Parameter(cast(x.bfloat16(), FP16)),
        "residual": lambda: cast(x, E4M3, residual_on_add=True).add_(x),
        "blocked": lambda: cast(x, E5M2, block=4),
        "frozen": lambda: nn.Parameter(cast(x, BF16), requires_grad=False),
    }[kind]()
    torch.save({"t": t, "tied": t}, tmp_path / "t.pt")
    loaded = torch.load(tmp_path / "t.pt", weights_only=True)
    for other in (loaded["t"], copy.deepcopy(t), copy.copy(t)):
        assert type(other) is ScaledTensor and isinstance(other, nn.Parameter) == isinstance(t, nn.Parameter)
        assert same(other, t) and (other.dtype, other.requires_grad, other.block) == (t.dtype, t.requires_grad, t.block)
        assert other.residual_on_add == t.residual_on_add
    assert loaded["tied"] is loaded["t"]
    meta = torch.load(tmp_path / "t.pt", weights_only=True, map_location="meta")["t"]
    assert meta.is_meta and meta.codes.is_meta and meta.scale.is_meta


def test_F16_files_may_gain_and_must_keep_entries(seed):
    """An old reader's dict with unknown entries still loads."""
    t = cast(torch.randn(3), FP16)
    rebuild, (state,) = t.__reduce_ex__(2)
    assert same(rebuild({**state, "added later": 1}), t)
    assert set(state) == {
        "codes",
        "scale",
        "dtype",
        "block",
        "residual",
        "residual_on_add",
        "requires_grad",
        "parameter",
    }


def test_F17_copies_are_independent(seed):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight = parameter(torch.randn(8, 8), FP16)
    model[1].weight = model[0].weight  # tied
    model[0].weight.grad = cast(torch.randn(8, 8), E4M3)
    duplicate = copy.deepcopy(model)
    assert duplicate[0].weight is duplicate[1].weight and duplicate[0].weight is not model[0].weight
    x = torch.randn(3, 8)
    assert torch.equal(duplicate(x), model(x))
    before = model(x)
    with torch.no_grad():
        duplicate[0].weight[0] += 1
        duplicate[1].weight.mul_(3.0)
    assert torch.equal(model(x), before)


def test_shared_memory_between_processes_is_not_needed_to_pickle(seed):
    buffer = io.BytesIO()
    model = nn.Linear(4, 4)
    model.weight = parameter(torch.randn(4, 4), FP16)
    torch.save(model, buffer)
    buffer.seek(0)
    assert same(torch.load(buffer, weights_only=False).weight, model.weight)


# --- modules


def linear(fmt: Format = FP16, **options) -> nn.Linear:
    layer = nn.Linear(16, 8, **options)
    layer.weight = parameter(layer.weight.detach(), fmt)
    return layer


def test_A12_dtype_changes_of_the_module_lose_nothing(seed):
    layer = linear()
    weight, before = layer.weight, copy.deepcopy(layer.weight)
    for change in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float):
        change(layer)
        assert layer.weight is weight, "optimizers keep their parameter"
        assert layer.weight.dtype is layer.bias.dtype and layer.weight.scale.dtype is torch.float32
        assert same(layer.weight, before) and layer.weight.requires_grad
    layer.weight.grad = cast(torch.randn(8, 16), E4M3)
    layer.bfloat16().float()
    assert isinstance(layer.weight.grad, ScaledTensor) and layer.weight is weight


def test_A11_bf16_module_keeps_fp32_scales_through_steps(seed):
    layer = linear().bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(torch.randn(4, 16, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert layer.weight.scale.dtype is torch.float32 and layer.weight.dtype is torch.bfloat16


def test_meta_to_empty_and_initialisation(seed):
    layer = linear().to("meta")
    assert isinstance(layer.weight, ScaledTensor) and layer.weight.is_meta and layer.weight.codes.is_meta
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight, ScaledTensor) and layer.weight.scale == 1
    for init, std in (
        (lambda w: nn.init.normal_(w, std=0.02), 0.02),
        (lambda w: nn.init.trunc_normal_(w, std=0.02), 0.02),
        (nn.init.kaiming_uniform_, (1 / 8) ** 0.5),
        (nn.init.xavier_normal_, (1 / 12) ** 0.5),
        (lambda w: nn.init.sparse_(w, 0.0, std=0.5), 0.5),
    ):
        assert init(layer.weight) is layer.weight
        assert 0.6 * std < layer.weight.std() < 1.4 * std
    nn.init.orthogonal_(layer.weight)
    torch.testing.assert_close(layer.weight @ layer.weight.t(), torch.eye(8), atol=2e-3, rtol=0)
    layer.reset_parameters()


@pytest.mark.parametrize("fmt", FORMATS)
def test_uniform_samples_stay_inside(seed, fmt):
    """`trunc_normal_` of many libraries takes erfinv of a uniform sample, which is infinite at the bounds."""
    t = cast(torch.empty(100_000), fmt)
    for low, high in ((-1.0, 1.0), (0.0, 1.0), (0.3, 0.7), (-5.0, -2.0)):
        t.uniform_(low, high)
        assert low <= t.min() and t.max() < high
        assert abs(t.mean() - (low + high) / 2) < (high - low) / 20
    t.uniform_(-1, 1).erfinv_().mul_(0.02 * math.sqrt(2)).add_(0).clamp_(-2, 2)
    assert 0.015 < t.std() < 0.022 and t.abs().max() < 0.12
    assert (t.uniform_(2, 2) == 2).all()


def test_load_state_dict(seed):
    layer, plain = linear(), nn.Linear(16, 8)
    weight = layer.weight
    layer.load_state_dict(plain.state_dict())
    assert layer.weight is weight and same(weight, cast(plain.weight, FP16))
    other = linear()
    other.load_state_dict(layer.state_dict())
    assert same(other.weight, layer.weight)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight, layer.weight.dequantize()) and type(plain.weight) is nn.Parameter


def test_averaged_model(seed):
    """An average in E4M3 or FP16 is rounded at each update, but follows."""
    model = nn.Sequential(linear(), nn.ReLU(), linear(bias=False).half().float())
    model[2] = nn.Linear(8, 4)
    reference = copy.deepcopy(model)
    reference[0].weight = nn.Parameter(model[0].weight.dequantize().detach())
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}):
        ours, plain = AveragedModel(model, **options), AveragedModel(reference, **options)
        for _ in range(5):
            noise = torch.randn(8, 16)
            with torch.no_grad():
                model[0].weight.add_(noise)
                reference[0].weight.copy_(model[0].weight)
            ours.update_parameters(model)
            plain.update_parameters(reference)
        averaged = ours.module[0].weight
        assert isinstance(averaged, ScaledTensor)
        assert snr(averaged.dequantize(), plain.module[0].weight) > 55


def test_tied_weight_gets_both_gradients(seed):
    embedding, x = nn.Embedding(8, 16), torch.tensor([[1, 5, 5]])
    embedding.weight = parameter(torch.randn(8, 16), FP16)
    plain = nn.Parameter(embedding.weight.dequantize().detach())
    head = linear(bias=False)
    head.weight = embedding.weight
    head(embedding(x)).square().sum().backward()
    F.linear(F.embedding(x, plain), plain).square().sum().backward()
    torch.testing.assert_close(uncast(embedding.weight.grad), plain.grad)


# --- autograd


@pytest.mark.parametrize("fmt", [*FORMATS, "blocked"])
def test_linear_with_a_scaled_parameter(seed, fmt):
    x = torch.randn(5, 16)
    w = cast(torch.randn(8, 16), E4M3, block=5) if fmt == "blocked" else cast(torch.randn(8, 16), fmt)
    ours, plain = nn.Parameter(w), nn.Parameter(w.dequantize())
    results = []
    for weight in (ours, plain):
        inputs = x.clone().requires_grad_()
        out = F.linear(inputs, weight, torch.ones(8)).relu()
        out.square().sum().backward()
        results.append((out, inputs.grad, weight.grad))
    for a, b in zip(*results, strict=True):
        assert type(a) is Tensor
        torch.testing.assert_close(a, b)


def test_dequantize_is_differentiable(seed):
    p = parameter(torch.randn(8, 16), FP16)
    (p.dequantize(torch.bfloat16) * 3).sum().backward()
    assert (p.grad == 3).all() and p.grad.dtype is torch.float32
    assert not p.detach().dequantize().requires_grad
    with torch.no_grad():
        assert not p.dequantize().requires_grad


@pytest.mark.parametrize("fmt", [None, FP16], ids=["plain parameter", "FP16 parameter"])
def test_autograd_accumulates_scaled_gradients(seed, fmt):
    p = parameter(torch.randn(8, 16), fmt)
    total, casts = 0, 0
    for number in range(6):
        x = torch.randn(5, 16)
        ScaledGradient.apply(x, p).sum().backward()
        total = total + torch.ones(8, 5) @ x
        casts = casts + cast(torch.ones(8, 5) @ x, E4M3).dequantize()
        assert isinstance(p.grad, ScaledTensor) and p.grad.format is E4M3
        assert (p.grad.residual is not None) == (number > 0), "one byte until there is something to add"
    assert snr(p.grad.dequantize(), total) > snr(casts, total) - 0.5
    p.grad = None
    ScaledGradient.apply(x, p).sum().backward(retain_graph=False)
    again = p.grad
    p.grad = None
    ScaledGradient.apply(x, p).sum().backward()
    assert same(again, p.grad), "the first gradient is kept as it is"


@pytest.mark.parametrize("fmt", [None, FP16], ids=["plain parameter", "FP16 parameter"])
def test_a_parameter_used_twice(seed, fmt):
    p, x = parameter(torch.randn(8, 16), fmt), torch.randn(5, 16)
    (ScaledGradient.apply(x, p).sum() + ScaledGradient.apply(2 * x, p).sum()).backward()
    assert snr(uncast(p.grad), 3 * torch.ones(8, 5) @ x) > 24


def test_plain_gradient_then_scaled_and_back(seed):
    a, b = torch.randn(8, 16), torch.randn(8, 16)
    for first, second in ((a, cast(b, E4M3)), (cast(a, E4M3, residual_on_add=True), b)):
        p = nn.Parameter(torch.zeros(8, 16))
        p.grad = first.clone()
        p.grad += second
        assert type(p.grad) is type(first) and snr(uncast(p.grad), a + b) > 28


def test_accumulating_a_constant_keeps_the_sum(seed):
    """E4M3 alone, rounded to nearest, keeps 5% to 47% of it, and stochastically all, with much noise."""
    x = cast(torch.randn(128, 128), E4M3).dequantize()
    total = cast(x, E4M3, residual_on_add=True)
    alone = cast(x, E4M3)
    for _ in range(319):
        total += x
        alone += x
    kept = total.dequantize() / (320 * x)
    assert abs((total * x).sum() / (320 * x * x).sum() - 1) < 0.01
    assert 0.97 < kept[x != 0].min() and kept[x != 0].max() < 1.03
    assert snr(total.dequantize(), 320 * x) > 45
    assert snr(alone.dequantize(), 320 * x) < 20
    high_byte = ScaledTensor(total.codes, total.scale)
    assert snr(high_byte.dequantize(), 320 * x) > 28, "the codes alone are the sum in E4M3"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulating_noise_is_as_good_as_fp32(seed, dtype):
    gradients = [cast((torch.randn(128, 128) + 0.2).to(dtype), E4M3) for _ in range(64)]
    exact = sum(g.dequantize(torch.float32) for g in gradients)
    true = exact + torch.randn_like(exact) * exact.std() * 0.01  # what any sum is worth: its terms have 4% noise each
    total = cast(gradients[0], E4M3, residual_on_add=True)
    for gradient in gradients[1:]:
        total.add_(gradient)
    assert snr(total.dequantize(torch.float32), exact) > 45
    assert snr(total.dequantize(torch.float32), true) > snr(exact, true) - 1


INCREMENTS = {
    "add_": lambda t, d: t.add_(d, alpha=1.0),
    "sub_": lambda t, d: t.sub_(-d),
    "data.add_": lambda t, d: t.data.add_(d),
    "addcmul_": lambda t, d: t.addcmul_(d, torch.ones_like(d)),
    "addcdiv_": lambda t, d: t.addcdiv_(d, torch.ones_like(d)),
    "lerp_": lambda t, d: t.lerp_(uncast(t.detach()) + 100 * d.to(t.dtype), 0.01),
    "foreach_add_": lambda t, d: torch._foreach_add_([t], [d]),
    "foreach_addcdiv_": lambda t, d: torch._foreach_addcdiv_([t], [d], [torch.ones_like(d)], value=1.0),
    "part": lambda t, d: [half.add_(d[:32]) for half in t.chunk(2)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INCREMENTS)
def test_D2_small_increments_are_not_lost(seed, name, dtype):
    """A thousand increments of 2e-5, a 25th of a step of FP16: round-to-nearest would keep none."""
    if name == "lerp_" and dtype is torch.bfloat16:
        pytest.skip("its increment is lost in the bfloat16 end point")
    t = cast((1 + torch.rand(64, 64)).to(dtype), FP16)
    start, increment = t.dequantize(torch.float32), torch.full((64, 64), 2e-5, dtype=dtype)
    for _ in range(1000):
        INCREMENTS[name](t, increment)
    drift = (t.dequantize(torch.float32) - start).mean()
    assert abs(drift / (1000 * increment[0, 0].float()) - 1) < 0.02
    for _ in range(10):
        before = t.dequantize()
        INCREMENTS[name](t, torch.zeros_like(increment))
        assert torch.equal(t.dequantize(), before), "what does not change does not move"


def test_caches_see_every_write(seed):
    t = nn.Parameter(cast(torch.randn(4, 4), E4M3, residual_on_add=True), requires_grad=False)
    writes = (
        lambda: t.add_(1),
        lambda: t.mul_(2.0),
        lambda: t.mul_(torch.tensor(0.3)),
        lambda: t.data.mul_(2.0),
        lambda: t.data[0].zero_(),
        lambda: t.detach().copy_(t.clone()),
        lambda: t.data.copy_(torch.ones(4, 4)),
        lambda: torch._foreach_add_([t.data], 1.0),
    )
    for write in writes:
        version = t.codes._version
        write()
        assert t.codes._version > version
    shared = nn.Parameter(cast(torch.randn(4, 4), FP16))
    assert not shared.is_shared() and shared.share_memory_().is_shared() and shared.scale.is_shared()


# --- stock clipping, scaling and optimizers


def test_D11_stock_code_on_a_stored_gradient(seed):
    p = parameter(torch.randn(8, 16), FP16)
    p.grad = cast(torch.randn(8, 16), E4M3, residual_on_add=True)
    real = p.grad.dequantize()
    assert torch.equal(p.grad.view(-1).dequantize(), real.view(-1))
    assert torch.equal(p.grad.reshape(16, 8).dequantize(), real.reshape(16, 8))
    torch.testing.assert_close(p.grad.norm(), real.norm())
    assert torch.equal(p.grad.add_(1.0).dequantize(), p.grad.data.float().dequantize())
    p.grad.view(-1)[:5].zero_()
    assert (p.grad.flatten()[:5] == 0).all() and (p.grad.flatten()[5:] != 0).any()
    p.grad.detach_().zero_()
    assert (p.grad == 0).all()


@pytest.mark.parametrize("foreach", [False, True])
def test_stock_clip_changes_the_scale_only(seed, foreach):
    parameters = [parameter(torch.randn(8, 16), FP16), nn.Parameter(torch.randn(4)), parameter(torch.randn(3, 3), None)]
    gradients = [
        cast(torch.randn(8, 16), E4M3),
        torch.randn(4),
        cast(torch.randn(3, 3), E4M3, residual_on_add=True).add_(0.1),
    ]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    norm = nn.utils.clip_grad_norm_(parameters, 0.5, foreach=foreach)
    real = torch.cat([uncast(g).flatten() for g in gradients])
    torch.testing.assert_close(norm, real.norm())
    clipped = torch.cat([uncast(p.grad).flatten() for p in parameters])
    torch.testing.assert_close(clipped, real * (0.5 / (norm + 1e-6)), rtol=1e-5, atol=1e-6)
    before, after = gradients[0].codes.float(), parameters[0].grad.codes.float()
    assert torch.equal(after * (before.max() / after.max()), before), "the same codes, up to a power of two"
    again = [uncast(p.grad).clone() for p in parameters]
    nn.utils.clip_grad_norm_(parameters, 100.0, foreach=foreach)
    assert all(torch.equal(uncast(p.grad), g) for p, g in zip(parameters, again, strict=True)), (
        "below the limit: no change"
    )


def test_clip_grad_value(seed):
    p = parameter(torch.randn(8, 16), FP16)
    p.grad = cast(torch.randn(8, 16), E4M3)
    real = p.grad.dequantize()
    nn.utils.clip_grad_value_([p], 0.5)
    assert torch.equal(p.grad.dequantize(), real.clamp(-0.5, 0.5))


@pytest.mark.parametrize("value", [1.0, 1e15, math.inf, math.nan])
def test_A13_stock_clip_hides_no_bad_gradient(value):
    p = nn.Parameter(torch.ones(8, 16))
    p.grad = cast(torch.full((8, 16), 0.5), E4M3)
    p.grad[0, 0] = value
    norm = nn.utils.clip_grad_norm_([p], 1.0)
    if math.isfinite(value):
        assert norm.isfinite() and abs(p.grad.norm() - 1) < 1e-3
    else:
        assert norm.isnan() and p.grad.dequantize().isnan().all() and p.grad.scale.isfinite()


@pytest.mark.parametrize("fmt", [None, FP16], ids=["plain parameter", "FP16 parameter"])
def test_D9_grad_scaler_with_two_optimizers(seed, fmt):
    first, second = parameter(torch.randn(8, 16), fmt), parameter(torch.randn(8, 16), fmt)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(5, 16)
    scaler.scale(ScaledGradient.apply(x, first).sum() + ScaledGradient.apply(x, second).sum()).backward()
    scaler.unscale_(optimizers[0])
    assert torch.equal(first.grad, cast(torch.ones(8, 5) @ x, E4M3)), "a power of two: exact"
    before = [uncast(p).detach().clone() for p in (first, second)]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for p, old in zip((first, second), before, strict=True):
        torch.testing.assert_close(uncast(p).detach(), old - 0.1 * p.grad.dequantize(), rtol=1e-3, atol=2e-3)
        p.grad = None
    # An overflow: both steps are skipped, the loss scale halves.
    before = [p.detach().clone() for p in (first, second)]
    scaler.scale(ScaledGradient.apply(x * math.inf, first).sum() + ScaledGradient.apply(x, second).sum()).backward()
    scaler.unscale_(optimizers[0])
    assert first.grad.dequantize().isnan().all() and first.grad.scale.isfinite()
    scaler.step(optimizers[0])
    assert torch.equal(first, before[0])
    scaler.step(optimizers[1])
    scaler.update()
    assert scaler.get_scale() == 512


STOCK = {
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.05, **o),
    "SGD momentum": lambda p, **o: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=0.02, **o),
    "AdamW amsgrad": lambda p, **o: torch.optim.AdamW(p, lr=0.02, amsgrad=True, maximize=True, **o),
    "RMSprop": lambda p, **o: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.05, **o),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("fmt", [None, FP16], ids=["plain parameter", "FP16 parameter"])
def test_stock_optimizers(seed, fmt, name, foreach):
    """Like the same optimizer on plain tensors with the same gradients, but for rounding of an FP16 parameter."""
    start = torch.randn(8, 16)
    p, plain = parameter(start, fmt), nn.Parameter(start.clone())
    ours, theirs = STOCK[name]([p], foreach=foreach), STOCK[name]([plain], foreach=foreach)
    for _ in range(10):
        p.grad = cast(torch.randn(8, 16), E4M3, residual_on_add=True)
        plain.grad = p.grad.dequantize()
        ours.step()
        theirs.step()
        ours.zero_grad(set_to_none=False)
        assert (p.grad == 0).all()
    moved = plain.detach() - start
    assert snr(uncast(p).detach() - start, moved) > 30
    state = torch.load(_saved(ours.state_dict()), weights_only=True)
    STOCK[name]([p], foreach=foreach).load_state_dict(state)


def _saved(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def test_autocast(seed):
    layer, x = linear(), torch.randn(4, 16)
    plain = F.linear(x.bfloat16(), layer.weight.dequantize().bfloat16(), layer.bias.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, plain)
    out.sum().backward()
    assert layer.weight.grad.dtype is torch.float32


@torch.inference_mode()
def test_inference_mode(seed):
    layer, x = linear(), torch.randn(4, 16)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight.dequantize(), layer.bias))
    t = cast(torch.randn(6, 4), FP16)
    t.reshape(-1)[3:7] = 2.0
    t.narrow(0, 2, 2).flatten().mul_(3.0)
    assert (t.dequantize().flatten()[3:7] == 2).all()


# --- torch.compile


def _loss(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).relu().square().sum()


@torch.no_grad()
def _write(weight: Tensor) -> None:
    weight.mul_(-0.5)
    weight[3].zero_()
    weight.t()[0].add_(100)
    torch._foreach_mul_([weight], 1.5)


COMPILED = {
    "linear": lambda x, p: _loss(x, p),
    "dequantize": lambda x, p: x @ p.dequantize().t(),
    "codes": lambda x, p: x @ (p.codes.float() / p.scale).t(),
    "cast": lambda x, p: cast(x, E4M3) @ p.t(),
    "logical dtype": lambda x, p: x.bfloat16() @ p.bfloat16().t(),
    "return a view": lambda x, p: p.t(),
    "write": lambda x, p: _write(p),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_a_graph_break(seed, name):
    _check_compiled(name, "aot_eager")


@pytest.mark.slow
def test_compiles_with_inductor(seed):
    _check_compiled("linear", "inductor")


def _check_compiled(name: str, backend: str) -> None:
    torch._dynamo.reset()
    function = COMPILED[name]
    w, x = cast(torch.randn(8, 16), FP16), torch.randn(4, 16)
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
        weight, inputs = nn.Parameter(copy.deepcopy(w)), x.clone().requires_grad_()
        for _ in range(2):  # accumulates
            out = run(inputs, weight)
            if type(out) is Tensor and out.requires_grad:
                out.float().square().sum().backward()
        results.append((out, weight.detach(), inputs.grad, weight.grad))
    for eager, compiled in zip(*results, strict=True):
        assert type(eager) is type(compiled)
        if eager is not None:
            torch.testing.assert_close(
                uncast(compiled), uncast(eager), rtol=2**-8 if name == "write" else 1e-4, atol=1e-4
            )
