"""Compiled fused blocks on a GPU, at the size of a 7B: the gradients of eager ones, in as many kernels."""

import pytest
import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.linear import FP8Linear
from octavo.linear.operand import known_amax
from octavo.models import Transformer, TransformerConfig
from octavo.models.layers import best_attention, rotary_table
from octavo.optim import AdamW
from octavo.tensor import ScaledTensor

pytestmark = pytest.mark.gpu

DIM, WIDTH, HEADS, BATCH, TOKENS = 4096, 16384, 32, 2, 2048
DIALECTS = ("gpt", "llama")


def blocks(dialect: str, recipe: str, seed: int, fused: bool, compiled: bool = False, layers: int = 1) -> nn.ModuleList:
    fields = {
        "dim": DIM,
        "n_layers": layers,
        "n_heads": HEADS,
        "ffn_dim": WIDTH,
        "vocab_size": 64,
        "max_seq_len": TOKENS,
    }
    model = Transformer.build(TransformerConfig(dialect, fused=fused, **fields), recipe, seed=seed, device="cuda")
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.blocks.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    for block in model.blocks if compiled else ():
        block.compile(fullgraph=True)
    return model.blocks


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(2, BATCH, TOKENS, DIM, device="cuda", generator=generator).bfloat16().unbind()


def step(model: nn.ModuleList, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The output, the gradient of x and those of all parameters."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y, table = leaf, rotary_table(TOKENS, DIM // HEADS, 10_000.0, x.device)
    with best_attention(x.device):
        for block in model:
            y = block(y, *table)
        y.backward(grad)
    found = {"y": y.detach(), "x": leaf.grad}
    return found | {
        name: p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad.clone()
        for name, p in model.named_parameters()
    }


def error(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.parametrize("recipe", ["O1", "O2"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_compiled_gradients_are_those_of_eager_blocks(dialect, recipe, seed):
    """Closer than fused ones are to those of separate layers, and none is zero, at the first call and at a later one."""
    given = inputs(seed)
    separate, eager = (step(blocks(dialect, recipe, seed, fused), *given) for fused in (False, True))
    traced = blocks(dialect, recipe, seed, True, compiled=True)
    for _ in range(2):
        got = step(traced, *given)
        assert got.keys() == eager.keys()
        assert all(one.count_nonzero() > 0 for one in got.values())
        far = {name: (error(got[name], eager[name]), error(eager[name], separate[name])) for name in eager}
        assert all(one <= other + 1e-3 for one, other in far.values()), far


def names_of(model: nn.ModuleList, x: Tensor, grad: Tensor) -> list[str]:
    """Kernels of a step, after two that warm up."""
    for _ in range(2):
        step(model, x, grad)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, x, grad)
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_compiled_blocks_run_the_kernels_of_eager_ones(dialect, seed):
    """Beside these, a cast more for each weight, which dgrad casts again; and largest values that no graph hands to the next."""
    layers, given = 2, inputs(seed)
    eager, compiled = (names_of(blocks(dialect, "O2", seed, True, c, layers), *given) for c in (False, True))
    for name in ("_rotary_kernel", "_rotary_cast_kernel", "_stats_kernel", "_cast_kernel", "_backward_kernel"):
        assert eager.count(name) == compiled.count(name), (name, sorted(set(eager)), sorted(set(compiled)))
    assert eager.count("_rotary_cast_kernel") == layers
    assert compiled.count("_quantize_kernel") <= eager.count("_quantize_kernel") + 4 * layers
    assert compiled.count("_amax_kernel") <= eager.count("_amax_kernel") + layers
    assert not any("cat" in one for one in compiled if "triton" in one), sorted(set(compiled))


def test_maxima_of_weights_follow_the_optimizer(seed):
    """Steps of AdamW leave the maxima of the codes they wrote; nothing is compiled again, and another write is seen."""
    model, given = blocks("gpt", "O2", seed, True, compiled=True), inputs(seed)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    weights = [layer.weight for layer in model.modules() if isinstance(layer, FP8Linear)]
    step(model, *given)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(3):
        optimizer.step()
        assert all(torch.equal(known_amax(w.codes), kernels.amax(w.codes)) for w in weights)
        step(model, *given)
    with torch.no_grad():
        weights[0].mul_(7)
    assert known_amax(weights[0].codes) is None
    step(model, *given)
    assert torch.equal(known_amax(weights[0].codes), kernels.amax(weights[0].codes))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_captured_step_reads_its_weights(seed):
    """Replays cannot ask whether a weight was written to: they find its maximum each time."""
    model, given = blocks("gpt", "O2", seed, True), inputs(seed)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(model, *given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = step(model, *given)
    torch.cuda.synchronize()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 * torch.rand(p.shape, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    replayed = {name: one.clone() for name, one in results.items()}
    want = step(model, *given)
    assert all(error(replayed[name], want[name]) < 1e-3 for name in want)
