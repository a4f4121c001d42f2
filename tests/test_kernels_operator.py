"""Operators `octavo::*` that are defined without `torch.library.custom_op`: what its layers would see to."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from octavo.convert import convert
from octavo.formats import E4M3, E5M2
from octavo.kernels import (
    ops_cross_entropy,  # noqa: F401 - defines its operator
    untraced,
)
from octavo.recipe import O1, O2


def calls(x: Tensor) -> list[tuple[str, tuple]]:
    """(operator, arguments) of all that could give a matrix back as it came."""
    m, k = x.shape
    one, codes, vector = torch.ones(()), x.detach().to(E4M3.dtype), torch.ones(k)
    heads = x.detach().unflatten(1, (2, k // 2))[None]
    rows = (None, torch.ones(m))
    return [
        ("amax", (x, None)),
        ("scale_from_amax", (x, 448.0, True, 0)),
        ("cast", (x, one, torch.float32, "nearest", None, 0, None, False)),
        ("uncast", (x, one, torch.float32, None)),
        ("cast_transpose", (x, one, E4M3.dtype, True, True, False, True)),
        ("transpose_codes", (codes,)),
        ("cast_residual", (x, one)),
        ("quantize", (x, E5M2.dtype, True, True, True, True, one, False, one, False)),
        ("row_sums", (x,)),
        ("cast_current", (x, E4M3.dtype, False)),
        ("visible_scale", (x, x, None)),
        ("norm_stats", (x, vector, vector, 1e-5, True)),
        ("add_norm_stats", (x, torch.zeros_like(x), vector, None, 1e-5, False)),
        ("norm_cast", (x, vector, None, *rows, one, E4M3.dtype, True, True, True, False)),
        ("norm_backward", (torch.zeros_like(x), x, vector, *rows, torch.zeros_like(x))),
        ("activation_cast", (x, "gelu", one, E4M3.dtype, True, True, True, False)),
        ("activation_quantize", (x, "swiglu", E5M2.dtype, x[:, : k // 2], True, True, True, True, None)),
        ("softmax_gradient", (x, torch.zeros(m, dtype=torch.int64), torch.ones(m), E5M2.dtype, 1.0)),
        ("rotary", (heads, torch.ones(m, k // 4), torch.zeros(m, k // 4), 2, False)),
        ("rotary_backward", (heads, heads[:, :, :1], heads[:, :, :1], None, None)),
    ]


@pytest.mark.parametrize("column_major", [False, True])
def test_no_result_aliases_an_argument(column_major, seed):
    x = torch.randn(48, 32).t() if column_major else torch.randn(32, 48)
    for name, arguments in calls(x.requires_grad_()):
        operator = getattr(torch.ops.octavo, name).default
        with torch.no_grad():
            expected = operator(*arguments)
        # With a gradient asked of the arguments, as in a program made by torch.export.
        results, expected = ([one] if isinstance(one, Tensor) else one for one in (operator(*arguments), expected))
        memory = [part.untyped_storage().data_ptr() for part in (*arguments, *results) if isinstance(part, Tensor)]
        ours, others = memory[-len(results) :], memory[: -len(results)]
        ours = [one for one in ours if one]
        assert len({*ours}) == len(ours) and not {*ours} & {*others}, name
        for result, same in zip(results, expected, strict=True):
            assert torch.equal(result.detach().float(), same.float()), name


@pytest.mark.parametrize("column_major", [False, True])
def test_fake_results_have_the_layout_of_real_ones(column_major, seed):
    x = torch.randn(48, 32).t() if column_major else torch.randn(32, 48)
    for name, arguments in calls(x):
        torch.library.opcheck(getattr(torch.ops.octavo, name).default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("recipe", [O1, O2])
def test_an_exported_program_runs_with_trainable_parameters(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    convert(model, recipe)
    x = torch.randn(16, 64)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        expected = model(x)
    assert torch.equal(program.module()(x), expected)


def test_a_second_import_finds_the_operators():
    """A notebook that forgets the modules of octavo and imports it again, or reloads one of them."""
    code = """
import importlib, sys
import torch, octavo
for name in [name for name in sys.modules if name.partition(".")[0] == "octavo"]:
    del sys.modules[name]
import octavo
importlib.reload(sys.modules["octavo.kernels.operator"])
importlib.reload(sys.modules["octavo.kernels.ops"])
model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "O2", break_even=False)
torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(8, 64)).sum().backward()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_what_keeps_the_compiler_out_its_public_switch_does(monkeypatch, seed):
    monkeypatch.setattr(untraced, "set_code_exec_strategy", None)
    seen = []

    @untraced.untraced
    def double(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return 2 * x

    x = torch.randn(3)
    got = torch.compile(lambda x: double(x) + 1, backend="eager")(x)
    assert torch.equal(got, 2 * x + 1) and seen == [False]
