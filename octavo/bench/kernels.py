"""`octavo bench kernels`: every kernel alone, with the bytes that it has to move and its share of the floor; and the GEMMs.

Inputs are those of one layer of a model: N tokens of d channels. On a GPU, kernels run inside of a CUDA graph of ten calls,
so that the time is the device's; the time of the host is that of a launch without the graph. Each kernel's result is compared with that
of its reference on the inputs that are timed: bit for bit where the kernel is element-wise. GEMMs are compared with a BF16 GEMM
of the same codes, which BF16 holds exactly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.bench.cases import Case, cast_cases, model_cases, optimizer_cases
from octavo.bench.floors import bytes_ms, flops_ms
from octavo.bench.rows import Row
from octavo.bench.run import Run, relative_error
from octavo.bench.timing import IN_GRAPH, captured
from octavo.formats import E4M3, E5M2
from octavo.kernels import reference
from octavo.kernels.dispatch import backend
from octavo.models import TransformerConfig
from octavo.plan.shapes import Setup


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
    module = backend(case.tensors[0])

    def function() -> Any:
        return case.call(module, *case.tensors)

    eager = run.time(function)
    if not (run.is_cuda and case.in_graph):
        return row.timed(eager)
    row = row.timed(run.time(captured(function, IN_GRAPH)), IN_GRAPH)
    return dataclasses.replace(row, mode="graph", host_ms=eager.host_ms)


def _check(case: Case) -> float:
    """Largest relative error of all results, changed arguments included, to those of the reference."""
    results = []
    for module in (backend(case.tensors[0]), reference):
        copies = tuple(tensor.clone() for tensor in case.tensors)
        results.append([*_flat(case.call(module, *copies)), *copies])
    return relative_error(*results)


def _flat(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if isinstance(part, Tensor)]


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
        return kernels.scaled_mm_nt(a, b, scale, scale, torch.bfloat16, fast_accum=fast, inverse_scales=True)

    error = relative_error([function()], [a.bfloat16() @ b.bfloat16().t()])
    bound = GEMM_BOUNDS["fp8 fast" if fast else "fp8 promoted"]
    return dataclasses.replace(row.timed(run.time(function)), error=error, bound=bound)
