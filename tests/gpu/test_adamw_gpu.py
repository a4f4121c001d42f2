"""The AdamW kernel equals its reference bit for bit, and a step neither waits for the device nor takes memory.

With TRITON_INTERPRET=1 the kernel runs on CPU, see `interpreter`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits
from torch import Tensor, nn

from octavo import kernels
from octavo.formats import BF16, E4M3, FP16, FP32
from octavo.kernels.reference import adamw as reference_adamw
from octavo.kernels.reference import adamw_scalars
from octavo.kernels.reference.adamw import Operands, UpdateFormats
from octavo.optim import AdamW, clip_grad_norm_
from octavo.recipe import RECIPES
from octavo.tensor import cast

pytestmark = [] if INTERPRETED else pytest.mark.gpu
needs_gpu = pytest.mark.gpu

O2 = UpdateFormats(FP16, E4M3, FP16, param_scaled=True, exp_avg_block=128, sqrt_exp_avg_sq=True)
PAPER = UpdateFormats(FP16, E4M3, FP16, param_scaled=True, clamp_ratio=False, stochastic=False)
ROWS = {
    "O2": O2,
    "O2 per tensor": replace(O2, exp_avg_block=None),
    "Adam": replace(O2, decoupled=False),
    "two blocks": replace(O2, param=E4M3, exp_avg_sq=E4M3, exp_avg_sq_block=2048),
    "short blocks": replace(O2, exp_avg_block=16, exp_avg_sq_block=64),
    "FP32": UpdateFormats(FP32, FP32, FP32),
    "BF16": UpdateFormats(BF16, FP32, FP32),
    "FP16": UpdateFormats(FP16, FP32, FP32),
    "FP32, small moments": replace(O2, param=FP32, param_scaled=False),
    "BF16, small moments": replace(O2, param=BF16, param_scaled=False, exp_avg_block=None, clamp_ratio=False),
    "paper": PAPER,
    "paper-2b": replace(PAPER, param=BF16),
    "paper-3": replace(PAPER, param=E4M3),
    "paper-4": replace(PAPER, exp_avg_sq=E4M3),
    "O2 nearest": replace(O2, stochastic=False),
    "paper, plain FP32": replace(PAPER, param=FP32, param_scaled=False),
    "paper-4, plain FP32": replace(PAPER, param=FP32, param_scaled=False, exp_avg_sq=E4M3),
    "paper-4, plain BF16": replace(PAPER, param=BF16, param_scaled=False, exp_avg_sq=E4M3),
}
GRADIENTS = ("FP32", "BF16", "FP16", "E4M3", "E4M11")
FLAT = ("param", "grad", "exp_avg", "exp_avg_sq")
SIZES = [0, 1, 7, 127, 128, 129, 1023, 128 * 33 - 1, 128 * 33 + 1]


def wild(n: int) -> Tensor:
    return torch.randn(n) * 10 ** torch.empty(n).uniform_(-5, 1)


def quantise(x: Tensor, fmt, block: int | None, scaled: bool = True) -> tuple[Tensor, Tensor]:
    if not scaled or (fmt in (FP32, BF16) and block is None):
        scale = torch.ones(())
    else:
        scale = kernels.scale_from_amax(kernels.amax(x, block=block), fmt.max)
    return kernels.cast(x, scale, fmt.dtype, block=block), scale


def case(n: int, formats: UpdateFormats, gradient: str, offset: int = 0) -> tuple[Operands, Tensor, Tensor, Tensor]:
    """One parameter on CPU: tensors of any scale, and the scalars, key and verdict that fit them."""
    grad, residual, grad_scale = wild(n), None, torch.ones(())
    if gradient == "E4M3":
        grad, grad_scale = quantise(grad, E4M3, None)
    elif gradient == "E4M11":
        grad_scale = kernels.scale_from_amax(kernels.amax(grad), E4M3.max)
        grad, residual = kernels.cast_residual(grad, grad_scale)
    else:
        grad = grad.to({"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}[gradient])
    p, p_scale = quantise(torch.randn(n) * 0.02, formats.param, None, formats.param_scaled)
    m, m_scale = quantise(wild(n), formats.exp_avg, formats.exp_avg_block)
    v, v_scale = quantise(wild(n) ** 2, formats.exp_avg_sq, formats.exp_avg_sq_block)
    one = torch.ones(())
    blocked = [
        s if block else None for s, block in ((m_scale, formats.exp_avg_block), (v_scale, formats.exp_avg_sq_block))
    ]
    single = [p_scale, one if formats.exp_avg_block else m_scale, one if formats.exp_avg_sq_block else v_scale]
    step = torch.tensor([5.0])
    columns, _, ok = adamw_scalars(
        step,
        torch.stack(single)[None],
        torch.stack([kernels.amax(codes) for codes in (p, m, v)])[None],
        grad_scale[None],
        kernels.amax(grad)[None],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        maximize=False,
        residual=residual is not None,
        formats=formats,
    )
    key = kernels.make_key(3, step.flatten()[0], 0, "cpu")
    return Operands(p, grad, residual, m, v, *blocked, offset), torch.stack(columns, 1)[0], key, ok


def together(cases: list) -> list:
    """The arguments of one call for many cases: operands, scalars, keys, ok, amaxes."""
    operands, scalars, keys, oks = zip(*cases, strict=True)
    return [list(operands), torch.stack(scalars), torch.stack(keys), torch.stack(oks).all(), torch.zeros(len(cases), 3)]


def on(arguments: list) -> list:
    def there(value):
        return value.to(DEVICE, copy=True) if isinstance(value, Tensor) else value

    return [[Operands(*map(there, one)) for one in arguments[0]], *map(there, arguments[1:])]


def flat(arguments: list) -> list[Tensor]:
    tensors = [value for one in arguments[0] for value in one] + arguments[1:]
    return [value for value in tensors if isinstance(value, Tensor)]


def check(cases: list, formats: UpdateFormats, ok: bool = True) -> None:
    from octavo.kernels.cuda import adamw

    if INTERPRETED:
        convert_exactly()
    arguments = together(cases)
    arguments[3] &= ok
    mine, reference = on(arguments), on(arguments)
    adamw(*mine, formats)
    reference_adamw(*reference, formats)
    for got, want in zip(flat(mine), flat(reference), strict=True):
        assert_same_bits(got, want)
    assert ok == any(not torch.equal(a.cpu(), b) for a, b in zip(flat(mine), flat(arguments), strict=True))


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("row", ROWS)
def test_kernel_equals_reference(seed, row, gradient):
    """Parameters of all sizes in one call, one of them with indices on both sides of 2^32."""
    formats = ROWS[row]
    check([case(n, formats, gradient, offset=2**32 - 200) for n in SIZES], formats)
    check([case(n, formats, gradient, offset=77 * n) for n in reversed(SIZES)], formats)


def test_kernel_equals_reference_for_gradients_of_several_dtypes_and_tensors_that_begin_anywhere(seed):
    cases = [case(n, ROWS["FP32"], gradient) for n in (1, 1000, 3000) for gradient in ("FP32", "BF16", "FP16")]
    check(cases, ROWS["FP32"])
    operands, *rest = case(2000, O2, "E4M3")
    shifted = operands._replace(**{name: value[3:] for name, value in operands._asdict().items() if name in FLAT})
    scales = operands.exp_avg_scales[: -(-1997 // 128)]
    check([(shifted._replace(exp_avg_scales=scales), *rest), case(500, O2, "E4M3")], O2)


@needs_gpu
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("row", ROWS)
def test_kernel_equals_reference_on_a_weight_of_the_7B_model(seed, row, gradient):
    check([case(4096 * 11008, ROWS[row], gradient, offset=3 * 2**32 - 12345)], ROWS[row])


def test_a_parameter_of_several_chunks(seed):
    check([case(n, O2, "E4M3", offset=5) for n in (3, 2 * 65_536 + 1030, 65_536)], O2)


def test_a_void_step_changes_nothing(seed):
    for formats in (O2, ROWS["FP32"]):
        check([case(1000, formats, "FP32"), case(7, formats, "FP32")], formats, ok=False)


@needs_gpu
def test_reference_is_the_same_on_both_devices(seed):
    for row in ROWS:
        here = together([case(5000, ROWS[row], "E4M3", offset=9)])
        there = on(here)
        reference_adamw(*here, ROWS[row])
        reference_adamw(*there, ROWS[row])
        for a, b in zip(flat(here), flat(there), strict=True):
            assert_same_bits(b.cpu(), a)


def model(recipe: str, shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    fmt = RECIPES[recipe].master
    assert fmt is not None
    params = [nn.Parameter(cast(torch.randn(shape, device="cuda") * 0.02, fmt)) for shape in shapes]
    return [
        *params,
        nn.Parameter(torch.randn(70, 30, device="cuda")),
        nn.Parameter(torch.randn(100, device="cuda")),
        nn.Parameter(torch.randn(50, device="cuda").bfloat16()),
    ]


def set_gradients(params: list[nn.Parameter], factor: float = 1.0) -> None:
    for param in params:
        grad = torch.randn(param.shape, device="cuda") * factor
        param.grad = cast(grad, E4M3) if hasattr(param, "codes") else grad.to(param.dtype)


@needs_gpu
@pytest.mark.parametrize("row", ["O2", "paper", "paper-4"])
def test_a_step_never_waits_for_the_device(seed, row):
    params = model(row, [(256, 384), (33, 65)])
    optimizer = AdamW(params, recipe=row)
    for number in range(4):
        set_gradients(params, float("nan") if number == 2 else 1.0)
        if number > 0:  # the first step has compiled
            torch.cuda.set_sync_debug_mode("error")
        try:
            clip_grad_norm_(params, 1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.skipped_steps == 1 and optimizer.state[params[0]]["step"] == 3


@needs_gpu
@pytest.mark.parametrize("row", ["O2", "paper"])
def test_a_step_takes_no_memory(seed, row):
    """At most 0.5 B per parameter beyond what stays."""
    params = model(row, [(4096, 4096)] * 3)
    optimizer = AdamW(params, recipe=row)
    for number in range(2):
        set_gradients(params)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        kept = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        assert peak - (kept if number == 0 else 0) <= 0.5 * 3 * 4096**2


@needs_gpu
def test_cpu_and_cuda_train_alike(seed):
    """Scalars, scales, rounding and skipping: a run on either device has the same bits."""
    for row in ("O2", "paper", "paper-4"):
        there = model(row, [(64, 96), (17, 3)])
        here = [nn.Parameter(p.detach().cpu()) for p in there]
        optimizers = AdamW(there, recipe=row, lr=1e-2), AdamW(here, recipe=row, lr=1e-2)
        for _ in range(5):
            set_gradients(there)
            for a, b in zip(there, here, strict=True):
                b.grad = a.grad.cpu()
            for optimizer in optimizers:
                optimizer.step()
        for a, b in zip(there, here, strict=True):
            for part in ("codes", "scale"):
                if hasattr(a, part):
                    assert_same_bits(getattr(a, part).cpu(), getattr(b, part))
            for key, value in optimizers[0].state[a].items():
                assert_same_bits(value.cpu(), optimizers[1].state[b][key])


@needs_gpu
def test_F5_a_state_mapped_to_cpu_goes_to_the_gpu(seed):
    params = model("O2", [(64, 64)])
    optimizer, fresh = AdamW(params), AdamW(params)
    set_gradients(params)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"] = {k: {n: v.cpu() for n, v in values.items()} for k, values in state["state"].items()}
    fresh.load_state_dict(state)
    fresh.step()
    assert all(value.is_cuda for values in fresh.state.values() for value in values.values())
    assert fresh.state[params[0]]["exp_avg"].dtype == E4M3.dtype
