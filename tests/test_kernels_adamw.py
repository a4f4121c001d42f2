"""The AdamW pass and its scalars: each operation in FP32 in the written order, bounds that hold, bits that depend on nothing else."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from octavo import kernels
from octavo.formats import BF16, E4M3, FP16, FP32, Format
from octavo.kernels.reference import adamw as reference_adamw
from octavo.kernels.reference import adamw_scalars
from octavo.kernels.reference.adamw import MULTIPLIERS, Operands, Scalars, UpdateFormats, has_scale, round_to
from octavo.kernels.reference.adamw_scalars import RATIO_CAP, ratio_bound
from octavo.kernels.reference.random import random_top_bits

MODULE = importlib.import_module("octavo.kernels.reference.adamw")  # the package has a function of that name
O2 = UpdateFormats(FP16, E4M3, FP16, param_scaled=True, exp_avg_block=128, sqrt_exp_avg_sq=True)
PAPER = UpdateFormats(FP16, E4M3, FP16, param_scaled=True, clamp_ratio=False, stochastic=False)
ROWS = {
    "O2": O2,
    "O2 nearest": replace(O2, stochastic=False),
    "paper": PAPER,
    "paper-2b": replace(PAPER, param=BF16),
    "paper-3": replace(PAPER, param=E4M3),
    "paper-4": replace(PAPER, exp_avg_sq=E4M3),
    "blocks": replace(O2, exp_avg_sq=E4M3, exp_avg_sq_block=32),
    "FP32": UpdateFormats(FP32, FP32, FP32),
    "FP32, small moments": replace(PAPER, param=FP32, param_scaled=False),
    "Adam": replace(O2, decoupled=False),
}


class Run:
    """A tensor under optimization, from its reference kernel up: codes, scales and maxima, stepped with plain gradients."""

    def __init__(self, p: torch.Tensor, formats: UpdateFormats, **hyper):
        self.formats, self.t = formats, 0
        self.hyper = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "maximize": False} | hyper
        scaled = formats.param_scaled and has_scale(formats.param)
        scale = kernels.scale_from_amax(kernels.amax(p), formats.param.max) if scaled else torch.ones(())
        n = p.numel()
        self.codes = [
            kernels.cast(p, scale, formats.param.dtype),
            torch.zeros(n, dtype=formats.exp_avg.dtype),
            torch.zeros(n, dtype=formats.exp_avg_sq.dtype),
        ]
        self.blocks = [None, formats.exp_avg_block, formats.exp_avg_sq_block]
        self.scales = [scale] + [torch.ones(-(-n // block)) if block else torch.ones(()) for block in self.blocks[1:]]
        self.maxima = torch.stack([kernels.amax(codes) for codes in self.codes])

    def step(self, grad: torch.Tensor, offset: int = 0) -> torch.Tensor:
        self.t += 1
        step = torch.tensor([float(self.t)])
        one = torch.ones(())
        scales = torch.stack([one if s.dim() else s for s in self.scales])
        columns, scales, ok = adamw_scalars(
            step, scales[None], self.maxima[None], torch.ones(1), kernels.amax(grad)[None], residual=False,
            formats=self.formats, **self.hyper,
        )  # fmt: skip
        scalars = torch.stack(columns, 1)[0]
        key = kernels.make_key(0, step[0], 0, "cpu")
        maxima = torch.zeros(3)
        blocked = [s if s.dim() else None for s in self.scales[1:]]
        p, m, v = self.codes
        operands = Operands(p, grad, None, m, v, *blocked, offset)
        reference_adamw([operands], scalars[None], key[None], ok, maxima[None], self.formats)
        if ok:
            self.maxima = maxima
            self.scales = [old if old.dim() else new[0] for old, new in zip(self.scales, scales, strict=True)]
        return scalars

    def real(self, which: int) -> torch.Tensor:
        return kernels.uncast(self.codes[which], self.scales[which], block=self.blocks[which])


def wild(n: int, decades: float = 4) -> torch.Tensor:
    """Gradients over many orders of magnitude."""
    return torch.randn(n) * 10 ** torch.empty(n).uniform_(-decades, 1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("decoupled", [True, False])
def test_each_operation_is_ieee_fp32_in_the_written_order(seed, decoupled):
    """NumPy's float32 arithmetic, one operation at a time, gives the same bits."""
    f = np.float32
    run = Run(torch.randn(999), UpdateFormats(FP32, FP32, FP32, decoupled=decoupled))
    p, m, v = (codes.numpy().copy() for codes in run.codes)
    for _ in range(5):
        grad = wild(999)
        s = run.step(grad).numpy()
        s = Scalars(*s)
        g = grad.numpy()
        if not decoupled:
            g = g + s.grad_decay * p
        m = s.exp_avg_decay * m + s.exp_avg_gain * g
        v = s.exp_avg_sq_decay * v + (s.exp_avg_sq_gain * g) * (s.exp_avg_sq_gain * g)
        r = m * (f(1) / (np.sqrt(v) * s.root_factor + s.eps))
        r = np.clip(r, -s.ratio_bound, s.ratio_bound)
        p = p + s.minus_rate * (r + s.param_decay * p if decoupled else r)
        for mine, theirs in zip(run.codes, (p, m, v), strict=True):
            assert mine.numpy().dtype == theirs.dtype == f
            assert (mine.numpy() == theirs).all()


