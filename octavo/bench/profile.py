"""Where the time of a call on a GPU goes, by kind of kernel: what stands beside the floor of each kind.

Kernels are told by their names, which belong to cuBLASLt, cuDNN, Triton and PyTorch and change with their versions; what no pattern
knows is "other". Kernels run one after the other here, so the rest of the call's time is the GPU waiting for the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch.autograd import DeviceType

from octavo.bench.timing import Function

KINDS = (
    ("attention", r"sdpa|flash|fmha|attention"),
    ("FP8 GEMMs", r"nvjet_[qr]|(gemm|cutlass|nvjet|xmma).*(e4m3|e5m2|fp8|f8)"),
    ("BF16 GEMMs", r"nvjet|gemm|cutlass|xmma|splitk"),
    ("optimizer", r"^_(adamw|magnitudes|add_parts$)|adam"),
    ("octavo's other kernels", r"^_(?!Z)|^(amax|cast|settle)_kernel$"),
)
"""Kind → pattern of names; the first that matches counts. The names of octavo's own kernels begin with an underscore, or are those
of activations."""


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums of milliseconds, in the order of `KINDS`, of (name, milliseconds)."""
    sums = dict.fromkeys([*(kind for kind, _ in KINDS), "other"], 0.0)
    for name, ms in kernels:
        sums[kind_of(name)] += ms
    return {kind: ms for kind, ms in sums.items() if ms}


def profile(function: Function) -> dict[str, float]:
    """Milliseconds by kind of one call of `function` on the current GPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        function()
        torch.cuda.synchronize()
    return by_kind(
        (event.name, event.time_range.elapsed_us() / 1e3)
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA and "#" not in event.name  # ranges that code has named, not kernels
    )
