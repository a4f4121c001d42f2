"""What this machine can do with octavo, in plain words, and what to change.

Each check runs the thing that it speaks about: a version number promises that a kernel exists, a probe shows that it computes
the right values here. Two probes carry the report. The GEMM probe multiplies random E4M3 matrices with the kernel that training
would use and compares the product with the pure-PyTorch reference (on a machine without CUDA the reference is what training uses,
and it is compared with an FP32 product). The cast probe compares codes bit for bit, since the elementwise kernels must equal the
reference exactly.

FP8 tensor cores exist from compute capability 8.9 (Ada) on; octavo's kernels are written for 9.0 (Hopper). Without a GPU
everything still runs, through the reference kernels: right for tests and small experiments, far too slow for training.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo import kernels
from octavo.convert.break_even import MEASURED, capability_of, find_table
from octavo.formats import E4M3
from octavo.kernels import reference

MIN_TORCH = (2, 11)
MIN_TRITON = (3, 6)
MIN_NCCL = (2, 24)
"""The first release that sums float8 values itself."""
FP8_CAPABILITY = (8, 9)
HOPPER_CAPABILITY = (9, 0)
TRAIN_PACKAGES = ("rich", "tensorboard", "matplotlib", "tokenizers", "safetensors")
GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One finding: `ok` means that nothing needs to change; `remedy` says what to change otherwise."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def diagnose() -> list[Check]:
    """Run all checks on this machine (a few seconds, at most 100 MB of memory). A check that raises is reported, not raised."""
    checks: list[tuple[str, Callable[[], Check]]] = [("PyTorch", _torch), ("GPU", _gpu)]
    if torch.cuda.is_available():
        checks += [("Triton", _triton), ("NCCL", _nccl)]
    checks += [("FP8 GEMM", _gemm), ("FP8 cast", _cast), ("attention", _attention), ("memory", _memory)]
    checks += [("break-even", _break_even), ("training tools", _packages)]
    return [_guarded(name, check) for name, check in checks]


def main() -> int:
    """Print the findings. Returns 0 when nothing needs to change and 1 otherwise."""
    checks = diagnose()
    print(format_report(checks))
    return 0 if all(check.ok for check in checks) else 1


def format_report(checks: list[Check]) -> str:
    """One line for each check, its remedy below it, and a closing line."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{'ok ' if check.ok else 'BAD'}  {check.name:<{width}}  {check.detail}")
        if check.remedy:
            lines.append(f"{'':{width + 7}}→ {check.remedy}")
    bad = [check.name for check in checks if not check.ok]
    lines.append("")
    lines.append(f"{len(bad)} of {len(checks)} checks need a change: {', '.join(bad)}" if bad else "Everything works.")
    return "\n".join(lines)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a broken driver or library must not hide the other findings
        return Check(name, False, f"failed: {type(error).__name__}: {error}", "this should work: see the error above")


def _at_least(version: str, minimum: tuple[int, ...]) -> bool:
    """Whether a release string such as '2.13.0+cpu' is at least `minimum`."""
    numbers = [int("".join(c for c in part if c.isdigit()) or 0) for part in version.split("+")[0].split(".")]
    return tuple(numbers[: len(minimum)]) >= minimum


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _torch() -> Check:
    version = torch.__version__
    if not _at_least(version, MIN_TORCH):
        remedy = f"install PyTorch {_dotted(MIN_TORCH)} or newer"
        return Check("PyTorch", False, f"{version}; octavo needs {_dotted(MIN_TORCH)} or newer", remedy)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Check("PyTorch", True, f"{version}, {build}")


def _gpu() -> Check:
    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        detail = "none: everything runs through the reference kernels on the CPU, correct but slow"
        if has_driver and torch.version.cuda is None:
            return Check(
                "GPU", False, "there is an NVIDIA driver, but PyTorch is a CPU build", "install PyTorch's CUDA build"
            )
        if has_driver:
            return Check(
                "GPU",
                False,
                "there is an NVIDIA driver, but PyTorch sees no device",
                "check `nvidia-smi` and the driver",
            )
        return Check("GPU", True, detail)
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    capability = torch.cuda.get_device_capability()
    detail = f"{count} × {name}, compute capability {_dotted(capability)}"
    if capability < FP8_CAPABILITY:
        remedy = "use recipe 'bf16' here, or a GPU of compute capability 8.9 (Ada), 9.0 (Hopper) or newer"
        return Check("GPU", False, f"{detail}: no FP8 tensor cores", remedy)
    if capability < HOPPER_CAPABILITY:
        return Check("GPU", True, f"{detail}: FP8 tensor cores, but octavo is tuned for Hopper (9.0)")
    return Check("GPU", True, f"{detail}: FP8 tensor cores")