@pytest.mark.parametrize("row", ROWS)
def test_nothing_saturates_on_adversarial_streams(seed, row, monkeypatch):
    """Bursts, silence, sign flips and growth: with the ratio cut, no product of value and predicted scale leaves the format."""
    formats = replace(ROWS[row], clamp_ratio=True)
    saturated = 0

    def counting(y, fmt, word):
        nonlocal saturated
        saturated += (y.abs() > fmt.max).sum().item()
        return round_to(y, fmt, word)

    monkeypatch.setattr(MODULE, "round_to", counting)
    for lr, betas in ((1e-1, (0.9, 0.95)), (1e-3, (0.9, 0.999)), (10.0, (0.0, 0.5)), (1e-2, (0.95, 0.9))):
        run = Run(torch.randn(300) * 0.02, formats, lr=lr, betas=betas)
        saturated = 0  # weights themselves may begin beyond their first scale only by rounding up
        for t in range(36):
            size = (1e-6, 1.0, 1e6, 0.0, 1e-12, 1e3)[t % 6] * math.exp(t / 10)
            # the worst case of the ratio bound: a geometric approach, then a burst
            run.step(wild(300) * size * (-1) ** (t // 3))
            assert saturated == 0, (row, lr, betas, t)
            assert all(codes.float().isfinite().all() for codes in run.codes)


def test_ratio_bound_is_reached_and_not_exceeded_by_exact_adam(seed):
    for beta1, beta2 in ((0.9, 0.95), (0.9, 0.999), (0.0, 0.99), (0.8, 0.9)):
        for t in (1, 2, 10, 100):
            bound = ratio_bound(torch.tensor(float(t), dtype=torch.float64), beta1, beta2).item()
            weight1 = [(1 - beta1) * beta1 ** (t - k) for k in range(1, t + 1)]
            weight2 = [(1 - beta2) * beta2 ** (t - k) for k in range(1, t + 1)]
            worst = torch.tensor([a / b for a, b in zip(weight1, weight2, strict=True)], dtype=torch.float64)
            streams = torch.cat([worst[None], torch.randn(50, t, dtype=torch.float64).exp()])
            m = streams @ torch.tensor(weight1, dtype=torch.float64) / (1 - beta1**t)
            v = streams**2 @ torch.tensor(weight2, dtype=torch.float64) / (1 - beta2**t)
            ratio = m / v.sqrt()
            assert (ratio <= bound * (1 + 1e-9)).all()
            assert ratio[0].item() == pytest.approx(bound, rel=1e-9)


def test_ratio_bound_values_and_cap():
    many = torch.tensor(1e6, dtype=torch.float64)
    assert ratio_bound(many, 0.9, 0.95).item() == pytest.approx(1.165, abs=1e-3)
    assert ratio_bound(many, 0.9, 0.999).item() == pytest.approx(7.27, abs=1e-2)
    for betas in ((0.9, 0.81), (0.95, 0.9), (0.9, 0.0), (0.0, 0.0), (0.99, 0.5)):
        for t in (1.0, 10.0, 1e6):
            bound = ratio_bound(torch.tensor(t, dtype=torch.float64), *betas).item()
            assert 1 - 1e-9 <= bound <= RATIO_CAP


@pytest.mark.parametrize("row", ROWS)
def test_first_step_is_exact(seed, row):
    """The first update is lr in the direction of the sign: the moments are used before they are rounded."""
    formats = ROWS[row]
    p = torch.randn(500)
    run = Run(p, formats, weight_decay=0.0, lr=0.1, eps=0.0)
    start = run.real(0)
    grad = wild(500)
    run.step(grad)
    error = (run.real(0) - (start - 0.1 * grad.sign())).abs()
    step = 2 * formats.param.eps * p.abs().max() if formats.param.bits < 32 else 1e-6
    assert (error <= step).all()


@pytest.mark.parametrize("row", ROWS)
def test_one_pass_scales_cost_no_accuracy(seed, row):
    """After ten steps the moments are within the rounding of their formats of FP32's."""
    formats = ROWS[row]
    p = torch.randn(1000) * 0.02
    run, exact = Run(p, formats), Run(p, UpdateFormats(FP32, FP32, FP32, decoupled=formats.decoupled))
    for _ in range(10):
        grad = torch.randn(1000)
        run.step(grad)
        exact.step(grad)
    for which, fmt in ((1, formats.exp_avg), (2, formats.exp_avg_sq)):
        truth = exact.real(which).sqrt() if which == 2 and formats.sqrt_exp_avg_sq else exact.real(which)
        error = (run.real(which) - truth).norm() / truth.norm()
        assert error <= 1.5 * fmt.eps, f"{fmt}: {error}"


def test_maxima_and_scales_are_those_of_the_stored_codes(seed):
    for name, formats in ROWS.items():
        run = Run(torch.randn(700), formats)
        for _ in range(3):
            run.step(wild(700))
        for which in range(3):
            if run.blocks[which] is None:
                assert run.maxima[which] == kernels.amax(run.codes[which]), (name, which)
            else:
                block = run.blocks[which]
                high = kernels.amax(run.codes[which].float(), block=block)
                assert ((high > Format.of(run.codes[which].dtype).max / 2 * 0.99) | (high == 0)).all(), (name, which)


@pytest.mark.parametrize("row", ["O2", "blocks", "FP32"])
@pytest.mark.parametrize("n", [0, 1, 7, 127, 128, 129, 4095, 4097, 10_000])
def test_sizes_and_chunks(seed, row, n, monkeypatch):
    """A chunk boundary, even a short one, changes no bit."""
    p, grads = torch.randn(n), [wild(n) for _ in range(3)]
    runs = []
    for chunk in (2**18, 4096):
        monkeypatch.setattr(MODULE, "CHUNK", chunk)
        run = Run(p, ROWS[row])
        for grad in grads:
            run.step(grad, offset=2**32 - 5000)
        runs.append(run)
    for a, b in zip(runs[0].codes + runs[0].scales, runs[1].codes + runs[1].scales, strict=True):
        assert same_bits(a, b)


def test_the_three_roundings_of_an_element_are_independent(seed):
    """Each pair of the words that one hash gives fills the squares of a 64 x 64 grid evenly, in the first six bits and the next,
    within an element and from one to the next."""
    n, cells = 1 << 20, 64
    words = random_top_bits(kernels.make_key(seed, 1, 0, "cpu"), 0, n, "cpu", MULTIPLIERS)
    words = [word.long() % 2**32 for word in words]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for shift, lag in product((26, 20), (0, 1)):
            a, b = (words[first][lag:] >> shift) % cells, (words[second][: n - lag] >> shift) % cells
            counts = torch.bincount(a * cells + b, minlength=cells**2).double()
            expected = (n - lag) / cells**2
            chi2 = ((counts - expected) ** 2 / expected).sum().item()
            freedom = cells**2 - 1
            assert abs(chi2 - freedom) < 6 * math.sqrt(2 * freedom), (first, second, shift, lag)


def test_rounding_depends_on_the_global_index_only(seed):
    """The shards of a tensor, stepped one by one at their offsets, are the tensor stepped whole."""
    formats = UpdateFormats(BF16, E4M3, E4M3, exp_avg_block=128, exp_avg_sq_block=128, sqrt_exp_avg_sq=True)
    p, grads = torch.randn(1024), [torch.randn(1024) for _ in range(4)]
    whole = Run(p, formats)
    for grad in grads:
        whole.step(grad, offset=77)
    for start, stop in ((0, 384), (384, 1024)):
        shard = Run(p[start:stop], formats)
        for grad in grads:
            shard.step(grad[start:stop], offset=77 + start)
        for mine, theirs in zip(shard.codes, whole.codes, strict=True):
            assert same_bits(mine, theirs[start:stop])
    moved = Run(p, formats)
    moved.step(grads[0], offset=78)
    whole = Run(p, formats)
    whole.step(grads[0], offset=77)
    assert not same_bits(moved.codes[0], whole.codes[0])


@pytest.mark.parametrize("clamp", [True, False])
def test_without_the_cut_a_flushed_second_moment_moves_weights_by_far(seed, clamp):
    """A v in E4M3 is zero for gradients of 1e-4 beside one of 1: without a gradient in the next step the ratio is m / eps."""
    p, grad = torch.randn(512), torch.randn(512) * 1e-4
    grad[0] = 1.0
    run = Run(p, replace(PAPER, exp_avg_sq=E4M3, clamp_ratio=clamp), lr=1e-3, weight_decay=0.0)
    run.step(grad)
    before = run.real(0)
    run.step(torch.zeros(512))
    moved = (run.real(0) - before).abs()
    assert run.real(2)[1:].max() == 0
    assert (moved.max() <= 2e-3) == clamp
    assert moved.isfinite().all()
    if not clamp:
        assert run.real(0).abs().max() <= 2 * p.abs().max() + 0.01  # saturated at the predicted scale


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e25])
@pytest.mark.parametrize("row", ROWS)
def test_a_step_that_would_not_be_finite_changes_nothing(seed, row, bad):
    run = Run(torch.randn(300), ROWS[row])
    run.step(torch.randn(300))
    before = [tensor.clone() for tensor in run.codes + run.scales]
    grad = torch.randn(300)
    grad[123] = bad
    run.step(grad)
    for a, b in zip(before, run.codes + run.scales, strict=True):
        assert same_bits(a, b)


