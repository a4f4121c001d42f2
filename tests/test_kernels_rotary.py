"""Rotary positions: `rotate` of the models bit for bit on queries and keys, values untouched, backward the opposite turn."""

import pytest
import torch
from oracle import assert_same_bits, spread_out

from octavo import kernels
from octavo.formats import E4M3, E5M2
from octavo.models.layers import _Rotary, rotary_table, rotate

SHAPES = ((2, 7, 3, 1, 8), (1, 1, 1, 1, 2), (3, 5, 4, 2, 6), (1, 33, 12, 12, 64))
"""B, T, H, G, D."""


def table(batch: int, tokens: int, channels: int, batched: bool) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary_table(tokens, channels, 10_000.0, torch.device("cpu"))
    if not batched:
        return cos, sin
    places = torch.randint(tokens, (batch, tokens))
    return cos[places], sin[places]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_and_keys_turn_as_in_the_models(shape, dtype, batched, seed):
    batch, tokens, heads, groups, channels = shape
    qkv = spread_out((batch, tokens, heads + 2 * groups, channels)).to(dtype)
    cos, sin = table(batch, tokens, channels, batched)
    out = kernels.rotary(qkv, cos, sin, heads + groups)
    assert out.is_contiguous() and out.dtype == dtype
    q, k, v = out.split((heads, groups, groups), dim=-2)
    want_q, want_k, want_v = qkv.split((heads, groups, groups), dim=-2)
    assert_same_bits(q, rotate(want_q, cos, sin))
    assert_same_bits(k, rotate(want_k, cos, sin))
    assert_same_bits(v, want_v)


@pytest.mark.parametrize("batched", [False, True])
def test_backward_is_the_gradient(batched, seed):
    qkv = torch.randn(2, 9, 8, 16, requires_grad=True)
    cos, sin = table(2, 9, 16, batched)
    grad = torch.randn(2, 9, 8, 16)
    plain = torch.cat((rotate(qkv[..., :6, :], cos, sin), qkv[..., 6:, :]), dim=-2)
    (want,) = torch.autograd.grad(plain, qkv, grad)
    assert_same_bits(kernels.rotary(grad, cos, sin, 6, backward=True), want)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_gradients_become_one(shape, batched, seed):
    batch, tokens, heads, groups, channels = shape
    dq, dk, dv = (spread_out((batch, tokens, n, channels)).bfloat16() for n in (heads, groups, groups))
    cos, sin = table(batch, tokens, channels, batched)
    packed = torch.cat((dq, dk, dv), dim=-2)
    want = kernels.rotary(packed, cos, sin, heads + groups, backward=True)
    for angles, expected in (((cos, sin), want), ((None, None), packed)):
        got, amax = kernels.rotary_backward(dq, dk, dv, *angles)
        assert_same_bits(got, expected)
        assert_same_bits(amax, kernels.amax(expected))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_three_gradients_become_is_cast(shape, fmt, seed):
    """All results of the two steps apart, for each thing that one may ask for."""
    batch, tokens, heads, groups, channels = shape
    gradients = [spread_out((batch, tokens, n, channels)).bfloat16() for n in (heads, groups, groups)]
    angles = table(batch, tokens, channels, True)
    for turn, power_of_two in ((angles, True), ((None, None), True), (angles, False)):
        dy = kernels.rotary_backward(*gradients, *turn)[0].view(batch * tokens, -1)
        for options in ({}, {"row": False, "column_sum": True}, {"col": False, "column_sum": torch.bfloat16}):
            options["power_of_two"] = power_of_two
            want = kernels.quantize(dy, fmt, return_inverse=True, **options)
            hint = torch.zeros((), dtype=torch.int32)
            for got in (
                kernels.rotary_backward_quantize(*gradients, *turn, fmt, **options),
                kernels.rotary_backward_quantize(*gradients, *turn, fmt, hint=hint, **options),
            ):
                for one, expected in zip(got, want, strict=True):
                    assert one is expected is None or assert_same_bits(one, expected) is None


def test_values_that_are_not_finite_show_in_the_scale(seed):
    gradients = [torch.randn(2, 3, n, 8) for n in (4, 2, 2)]
    for place, bad in ((0, torch.inf), (1, -torch.inf), (2, torch.nan)):
        broken = [one.clone() for one in gradients]
        broken[place][1, 2, 1, 5] = bad
        codes, _, scale, _, inverse = kernels.rotary_backward_quantize(*broken, *table(2, 3, 8, False), E5M2)
        assert scale.isnan() and inverse.isnan() and codes.float().isfinite().sum() >= codes.numel() - 2


def test_in_place_turns_the_same(seed):
    qkv, (cos, sin) = torch.randn(2, 9, 8, 16).bfloat16(), table(2, 9, 16, True)
    want = kernels.rotary(qkv, cos, sin, 6)
    kernels.rotary_(qkv, cos, sin, 6)
    assert_same_bits(qkv, want)


