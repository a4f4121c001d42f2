"""The kernels before and after the passes of an AdamW step equal their references bit for bit.

With TRITON_INTERPRET=1 they run on CPU, see `interpreter`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits
from torch import Tensor

from octavo import kernels
from octavo.formats import BF16, E4M3, FP16, FP32
from octavo.kernels import Numbers, UpdateSettings, reference
from octavo.kernels.reference.adamw import UpdateFormats, has_scale

pytestmark = [] if INTERPRETED else pytest.mark.gpu

O2 = UpdateFormats(FP16, E4M3, FP16, param_scaled=True, exp_avg_block=128, sqrt_exp_avg_sq=True)
PAPER = UpdateFormats(FP16, E4M3, FP16, param_scaled=True, clamp_ratio=False, stochastic=False)
FORMATS = {
    "O2": O2,
    "Adam": replace(O2, decoupled=False),
    "blocks": replace(O2, param=E4M3, exp_avg_sq=E4M3, exp_avg_sq_block=32),
    "FP32": UpdateFormats(FP32, FP32, FP32),
    "BF16": UpdateFormats(BF16, FP32, FP32),
    "paper": PAPER,
    "paper-2b": replace(PAPER, param=BF16),
    "paper-3": replace(PAPER, param=E4M3),
    "paper-4": replace(PAPER, exp_avg_sq=E4M3),
}
SETTINGS = UpdateSettings(1e-3, (0.9, 0.95), 1e-8, 0.1, False, 3, False, O2)


@pytest.fixture(autouse=True)
def exact_conversions() -> None:
    if INTERPRETED:
        convert_exactly()


def number(low: float, high: float) -> Tensor:
    return torch.exp2(torch.empty(()).uniform_(low, high))


def power(low: int, high: int) -> Tensor:
    return torch.exp2(torch.randint(low, high, ()).float())


def numbers(formats: UpdateFormats, scaled_gradient: bool = True, zero: bool = False) -> Numbers:
    """Of one parameter, anywhere within the range of its formats."""
    scales = [
        power(-20, 20) if stored else None
        for stored in (
            formats.param_scaled,
            has_scale(formats.exp_avg, formats.exp_avg_block),
            has_scale(formats.exp_avg_sq, formats.exp_avg_sq_block),
        )
    ]
    maxima = torch.stack(
        [number(-9, math.log2(min(fmt.max, 1e9))) for fmt in (formats.param, formats.exp_avg, formats.exp_avg_sq)]
    )
    return Numbers(
        torch.randint(0, 100_000 if torch.rand(()) < 0.5 else 20, ()).float(),
        *scales,
        torch.zeros(3) if zero else maxima,
        power(-20, 20) * torch.rand(()).add(0.5) if scaled_gradient else None,
        torch.zeros(()) if zero else number(-9, 8.8),
    )


def on(buckets: list[list[Numbers]]) -> list[list[Numbers]]:
    """Copies on the device."""
    return [
        [Numbers(*(None if part is None else part.to(DEVICE, copy=True) for part in one)) for one in bucket]
        for bucket in buckets
    ]


def check(buckets: list[list[Numbers]], settings: list[UpdateSettings], ok: bool = True) -> None:
    """Results of both, and all tensors after a commit."""
    from octavo.kernels import cuda

    mine, other = on(buckets), buckets
    got, want = cuda.adamw_prepare(mine, settings), reference.adamw_prepare(other, settings)
    assert bool(got.ok) == bool(want.ok) == ok
    for name in ("scalars", "keys", "scales", "maxima"):
        for here, there in zip(got.spans, want.spans, strict=True):
            assert_same_bits(getattr(got, name)[here].cpu(), getattr(want, name)[there])
    for here, there in zip(got.spans, want.spans, strict=True):
        new = torch.rand(there.stop - there.start, 3)
        got.maxima[here], want.maxima[there] = new.to(DEVICE), new
    cuda.adamw_commit(mine, got, got.ok)
    reference.adamw_commit(other, want, want.ok)
    for bucket, other_bucket in zip(mine, other, strict=True):
        for one, two in zip(bucket, other_bucket, strict=True):
            for a, b in zip(one, two, strict=True):
                if a is not None:
                    assert_same_bits(a.cpu(), b)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 5, 127, 129, 300])
def test_kernels_equal_references(name, count, seed):
    formats = FORMATS[name]
    check([[numbers(formats) for _ in range(count)]], [SETTINGS._replace(formats=formats)])


@pytest.mark.parametrize(
    "betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5), (0.0, 0.0), (0.9, 0.0), (0.95, 0.9), (0.9, 0.81)]
)
@pytest.mark.parametrize("name", ["O2", "Adam", "paper-4"])
def test_settings(name, betas, seed):
    """Also of beta1² >= beta2, where the bound of the ratio diverges, and of a learning rate of zero."""
    for lr, eps, weight_decay in ((0.0, 0.0, 0.0), (1e-3, 1e-8, 0.1), (10.0, 1e-3, 1.0)):
        settings = UpdateSettings(lr, betas, eps, weight_decay, True, -5, True, FORMATS[name])
        check([[numbers(FORMATS[name], zero=zero) for zero in (False, True, False)]], [settings])


def test_several_buckets_in_one_launch(seed):
    buckets = [
        [numbers(formats, formats.param_scaled) for _ in range(3 + n)] for n, formats in enumerate(FORMATS.values())
    ]
    settings = [
        SETTINGS._replace(lr=10.0**-n, seed=2**40 + n, formats=formats) for n, formats in enumerate(FORMATS.values())
    ]
    check(buckets, settings)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_one_bad_gradient_voids_the_step_of_all(value, seed):
    buckets = [[numbers(O2) for _ in range(140)], [numbers(FORMATS["FP32"], False) for _ in range(3)]]
    buckets[1][1] = buckets[1][1]._replace(grad_amax=torch.tensor(value))
    check(buckets, [SETTINGS, SETTINGS._replace(formats=FORMATS["FP32"])], ok=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_on_the_device(dtype, seed):
    from octavo.kernels import cuda

    own = [[numbers(O2) for _ in range(3)]]
    for lr in (torch.tensor(0.1, dtype=dtype), torch.tensor([0.1], dtype=dtype)):
        got = cuda.adamw_prepare(on(own), [SETTINGS._replace(lr=lr.to(DEVICE))])
        want = reference.adamw_prepare(own, [SETTINGS._replace(lr=lr)])
        assert_same_bits(got.scalars[:3].cpu(), want.scalars)


def test_keys_are_those_of_make_key(seed):
    own = [[numbers(O2) for _ in range(20)]]
    for number in (0, 1, -7, 2**31, 2**40 + 5, -(2**50)):
        from octavo.kernels import cuda

        keys = cuda.adamw_prepare(on(own), [SETTINGS._replace(seed=number)]).keys
        for one, key in zip(own[0], keys[:20], strict=True):
            assert key == kernels.make_key(number, one.step + 1, 0, "cpu")


@pytest.mark.gpu
def test_settings_compile_nothing(seed):
    """Nor do other numbers of parameters."""
    from octavo.kernels.cuda.adamw_step_kernels import _adamw_commit, _adamw_prepare

    def compiled() -> list[int]:
        return [len(cache[0]) for kernel in (_adamw_prepare, _adamw_commit) for cache in kernel.device_caches.values()]

    check([[numbers(O2) for _ in range(3)]], [SETTINGS])
    before = compiled()
    for count in (1, 16, 200):
        for lr in (0.0, 1.0, 1e-5, torch.tensor(0.1)):
            check([[numbers(O2) for _ in range(count)]], [SETTINGS._replace(lr=lr, maximize=True, seed=count)])
    assert compiled() == before
