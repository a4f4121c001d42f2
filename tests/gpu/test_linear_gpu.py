"""An FP8Linear leaves the host free: no wait for the device, few kernels, and forward and backward fit into a CUDA graph."""

import copy

import pytest
import torch
from fp8_layers import DELAYED, LEVELS, make, same_bits
from torch import Tensor, nn

from octavo.convert import convert
from octavo.linear import drop_weight_cache
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


def change(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(3 * torch.rand(weight.shape, device="cuda"))


@LEVELS
@pytest.mark.parametrize("grad", [False, True], ids=["generation", "accumulation"])
def test_replays_read_the_weight_as_it_is(recipe, grad, seed):
    """On the stream of the warm-up, which left an operand of the weight: the graph casts its own, and leaves none."""
    layer, x, dy = build(recipe)

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [layer(x)]

    def run() -> list[Tensor]:
        return step(layer, x, dy) if grad else forward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(x).backward(dy) if grad else forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = run()
        before = [one.clone() for one in run()]  # no replay has made anything yet
        graph.replay()
        assert all(same_bits(got, want) for got, want in zip(results, before, strict=True))
        for _ in range(2):
            change(layer.weight)
            graph.replay()
            replayed = [one.clone() for one in results]
            assert all(same_bits(got, want) for got, want in zip(replayed, run(), strict=True))
    torch.cuda.synchronize()


def test_delayed_scales_follow_the_replays_of_a_graph(seed):
    layer, x, dy = build(DELAYED)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(17):
            step(layer, x, dy)
            layer.update_scaling()
        x.grad = layer.weight.grad = layer.bias.grad = None
        eager = copy.deepcopy(layer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = step(layer, x, dy)
        for factor in (1.0, 30.0, 1000.0, 1e-3):
            with torch.no_grad():
                x.copy_(torch.randn_like(x) * factor)
                dy.copy_(torch.randn_like(dy) * factor)
            graph.replay()
            replayed = [one.clone() for one in results]
            assert all(same_bits(got, want) for got, want in zip(replayed, step(eager, x, dy), strict=True))
            layer.update_scaling()
            eager.update_scaling()
            for (_, ours), (_, theirs) in zip(layer.scalings(), eager.scalings(), strict=True):
                assert torch.equal(ours.history, theirs.history) and torch.equal(ours.held, theirs.held)
                assert ours.updates == theirs.updates
    torch.cuda.synchronize()


def test_an_operand_serves_the_stream_that_made_it(seed):
    """Both streams have waited for weight and input; neither waits for what the other casts."""
    layer, x, _ = build(O2)
    with torch.no_grad():
        want = layer(x)
        drop_weight_cache([layer.weight])
        x = x.detach()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(100_000_000)  # cycles: what follows is queued, and not done
            layer(x)
        with torch.cuda.stream(torch.cuda.Stream()):
            got = layer(x)
        torch.cuda.synchronize()
    assert same_bits(got, want)


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