def test_zero_learning_rate_keeps_every_code(seed):
    """Also zeros (but not their sign), and a maximum that is exactly the largest code."""
    for row, formats in ROWS.items():
        p = torch.randn(400)
        p[:3] = torch.tensor([-0.0, 0.0, p.abs().max() * 1.5])
        run = Run(p, formats, lr=0.0)
        before = run.codes[0].clone(), run.scales[0].clone()
        for _ in range(5):
            run.step(wild(400))
        assert torch.equal(before[0].float(), run.codes[0].float()), row
        assert before[1] == run.scales[0], row


def test_stochastic_rounding_keeps_the_mean_of_small_updates(seed):
    """1,000 updates of a hundredth of a step of FP16 move by their sum; rounded to nearest, by nothing."""
    moved = {}
    for stochastic in (True, False):
        formats = UpdateFormats(FP16, FP32, FP32, param_scaled=True, stochastic=stochastic)
        run = Run(torch.full((4096,), 1.0), formats, lr=1e-5, weight_decay=0.0)
        for _ in range(1000):
            run.step(torch.ones(4096))
        moved[stochastic] = 1 - run.real(0).double().mean().item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(1e-2, rel=0.02)


def small(n: int, formats: UpdateFormats) -> list[kernels.Numbers]:
    """The small tensors of n parameters between two steps."""
    scaled = (
        formats.param_scaled,
        has_scale(formats.exp_avg, formats.exp_avg_block),
        has_scale(formats.exp_avg_sq, formats.exp_avg_sq_block),
    )
    return [
        kernels.Numbers(
            torch.randint(100, ()).float(),
            *(torch.exp2(torch.randint(-9, 9, ()).float()) if own else None for own in scaled),
            torch.rand(3),
            torch.exp2(torch.randn(())),
            torch.rand(()),
        )
        for _ in range(n)
    ]


