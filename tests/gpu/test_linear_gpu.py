"""An FP8Linear leaves the host free: no wait for the device, few kernels, and forward and backward fit into a CUDA graph."""

import pytest
import torch
from fp8_layers import DELAYED, LEVELS, make, same_bits
from torch import Tensor, nn

from octavo.convert import convert
from octavo.recipe import O2

pytestmark = pytest.mark.gpu


def build(recipe, k: int = 256, n: int = 384) -> tuple[nn.Module, Tensor, Tensor]:
    """(layer, x, dy)"""
    layer = make(k, n, recipe, dtype=torch.bfloat16).cuda()
    x = torch.randn(512, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return layer, x, torch.randn(512, n, device="cuda", dtype=torch.bfloat16)


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x.grad = layer.weight.grad = layer.bias.grad = None
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


@LEVELS
def test_a_captured_step_gives_the_same_bits(recipe, seed):
    layer, x, dy = build(recipe)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(layer, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = step(layer, x, dy)
    for factor in (1.0, 1e-3, 100.0):
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * factor)
            dy.copy_(torch.randn_like(dy) / factor)
        graph.replay()
        replayed = [result.clone() for result in results]
        assert all(same_bits(got, want) for got, want in zip(replayed, step(layer, x, dy), strict=True))


@pytest.mark.parametrize("recipe", [O2, DELAYED], ids=["current", "delayed"])
def test_a_step_never_waits_for_the_device(recipe, seed):
    layer, x, dy = build(recipe)
    step(layer, x, dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@LEVELS
def test_a_step_takes_few_kernels(recipe, seed):
    """Three GEMMs, largest value and cast of four tensors, and for the bias the second step of its sum and its dtype."""
    layer, x, dy = build(recipe)
    step(layer, x, dy)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(layer, x, dy)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # cuBLASLt may split a GEMM into parts and their sum, and clear its workspace first
    assert len(names) <= 13 + 2 * 3, names


def test_layers_of_two_shapes_on_two_streams(seed):
    """Launches on streams that run at the same time share nothing."""
    pairs = [build(O2), build(O2, 1024, 512)]
    want = [step(*pair) for pair in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for pair, stream in zip(pairs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(step(*pair))
        torch.cuda.synchronize()
        for ours, theirs in zip(got, want, strict=True):
            assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.multigpu
def test_another_device_than_the_current_one(seed):
    layer, x, dy = build(O2)
    want = step(layer, x, dy)
    other = convert(nn.Sequential(nn.Linear(256, 384, dtype=torch.bfloat16)), O2, filter=lambda module, fqn: True)[0]
    other.load_state_dict(layer.state_dict())
    other = other.to("cuda:1")
    x1, dy1 = x.detach().to("cuda:1").requires_grad_(), dy.to("cuda:1")
    for _ in range(2):
        got = step(other, x1, dy1)
        assert all(same_bits(a.to("cuda:0"), b) for a, b in zip(got, want, strict=True))