def _triton() -> Check:
    if importlib.util.find_spec("triton") is None:
        return Check("Triton", False, "not installed", "install the Triton release that belongs to this PyTorch")
    import triton

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return Check("Triton", False, "no C compiler, which Triton needs to launch kernels", "install gcc, or set CC")
    detail = f"{triton.__version__}, C compiler {compiler}"
    if not _at_least(triton.__version__, MIN_TRITON):
        remedy = f"install Triton {_dotted(MIN_TRITON)} or newer (it comes with PyTorch {_dotted(MIN_TORCH)})"
        return Check("Triton", False, detail, remedy)
    return Check("Triton", True, detail)


def _nccl() -> Check:
    if not torch.distributed.is_nccl_available():
        return Check("NCCL", True, "not in this build of PyTorch; one GPU does not need it")
    version = torch.cuda.nccl.version()
    ok = version >= MIN_NCCL
    detail = f"{_dotted(version)} ({'sums' if ok else 'cannot sum'} FP8 values; several GPUs only)"
    return Check("NCCL", ok, detail, "" if ok else f"install NCCL {_dotted(MIN_NCCL)} or newer")


def _operand(rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random E4M3 codes [rows, columns] and their scale."""
    x = torch.randn(rows, columns, device=device)
    scale = kernels.scale_from_amax(kernels.amax(x), E4M3.max)
    return kernels.cast(x, scale, E4M3.dtype), scale


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _gemm() -> Check:
    device, size = _device(), 256
    (a, a_scale), (b, b_scale) = _operand(size, size, device), _operand(size, size, device)
    product = kernels.scaled_mm_nt(a, b, a_scale, b_scale, torch.bfloat16).float()
    exact = reference.uncast(a, a_scale) @ reference.uncast(b, b_scale).T
    error = ((product - exact).norm() / exact.norm()).item()
    ok = error < 2**-7  # BF16 output: one rounding, 2^-9 on average
    against = "the FP32 product of the same codes"
    kernel = "tensor cores" if device == "cuda" else "reference kernel"
    remedy = "" if ok else "do not train on this machine: report the versions above"
    return Check("FP8 GEMM", ok, f"{kernel}, relative error {error:.1e} to {against}", remedy)


def _cast() -> Check:
    device = _device()
    x = torch.randn(1 << 16, device=device) * torch.logspace(-6, 2, 1 << 16, device=device)
    scale = torch.tensor(4.0, device=device)
    key = kernels.make_key(seed=1, step=1, stream=0, device=torch.device(device))
    wrong = 0
    for rounding in ("nearest", "stochastic"):
        codes = kernels.cast(x, scale, E4M3.dtype, rounding=rounding, key=key)
        expected = reference.cast(x, scale, E4M3.dtype, rounding=rounding, key=key)
        wrong += int((codes.view(torch.uint8) != expected.view(torch.uint8)).sum())
    kernel = "Triton kernel" if device == "cuda" else "reference kernel"
    if wrong:
        detail = f"{kernel}: {wrong} of {2 * x.numel()} codes differ from the reference"
        return Check("FP8 cast", False, detail, "do not train on this machine: report the versions above")
    return Check("FP8 cast", True, f"{kernel}, bit for bit the reference, to nearest and stochastic")


def _attention() -> Check:
    device = _device()
    dtype = torch.bfloat16
    working = []
    for backend in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ):
        q = torch.randn(1, 2, 128, 64, device=device, dtype=dtype, requires_grad=True)
        try:
            with sdpa_kernel(backend), torch.no_grad() if device == "cpu" else torch.enable_grad():
                out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
                if device == "cuda":
                    out.sum().backward()
        except RuntimeError:
            continue
        working.append(backend.name.split("_")[0].lower())
    detail = f"backends that work: {', '.join(working) or 'none'}"
    if device == "cuda" and "cudnn" not in working:
        return Check("attention", False, detail, "cuDNN's backend is the fastest on Hopper: install PyTorch's cuDNN")
    return Check("attention", bool(working), detail, "" if working else "reinstall PyTorch")


def _memory() -> Check:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        ok = free > total / 2
        remedy = "" if ok else "another process holds the rest: see `nvidia-smi`"
        return Check("memory", ok, f"{free / GIB:.1f} of {total / GIB:.1f} GiB free on the GPU", remedy)
    page = os.sysconf("SC_PAGE_SIZE")
    return Check("memory", True, f"{page * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB of main memory")


def _break_even() -> Check:
    """Which layers `octavo.convert` leaves for their speed, by octavo's own measurements."""
    name = "break-even"
    table = find_table(capability_of(torch.device(_device())))
    if table is None and not torch.cuda.is_available():
        return Check(name, True, "nothing to measure without a GPU: no layer is left for its speed")
    if table is None:
        command = f"octavo bench --break-even {MEASURED.name}"
        return Check(name, True, f"not measured on this device, so no layer is left for its speed: run `{command}`")
    return Check(name, True, f"FP8 is faster ({table.device}) in {'; '.join(table.describe())}")


def _packages() -> Check:
    missing = [name for name in TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        detail = f"not installed: {', '.join(missing)}; only `octavo train` and `octavo demo` use them"
        return Check("training tools", True, detail, "pip install '.[train]' in octavo's folder")
    return Check("training tools", True, "installed")