def test_turning_back_gives_the_input(seed):
    qkv = torch.randn(2, 9, 8, 16)
    cos, sin = table(2, 9, 16, False)
    there = kernels.rotary(qkv, cos, sin, 5)
    torch.testing.assert_close(kernels.rotary(there, cos, sin, 5, backward=True), qkv, rtol=0, atol=2e-6)


def test_all_heads_none_and_no_tokens(seed):
    qkv = torch.randn(2, 3, 4, 8)
    cos, sin = table(2, 3, 8, False)
    assert_same_bits(kernels.rotary(qkv, cos, sin, 0), qkv)
    assert_same_bits(kernels.rotary(qkv, cos, sin, 4), rotate(qkv, cos, sin))
    assert kernels.rotary(qkv[:, :0], cos[:0], sin[:0], 4).shape == (2, 0, 4, 8)


def test_any_strides(seed):
    qkv = torch.randn(8, 4, 3, 2).permute(3, 2, 1, 0)
    cos, sin = table(2, 3, 8, False)
    assert_same_bits(kernels.rotary(qkv, cos, sin, 3), kernels.rotary(qkv.contiguous(), cos, sin, 3))


@pytest.mark.parametrize("backward", [False, True])
def test_compiled_regions_give_the_same_bits(backward, seed):
    qkv = torch.randn(2, 5, 6, 8).bfloat16()
    cos, sin = table(2, 5, 8, False)
    compiled = torch.compile(
        lambda x: kernels.rotary(x + 1, cos, sin, 4, backward=backward), backend="aot_eager", fullgraph=True
    )
    assert_same_bits(compiled(qkv), kernels.rotary(qkv + 1, cos, sin, 4, backward=backward))


def test_compiled_regions_turn_in_place_and_back(seed):
    qkv = torch.randn(2, 5, 6, 8).bfloat16()
    cos, sin = table(2, 5, 8, False)

    def step(x):
        y = x + 1
        kernels.rotary_(y, cos, sin, 4)
        return y, *kernels.rotary_backward(y[:, :, :2], y[:, :, 2:4], y[:, :, 4:], cos, sin)

    for got, want in zip(torch.compile(step, backend="aot_eager", fullgraph=True)(qkv), step(qkv), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("options", [{}, {"row": False}, {"col": False, "column_sum": torch.bfloat16}], ids=str)
def test_compiled_regions_cast_the_same(options, seed):
    dq, dk, dv = (torch.randn(2, 5, n, 8).bfloat16() for n in (4, 2, 2))
    cos, sin = table(2, 5, 8, False)
    hint = torch.zeros((), dtype=torch.int32)

    def step(dq):
        return kernels.rotary_backward_quantize(2 * dq, dk, dv, cos, sin, E5M2, hint=hint, **options)

    for got, want in zip(torch.compile(step, backend="aot_eager", fullgraph=True)(dq), step(dq), strict=True):
        assert got is want is None or assert_same_bits(got, want) is None


def test_the_operators_are_sound(seed):
    qkv, turned = torch.randn(2, 5, 6, 8), table(2, 5, 8, True)
    torch.library.opcheck(torch.ops.octavo.rotary.default, (qkv, *turned, 4, False))
    torch.library.opcheck(torch.ops.octavo.rotary_.default, (qkv, *turned, 4))
    for tables in (turned, (None, None)):
        args = (qkv[:, :, :2].transpose(0, 1).contiguous().transpose(0, 1), qkv[:, :, 2:4], qkv[:, :, 4:], *tables)
        torch.library.opcheck(torch.ops.octavo.rotary_backward.default, args)
        for wanted in ((True, False, True), (False, True, False)):
            cast = (*args, torch.float8_e5m2, True, *wanted, None)
            torch.library.opcheck(torch.ops.octavo.rotary_backward_quantize.default, cast)


def test_shapes_that_cannot_be_are_said():
    qkv, (cos, sin) = torch.zeros(2, 5, 6, 8), table(2, 5, 8, False)
    with pytest.raises(ValueError, match="7 channels"):
        kernels.rotary(qkv[..., :7], cos, sin, 4)
    with pytest.raises(ValueError, match="has 6 heads"):
        kernels.rotary(qkv, cos, sin, 7)
    with pytest.raises(ValueError, match=r"\[T, D/2\]"):
        kernels.rotary(qkv, cos[:4], sin[:4], 4)
    with pytest.raises(ValueError, match="in place is contiguous"):
        kernels.rotary_(qkv[:, :, ::2], cos, sin, 2)
    with pytest.raises(ValueError, match=r"twice \[B, T, G, D\]"):
        kernels.rotary_backward(qkv, qkv, qkv[:, :, :2], cos, sin)
    with pytest.raises(ValueError, match="one dtype"):
        kernels.rotary_backward_quantize(qkv, qkv, qkv.half(), cos, sin, E5M2)


def test_a_second_derivative_is_refused_not_zero(seed):
    heads = torch.randn(1, 5, 3, 8, requires_grad=True)
    y = _Rotary.apply(heads, *table(1, 5, 8, False), 2)
    (gradient,) = torch.autograd.grad(y.square().sum(), heads, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