def settings(formats: UpdateFormats, lr: float = 1e-2) -> kernels.UpdateSettings:
    return kernels.UpdateSettings(lr, (0.9, 0.95), 1e-8, 0.1, False, 7, False, formats)


def test_a_step_of_several_buckets_is_that_of_each(seed):
    buckets = [small(n, ROWS[row]) for n, row in ((3, "O2"), (1, "FP32"), (5, "paper"))]
    common = [settings(ROWS[row], 10.0**-n) for n, row in enumerate(("O2", "FP32", "paper"))]
    together = kernels.adamw_prepare(buckets, common)
    assert together.ok and not together.maxima.any()
    for bucket, own, span in zip(buckets, common, together.spans, strict=True):
        alone = kernels.adamw_prepare([bucket], [own])
        for name in ("scalars", "keys", "scales", "maxima"):
            assert same_bits(getattr(together, name)[span], getattr(alone, name)), name
        for row, one in enumerate(bucket):
            assert alone.keys[row] == kernels.make_key(7, one.step + 1, 0, "cpu")


@pytest.mark.parametrize("row", ["O2", "paper", "FP32"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_commit_stores_all_or_nothing(row, bad, seed):
    bucket, other = small(4, ROWS[row]), small(2, ROWS["FP32"])
    if bad:
        other[1] = other[1]._replace(grad_amax=torch.tensor(math.nan))
    before = [[None if part is None else part.clone() for part in one] for one in (*bucket, *other)]
    prepared = kernels.adamw_prepare([bucket, other], [settings(ROWS[row]), settings(ROWS["FP32"])])
    prepared.maxima.uniform_()
    kernels.adamw_commit([bucket, other], prepared, prepared.ok)
    assert bool(prepared.ok) != bad
    for number, (old, new) in enumerate(zip(before, (*bucket, *other), strict=True)):
        assert new.step == old[0] + (not bad)
        assert torch.equal(new.maxima, old[4] if bad else prepared.maxima[number])
        for which in range(3):
            scale = new.scales[which]
            assert (scale is None) == (old[1 + which] is None)
            assert scale is None or scale == (old[1 + which] if bad else prepared.scales[number, which])
