"""`octavo bench kernels`: every kernel alone, with the bytes that it has to move and its share of the floor; and the GEMMs.

Inputs are those of one layer of a model: N tokens of d channels. On a GPU, kernels run inside of a CUDA graph of ten calls,
so that the time is the device's; the time of the host is that of a launch without the graph. Each kernel's result is compared with that
of its reference on the inputs that are timed: bit for bit where the kernel is element-wise. GEMMs are compared with a BF16 GEMM
of the same codes, which BF16 holds exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.bench.floors import bytes_ms, flops_ms
from octavo.bench.rows import Row
from octavo.bench.run import Run, relative_error
from octavo.bench.timing import IN_GRAPH, captured
from octavo.formats import E4M3, E5M2, FP16
from octavo.kernels import reference
from octavo.kernels.reference.adamw import Operands, UpdateFormats
from octavo.kernels.reference.magnitudes import Values
from octavo.models import TransformerConfig
from octavo.models.layers import rotary_table
from octavo.plan.shapes import Setup

BF16 = 2
"""Bytes."""


@dataclass(frozen=True)
class Case:
    """One kernel and its inputs."""

    name: str
    call: Callable[..., Any]
    """call(module, *tensors), where `module` has the kernels or the references."""
    tensors: tuple[Tensor, ...]
    size: int
    """Bytes that have to be read and written."""
    shape: str
    in_graph: bool = True
    """Whether a CUDA graph can hold it: not what uploads a table of addresses."""
    bound: float = 0.0
    """Relative error to the reference; 0 where every bit has to be equal."""


def run_kernels(run: Run, config: TransformerConfig, tokens: int, optimizer_parameters: int) -> None:
    """All kernels for `tokens` tokens of `config`, then the GEMMs of a block."""
    for case in (
        *cast_cases(run, config, tokens),
        *model_cases(run, config, tokens),
        *optimizer_cases(run, optimizer_parameters),
    ):
        row = Row("kernels", f"{case.name}, {case.shape}", "octavo", gbytes=case.size / 1e9, bound=case.bound)
        row = dataclasses.replace(row, floor_ms=bytes_ms(case.size / 1e9, run.ceiling))
        run.add(row, lambda row: _time(run, case, row))  # noqa: B023
    run_gemms(run, config, tokens)


def _time(run: Run, case: Case, row: Row) -> Row:
    row = dataclasses.replace(row, error=_check(case))

    def function() -> Any:
        return case.call(kernels, *case.tensors)

    eager = run.time(function)
    if not (run.is_cuda and case.in_graph):
        return row.timed(eager)
    row = row.timed(run.time(captured(function, IN_GRAPH)), IN_GRAPH)
    return dataclasses.replace(row, mode="graph", host_ms=eager.host_ms)


def _check(case: Case) -> float:
    """Largest relative error of all results, changed arguments included, to those of the reference."""
    results = []
    for module in (kernels, reference):
        copies = tuple(tensor.clone() for tensor in case.tensors)
        results.append([*_flat(case.call(module, *copies)), *copies])
    return relative_error(*results)


def _flat(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if isinstance(part, Tensor)]


def cast_cases(run: Run, config: TransformerConfig, tokens: int) -> Iterator[Case]:
    """Between BF16 and FP8."""
    x = run.normal(tokens, config.dim)
    scale = kernels.scale_from_amax(kernels.amax(x), E4M3.max)
    n, shape = x.numel(), f"{tokens} × {config.dim}"
    yield Case("amax", lambda k, x: k.amax(x), (x,), n * BF16, shape)
    yield Case("cast, E4M3", lambda k, x, s: k.cast(x, s, E4M3.dtype), (x, scale), n * (BF16 + 1), shape)
    yield Case(
        "cast_transpose, E4M3", lambda k, x, s: k.cast_transpose(x, s, E4M3.dtype), (x, scale), n * (BF16 + 2), shape
    )
    yield Case(
        "cast_transpose_amax, E5M2",
        lambda k, x, s: k.cast_transpose_amax(x, s, E5M2.dtype),
        (x, scale),
        n * (BF16 + 2),
        shape,
    )
    codes = kernels.cast(x, scale, E4M3.dtype)
    yield Case("transpose_codes", lambda k, c: k.transpose_codes(c), (codes,), 2 * n, shape)
    yield Case("uncast to BF16", lambda k, c, s: k.uncast(c, s, torch.bfloat16), (codes, scale), n * (1 + BF16), shape)
    yield Case("cast_residual", lambda k, x, s: k.cast_residual(x, s), (x, scale), n * (BF16 + 2), shape)


def model_cases(run: Run, config: TransformerConfig, tokens: int) -> Iterator[Case]:
    """What stands between the linear layers of a block."""
    heads = config.n_heads + 2 * config.kv_heads
    length = min(tokens, config.max_seq_len)
    qkv = run.normal(tokens // length, length, heads, config.head_dim)
    cos, sin = rotary_table(length, config.head_dim, config.rope_theta, run.device, config.rope_scaling)
    turned = config.n_heads + config.kv_heads
    yield Case(
        "rotary",
        lambda k, x, c, s: k.rotary(x, c, s, turned),
        (qkv, cos, sin),
        2 * qkv.numel() * BF16,
        f"{length} tokens, {heads} heads × {config.head_dim}",
    )


def optimizer_cases(run: Run, n: int) -> Iterator[Case]:
    """The passes of the optimizer over one weight of n elements in the formats of O2."""
    formats = UpdateFormats(FP16, E4M3, FP16, param_scaled=True, exp_avg_block=128, sqrt_exp_avg_sq=True)
    values = {
        name: run.normal(n, std=std, seed=seed, dtype=torch.float32) for seed, (name, std) in enumerate(_STDS.items())
    }
    scales = {name: kernels.scale_from_amax(kernels.amax(x), _FORMATS[name].max) for name, x in values.items()}
    m_scale = kernels.scale_from_amax(kernels.amax(values["exp_avg"], block=128), E4M3.max)
    m = kernels.cast(values["exp_avg"], m_scale, E4M3.dtype, block=128)
    p, g, v = (
        kernels.cast(values[name].abs() if name == "exp_avg_sq" else values[name], scales[name], _FORMATS[name].dtype)
        for name in ("param", "grad", "exp_avg_sq")
    )
    del values
    one = torch.ones((), device=run.device)
    columns, ok = kernels.adamw_scalars(
        torch.tensor([5.0], device=run.device),
        torch.stack([scales["param"], one, scales["exp_avg_sq"]])[None],
        torch.stack([kernels.amax(codes) for codes in (p, m, v)])[None],
        scales["grad"][None],
        kernels.amax(g)[None],
        lr=1e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        maximize=False,
        residual=False,
        formats=formats,
    )
    scalars = torch.stack(columns, 1)
    key = kernels.make_key(0, torch.tensor(5.0, device=run.device), 0, run.device)[None]
    amaxes = torch.zeros(1, 3, device=run.device)
    moved = n * (2 * 2 + 1 + 2 * 1 + 2 * 2) + 2 * m_scale.nbytes

    def adamw(k: Any, p: Tensor, g: Tensor, m: Tensor, v: Tensor, m_scale: Tensor, amaxes: Tensor) -> None:
        k.adamw([Operands(p, g, None, m, v, m_scale, None, 0)], scalars, key, ok.all(), amaxes, formats)

    shape = f"{n / 1e6:.4g}M elements"
    yield Case("magnitudes, E4M3", lambda k, g: k.magnitudes([Values(g)]), (g,), n, shape, in_graph=False, bound=1e-12)
    yield Case("adamw, O2", adamw, (p, g, m, v, m_scale, amaxes), moved, shape, in_graph=False)


_STDS = {"param": 0.02, "grad": 1e-3, "exp_avg": 1e-4, "exp_avg_sq": 1e-3}
_FORMATS = {"param": FP16, "grad": E4M3, "exp_avg": E4M3, "exp_avg_sq": FP16}

GEMM_BOUNDS = {"fp8 fast": 0.05, "fp8 promoted": 0.01}
"""Relative error to a BF16 GEMM of the same codes: sums of about 14 bits that are cut off, and one rounding to BF16."""


def run_gemms(run: Run, config: TransformerConfig, tokens: int) -> None:
    """Forward, dgrad and wgrad of each linear layer of a block, in BF16 and FP8."""
    setup = Setup(config, run.recipe, config.max_seq_len, max(1, tokens // config.max_seq_len))
    for name, (k, n) in setup.linears.items():
        for product, (rows, inner, columns) in (
            ("forward", (tokens, k, n)),
            ("dgrad", (tokens, n, k)),
            ("wgrad", (n, tokens, k)),
        ):
            row = Row("kernels", f"GEMM {name} {product} {rows} × {inner} × {columns}", "bf16")
            row = dataclasses.replace(row, gflops=2e-9 * rows * inner * columns)
            if run.ceiling is not None:
                row = dataclasses.replace(row, floor_ms=flops_ms(row.gflops or 0.0, run.ceiling.bf16))
            run.add(row, lambda row: _time_bf16(run, row, rows, inner, columns))  # noqa: B023
            fast = product == "forward"
            row = dataclasses.replace(row, variant="octavo fp8 fast" if fast else "octavo fp8 promoted")
            if run.ceiling is not None:
                rate = run.ceiling.fp8_forward if fast else run.ceiling.fp8_backward
                row = dataclasses.replace(row, floor_ms=flops_ms(row.gflops or 0.0, rate))
            run.add(row, lambda row: _time_fp8(run, row, rows, inner, columns, fast), "bf16")  # noqa: B023


def _time_bf16(run: Run, row: Row, rows: int, inner: int, columns: int) -> Row:
    a, b = run.normal(rows, inner), run.normal(columns, inner, seed=1)
    return row.timed(run.time(lambda: a @ b.t()))


def _time_fp8(run: Run, row: Row, rows: int, inner: int, columns: int, fast: bool) -> Row:
    scale = torch.ones((), device=run.device)
    a = kernels.cast(run.normal(rows, inner), scale, E4M3.dtype if fast else E5M2.dtype)
    b = kernels.cast(run.normal(columns, inner, seed=1), scale, E4M3.dtype)

    def function() -> Tensor:
        return kernels.scaled_mm_nt(a, b, scale, scale, torch.bfloat16, fast_accum=fast)

    error = relative_error([function()], [a.bfloat16() @ b.bfloat16().t()])
    bound = GEMM_BOUNDS["fp8 fast" if fast else "fp8 promoted"]
    return dataclasses.replace(row.timed(run.time(function)), error=error, bound=bound)
