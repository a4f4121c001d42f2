"""What an eager FP8Linear costs the host alone: Python and PyTorch, with everything that a device would do left out.

Needs Triton and no GPU. Kernels are compiled for a Hopper GPU, and launched by an empty function in place of the driver's; a product of
FP8 matrices is an empty tensor. So the figures are those of one core, and comparable between two commits on the same machine: the least
of `--repeats`, in microseconds of this thread, for a forward and backward pass with bias. The launches are those of this library, the
operators those that PyTorch's dispatcher sees (each a launch on a GPU, unless it only allocates or views). Tensors are 64 x 64: no shape
changes what is measured. `nn.Linear` runs its three small products and sums; the floor is a layer whose function does nothing but
allocate its results, and hands back a weight gradient in FP8.

With delayed scaling, `update` is what the step of an optimizer adds for 32 layers.

    python benchmarks/linear_stub.py [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SIZE = 64
CALLS = 40
ALLOCATES_OR_VIEWS = ("empty", "detach", "view", "t.", "unsqueeze", "slice", "select", "unbind", "alias")
launches: Counter[str] = Counter()
operators: Counter[str] = Counter()


class Launch:
    """Triton's launcher, which calls nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        """What the compiler hands over is not needed."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: tuple[str], *arguments: Any) -> None:
        launches[function[0]] += 1


class Utils:
    def load_binary(self, name: str, *rest: Any) -> tuple[Any, ...]:
        return None, (name,), 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132}


class Driver:
    """A Hopper GPU that is not there."""

    utils, launcher_cls = Utils(), Launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Count(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operators[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def product(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """In place of `torch._scaled_mm`, whose seventh argument is the dtype."""
    launches["scaled_mm"] += 1
    return torch.empty((a.shape[0], b.shape[1]), dtype=rest[4])


def stub() -> None:
    """Sends CPU tensors to the kernels for CUDA, and these nowhere."""
    driver.set_active(Driver())
    torch._scaled_mm = product
    from octavo.kernels import cuda

    for name, module in [*sys.modules.items()]:
        if name.startswith("octavo.kernels") and hasattr(module, "backend"):
            module.backend = lambda _: cuda  # type: ignore[attr-defined]


def floor(layer: nn.Linear) -> nn.Module:
    """A layer with the parameters of `layer` that computes nothing."""
    from octavo.tensor import ScaledTensor

    codes, scale = torch.zeros(SIZE, SIZE, dtype=torch.float8_e4m3fn), torch.ones(())

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.empty((SIZE, SIZE), dtype=x.dtype)

        @staticmethod
        def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, ...]:
            (x,) = ctx.saved_tensors
            dw = ScaledTensor(codes, scale, x.dtype, residual_on_add=True)
            return torch.empty((SIZE, SIZE), dtype=x.dtype), dw, torch.empty(SIZE, dtype=x.dtype)

    class Floor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = layer.weight, layer.bias

        def forward(self, x: Tensor) -> Tensor:
            return Nothing.apply(x, self.weight, self.bias)

    return Floor()


def call(layer: nn.Module) -> Callable[[], None]:
    """A forward and backward pass, from no gradients."""
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(SIZE, SIZE, dtype=torch.bfloat16)

    def step() -> None:
        layer(x).backward(dy)
        x.grad = layer.weight.grad = layer.bias.grad = None

    return step


def report(name: str, function: Callable[[], None], repeats: int, calls: int = CALLS) -> None:
    """Prints the least time of a call, and what it asks for."""
    function()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(calls):
            function()
        times.append((time.thread_time() - start) / calls * 1e6)
    launches.clear()
    operators.clear()
    with Count():
        function()
    work = sum(n for operator, n in operators.items() if not any(part in operator for part in ALLOCATES_OR_VIEWS))
    print(
        f"{name:<24} {min(times):7.1f} µs  {sum(launches.values()):3} launches  {sum(operators.values()):4} operators, "
        f"{work} with kernels"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=80)
    parser.add_argument("--profile", action="store_true", help="where the time of the layer with current scaling goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import octavo
    import octavo.scaling

    stub()
    delayed = dataclasses.replace(octavo.RECIPES["O2"], name="delayed", scaling="delayed")

    def make(recipe: Any) -> Any:
        linear = nn.Linear(SIZE, SIZE, dtype=torch.bfloat16)
        return octavo.convert(nn.Sequential(linear), recipe, filter=lambda module, name: True)[0]

    report("nn.Linear", call(nn.Linear(SIZE, SIZE, dtype=torch.bfloat16)), args.repeats)
    report("floor", call(floor(make("O2"))), args.repeats)
    current = call(make("O2"))
    report("O2", current, args.repeats)
    layer = make(delayed)
    step = call(layer)
    for _ in range(17):
        step()
        layer.update_scaling()
    report("O2, delayed", step, args.repeats)
    scalings = [s for layer in [make(delayed) for _ in range(32)] for _, s in layer.scalings()]

    def update() -> None:
        for scaling in scalings:
            scaling.expect_record()
        octavo.scaling.update_all(scalings, torch.tensor(True))

    for _ in range(17):
        update()
        for scaling in scalings:
            scaling.scale_of(lambda: torch.ones(()), torch.device("cpu"), 448.0)
    report("update of 32 layers", update, args.repeats, 5)
    if args.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(300):
            current()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
