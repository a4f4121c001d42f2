"""Fused blocks compute what the separate layers do, in every dialect, storage and mode; where they cannot, those layers run."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.formats import E5M2
from octavo.kernels import reference
from octavo.linear import FP8Linear, drop_weight_cache
from octavo.linear.operand import known_amax, remember_amax
from octavo.linear.stats import collect_stats
from octavo.models import Transformer, TransformerConfig
from octavo.models.layers import Attention, GELUFeedForward, document_places, rotary_table
from octavo.optim import AdamW
from octavo.recipe import O2, Recipe

DIALECTS = ("gpt", "llama")


def model(dialect: str, recipe: str | Recipe | None, seed: int, **options) -> Transformer:
    shape = {"dim": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 256, "max_seq_len": 48, "ffn_dim": 144}
    built = Transformer.build(TransformerConfig(dialect, **{**shape, **options}), recipe, seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():  # parameters of norms as training leaves them
        for name, parameter in built.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return built


def batch(tokens: int = 33) -> Tensor:
    return torch.randint(256, (2, tokens))


def gradients(model: Transformer, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, real gradients by name)."""
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach(), {
        name: (p.grad.dequantize() if hasattr(p.grad, "codes") else p.grad).float()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("recipe", ["O1", "O2", "paper-3"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_as_close_to_fp32_as_separate_layers(dialect, recipe, seed):
    models = [model(dialect, None, seed, dtype=torch.float32)]
    models += [model(dialect, recipe, seed, fused=f) for f in (False, True)]
    several, distances = [], torch.zeros(2)
    for _ in range(6):
        tokens = batch()
        (exact, wanted), (plain, separate), (loss, fused) = (gradients(one, tokens) for one in models)
        distances += torch.stack([loss - exact, plain - exact]).abs() / 6
        assert fused.keys() == separate.keys() == wanted.keys()
        several.append([[error(fused[name], wanted[name]), error(separate[name], wanted[name])] for name in wanted])
        for one in models:
            one.zero_grad()
    assert distances[0] <= 1.5 * distances[1] + 2e-3
    # Both round, each in its own way: the norms of two such errors differ by chance, over the few elements of a vector most.
    errors = torch.tensor(several).mean(0)
    slack = torch.tensor([1.3 if grad.dim() > 1 else 2.0 for grad in wanted.values()])
    assert (errors[:, 0] <= slack * errors[:, 1] + 0.01).all()
    assert errors[:, 0].mean() <= 1.1 * errors[:, 1].mean()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_in_fp32_nothing_but_last_bits_differs(dialect, seed):
    """The fused kernels round to the compute dtype first: where that is exact, so is the rest, but for codes on an edge.

    In up to four models of a hundred a value lies so near to one that its code differs, and with it what is computed from it; batches share
    tokens, so in all of them. Hence five models.
    """
    worst = []
    for number in range(5):
        tokens = batch()
        (plain, separate), (loss, fused) = (
            gradients(model(dialect, "O1", seed + number, fused=f, dtype=torch.float32), tokens) for f in (False, True)
        )
        assert abs(loss - plain) < 1e-3
        worst.append(max(error(fused[name], separate[name]) for name in separate))
    assert min(worst) < 1e-5 and max(worst) < 0.3


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_recomputation_changes_no_bit(dialect, recompute, seed):
    tokens = batch()
    (one, wanted), (other, got) = (
        gradients(model(dialect, "O2", seed, fused=True, recompute=r), tokens) for r in ("none", recompute)
    )
    assert torch.equal(one, other)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_micro_batches_add_up(dialect, seed):
    tokens = batch()
    once = model(dialect, "O1", seed, fused=True)
    twice = model(dialect, "O1", seed, fused=True)
    _, wanted = gradients(once, tokens)
    gradients(twice, tokens)
    _, got = gradients(twice, tokens)
    assert all(error(got[name], 2 * wanted[name]) < 0.02 for name in wanted)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_frozen_weights_get_no_gradient_and_change_no_other(dialect, seed):
    tokens = batch()
    free, partly = (model(dialect, "O2", seed, fused=True) for _ in range(2))
    frozen = [n for n, p in partly.named_parameters() if "qkv.weight" in n or "ffn.out.weight" in n]
    for name in frozen:
        partly.get_parameter(name).requires_grad_(False)
    _, wanted = gradients(free, tokens)
    _, got = gradients(partly, tokens)
    assert wanted.keys() - got.keys() == set(frozen) != set()
    assert all(torch.equal(got[name], wanted[name]) for name in got)


def block_gradients(block: nn.Module, x: Tensor, grad: Tensor, mask: Tensor | None, keep: bool = False) -> list[Tensor]:
    """The output of a block of `model`, the gradient of its input, and those of its parameters, which stay there if `keep`."""
    cos, sin = rotary_table(x.shape[1], 16, 10_000.0, x.device)
    leaf = x.clone().requires_grad_()
    y = block(leaf, cos, sin, mask)
    y.backward(grad)
    gradients = [p.grad.dequantize() if hasattr(p.grad, "codes") else p.grad.clone() for p in block.parameters()]
    if not keep:
        block.zero_grad()
    return [y.detach(), leaf.grad, *gradients]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"positions": "learned"}, {"n_kv_heads": 2}, {"qkv_bias": True}], ids=str)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_joined_sums_and_cuts_change_no_bit(dialect, options, masked, seed, monkeypatch):
    """What the kernels of fused blocks do on their way, against separate steps. (FP32: nothing is rounded between.)"""
    inputs = block_inputs(seed, masked)
    block = model(dialect, "O2", seed, fused=True, dtype=torch.float32, **options).blocks[0]
    got = block_gradients(block, *inputs)
    for step in (add_norm_stats, norm_backward, rotary_, rotary_backward_quantize):
        monkeypatch.setattr(kernels, step.__name__, step)
    want = block_gradients(block, *inputs)
    assert all(map(torch.equal, got, want))


def add_norm_stats(x, addend, *args, **options):
    return x + addend, *kernels.norm_stats(x + addend, *args, **options)


def norm_backward(dy, x, weight, mean, rstd, residual_grad, *, _joined=kernels.norm_backward):
    dx, dweight, dbias, _ = _joined(dy, x, weight, mean, rstd)
    return dx + residual_grad, dweight, dbias, kernels.amax(dx + residual_grad)


def rotary_(qkv, cos, sin, heads):
    qkv.copy_(kernels.rotary(qkv, cos, sin, heads))


def rotary_backward_quantize(dq, dk, dv, cos, sin, *args, **options):
    whole = torch.cat((dq, dk, dv), dim=2)
    if cos is not None:
        whole = kernels.rotary(whole, cos, sin, dq.shape[2] + dk.shape[2], backward=True)
    return kernels.quantize(whole.flatten(2).flatten(0, 1), *args, return_inverse=True, **options)


def block_inputs(seed: int, masked: bool = False, dtype: torch.dtype = torch.float32):
    """x, the gradient of the output, a mask, for `block_gradients`."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, 2, 31, 64, generator=generator).to(dtype)
    documents = torch.randint(3, (2, 31), generator=generator).sort(dim=1).values
    return x, grad, document_places(documents)[1] if masked else None


COMPILED = [
    *((options, mask, "aot_eager") for options, mask in [({"positions": "learned"}, False), ({"n_kv_heads": 2}, True)]),
    ({"recompute": "selective"}, False, "aot_eager"),
    pytest.param({}, False, "inductor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("options", "masked", "backend"), COMPILED, ids=str)
@pytest.mark.parametrize("recipe", ["O1", "O2"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_compiled_gradients_are_those_of_eager_blocks(dialect, recipe, options, masked, backend, seed):
    """Every one of them, at each call, and none is zero. (A loss does not tell: it comes before the gradients of its step.)"""
    options, inputs = {**options, "dtype": torch.bfloat16}, block_inputs(seed, masked, torch.bfloat16)
    eager, traced = (model(dialect, recipe, seed, fused=True, **options).blocks[0] for _ in range(2))
    traced.compile(fullgraph=True, backend=backend)
    for _ in range(2):
        want, got = (block_gradients(block, *inputs) for block in (eager, traced))
        assert len(got) == 2 + len(list(eager.parameters()))
        assert all(one.count_nonzero() > 0 for one in got)
        assert all(map(torch.equal, got, want))


def test_known_maxima_compile_nothing_again_and_change_no_bit(seed):
    """Those of weights after a step of the optimizer or another write, and of gradients for the optimizer; compiled or not."""
    counted = torch._dynamo.utils.counters["stats"]
    runs = []
    for compiled in (False, True):
        one = model("gpt", "O2", seed, fused=True, n_layers=1)
        block, optimizer = one.blocks[0], AdamW(one.parameters(), lr=0.03)
        if compiled:
            block.compile(fullgraph=True, backend="aot_eager")
        codes, results, known = block.attention.qkv.weight.codes, [], []
        for step in range(6):
            results += block_gradients(block, *block_inputs(seed + step), keep=True)
            known.append(known_amax(codes))
            assert torch.equal(known[-1], kernels.amax(codes))
            for weight in (layer.weight for layer in block.modules() if isinstance(layer, FP8Linear)):
                assert torch.equal(known_amax(weight.grad.codes), kernels.amax(weight.grad.codes))
            if step == 2:
                with torch.no_grad():
                    block.attention.qkv.weight.mul_(3 * torch.rand(192, 64))
                assert known_amax(codes) is None
            else:
                optimizer.step()
                assert torch.equal(known_amax(codes), kernels.amax(codes))
            optimizer.zero_grad()
            if step == 0:
                graphs = counted["unique_graphs"]
        assert counted["unique_graphs"] == graphs
        runs.append(results)
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_is_read_for_its_maximum_once(compiled, seed, monkeypatch):
    read: list[tuple[int, ...]] = []
    amax = reference.amax
    monkeypatch.setattr(reference, "amax", lambda x, **k: read.append(tuple(x.shape)) or amax(x, **k))
    block = model("gpt", "O2", seed, fused=True).blocks[0]
    if compiled:
        block.compile(fullgraph=True, backend="aot_eager")
    shapes = {(192, 64), (144, 64), (64, 144)}
    for expected in (shapes, set()):
        read.clear()
        block_gradients(block, *block_inputs(seed))
        assert {shape for shape in read if shape in shapes} == expected
        assert len([shape for shape in read if shape in shapes]) == len(expected)
    drop_weight_cache(block.parameters())
    assert known_amax(block.attention.qkv.weight.codes) is None


def test_whoever_makes_a_gradient_finds_its_maximum(seed, monkeypatch):
    """Of the gradients that a block casts by itself, none is read for its maximum but the one that comes from outside."""
    one = model("gpt", "O2", seed, fused=True, n_layers=3)
    found: list[bool] = []
    original = kernels.quantize

    def spy(x, fmt, *args, amax=None, **kwargs):
        if fmt is E5M2:
            found.append(amax is not None)
            assert amax is None or torch.equal(amax, kernels.amax(x))
        return original(x, fmt, *args, amax=amax, **kwargs)

    monkeypatch.setattr(kernels, "quantize", spy)
    gradients(one, batch())
    assert len(found) == 6 and found.count(False) == 1 and not found[0]


def test_a_maximum_is_forgotten_with_what_it_was_of(seed):
    """A tensor that autograd adds to in place, or that a hook changes, is read again."""
    x = remember_amax(torch.randn(4, 5), torch.tensor(9.0))
    assert known_amax(x) == 9
    assert known_amax(x.clone()) is None and known_amax(x.view(5, 4)) is None
    x.add_(1)
    assert known_amax(x) is None
    x = remember_amax(x, torch.tensor(9.0))
    x.data = torch.zeros(4, 5)
    assert known_amax(x) is None


@pytest.mark.parametrize("first", [False, True])
def test_a_second_reader_of_the_residual_stream(first, seed):
    """Its gradient is added to that of the next block, which then is not what the block knew the maximum of."""
    plain, fused = (model("gpt", "O1", seed, fused=f, dtype=torch.float32) for f in (False, True))
    x, results = torch.randn(2, 31, 64), []
    cos, sin = rotary_table(31, 16, 10_000.0, x.device)
    for one in (plain, fused):
        middle = one.blocks[0](x, cos, sin)
        readers = [lambda x: 1e3 * x.square().sum(), lambda x, _b=one.blocks[1]: _b(x, cos, sin).square().sum()]
        sum(reader(middle) for reader in (readers if first else reversed(readers))).backward()
        results.append([one.blocks[0].get_parameter(name).grad for name in ("ffn.out.weight", "attention.qkv.weight")])
    assert all(error(got.dequantize(), want.dequantize()) < 0.02 for want, got in zip(*results, strict=True))


def test_nonfinite_activations_stay_visible(seed):
    broken = model("gpt", "O2", seed, fused=True)
    with torch.no_grad():
        broken.blocks[0].ffn_norm.bias[3] = torch.inf
    loss, grads = gradients(broken, batch())
    assert loss.isnan() and grads["blocks.0.attention.qkv.weight"].isnan().all()


def test_a_weight_changed_before_backward_is_an_error(seed):
    one = model("gpt", "O2", seed, fused=True)
    tokens = batch()
    loss = one(tokens[:, :-1], tokens[:, 1:])
    with torch.no_grad():
        one.blocks[1].ffn.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_compiles_as_one_graph(dialect, seed):
    tokens = batch()
    (plain, wanted), (loss, got) = (gradients(one, tokens) for one in compiled_pair(dialect, seed))
    assert abs(plain - loss) < 2e-3
    assert all(error(got[name], wanted[name]) < 0.15 for name in wanted)


def compiled_pair(dialect: str, seed: int) -> list[Transformer]:
    eager, traced = (model(dialect, "O2", seed, fused=True) for _ in range(2))
    for block in traced.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    return [eager, traced]


def names_run(monkeypatch) -> list[str]:
    """Names of the fused kernels that run from now on."""
    names: list[str] = []
    for name in ("norm_stats", "activation_amax", "activation_quantize", "rotary"):
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _f=function, _n=name, **k: names.append(_n) or _f(*a, **k))
    return names


DELAYED = dataclasses.replace(O2, name="delayed", scaling="delayed")


def layers_of(one: Transformer) -> list[FP8Linear]:
    return [layer for layer in one.modules() if isinstance(layer, FP8Linear)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_delayed_scales_follow_the_separate_layers(dialect, recompute, seed):
    """Windows hold the maxima of the same tensors; after the warm-up no kernel looks for a maximum."""
    separate, fused = (model(dialect, DELAYED, seed, fused=f, recompute=recompute) for f in (False, True))
    for step in range(18):
        tokens = batch()
        (plain, _), (loss, _) = (gradients(one, tokens) for one in (separate, fused))
        assert abs(plain - loss) < 0.02
        for one in (separate, fused):
            one.zero_grad()
            for layer in layers_of(one):
                layer.update_scaling()
        for a, b in zip(layers_of(separate), layers_of(fused), strict=True):
            for scaling in ("input_scaling", "grad_output_scaling"):
                want, got = (getattr(layer, scaling).history[: step + 1] for layer in (a, b))
                assert (got > 0).all() and (got / want).log2().abs().max() < 0.5
    assert layers_of(fused)[0].input_scaling.warm


def test_delayed_scales_need_no_maxima_when_warm(seed, monkeypatch):
    warm = model("gpt", DELAYED, seed, fused=True)
    for layer in layers_of(warm):
        for scaling in (layer.input_scaling, layer.grad_output_scaling):
            scaling.warmup = 0
            scaling.warm = True
            scaling.held.fill_(4.0)
    names = names_run(monkeypatch)
    gradients(warm, batch())
    assert "norm_stats" in names and "activation_amax" not in names


def test_delayed_scales_record_the_maxima_that_are_known(seed, monkeypatch):
    """Only the gradient from outside is looked at as it is cast; the maxima of all are recorded."""
    warm = model("gpt", DELAYED, seed, fused=True)
    looked: list[bool] = []
    for name in ("cast_transpose", "cast_transpose_amax"):
        function = getattr(kernels, name)

        def spy(x, scale, dtype, *, _f=function, _looks=name == "cast_transpose_amax", **options):
            if dtype == E5M2.dtype:
                looked.append(_looks)
            return _f(x, scale, dtype, **options)

        monkeypatch.setattr(kernels, name, spy)
    gradients(warm, batch())
    assert looked == [True, False, False, False, False, False]
    assert all((layer.grad_output_scaling.pending > 0).all() for layer in layers_of(warm))


def test_evaluation_moves_no_window(seed):
    still = model("gpt", DELAYED, seed, fused=True).eval()
    with torch.no_grad():
        still(batch())
    assert not any(layer.input_scaling._recorded for layer in layers_of(still))


def test_layers_that_are_not_converted_run_alone(seed, monkeypatch):
    tokens = batch()
    plain, fused = (model("gpt", None, seed, fused=f, positions="learned") for f in (False, True))
    (one, wanted), (other, got) = (gradients(m, tokens) for m in (plain, fused))
    assert torch.equal(one, other) and all(torch.equal(got[name], wanted[name]) for name in wanted)
    names = names_run(monkeypatch)
    gradients(model("gpt", None, seed, fused=True), tokens)
    assert set(names) <= {"rotary"}


def test_counting_casts_runs_layers_alone(seed, monkeypatch):
    counted = model("gpt", O2, seed, fused=True)
    names = names_run(monkeypatch)
    with collect_stats(counted) as stats:
        gradients(counted, batch())
    assert set(names) <= {"rotary"} and stats
    gradients(counted, batch())
    assert {"norm_stats", "activation_quantize"} < set(names)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_backward_nothing_is_transposed(dialect, seed, monkeypatch):
    wanted: list[bool] = []
    for name in ("norm_cast", "activation_cast", "quantize"):
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _f=function, **k: wanted.append(k["col"]) or _f(*a, **k))
    with torch.no_grad():
        model(dialect, "O1", seed, fused=True)(batch())
    assert wanted and not any(wanted)


@pytest.mark.parametrize("name", ["attention_norm", "attention", "attention.qkv", "ffn_norm", "ffn", "ffn.out"])
def test_hooks_run(name, seed):
    """A fused block calls none of its modules, so one with hooks inside runs as separate layers."""
    separate, fused = (model("gpt", "O1", seed, fused=f, n_layers=1, positions="learned") for f in (False, True))
    heard: list[str] = []
    module = fused.blocks[0].get_submodule(name)
    module.register_forward_pre_hook(lambda *_: heard.append("forward"))
    module.register_full_backward_hook(lambda *_: heard.append("backward"))
    tokens = batch()
    (plain, wanted), (loss, got) = (gradients(m, tokens) for m in (separate, fused))
    assert heard == ["forward", "backward"]
    assert torch.equal(plain, loss) and all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(64, elementwise_affine=False)])
def test_other_norms_and_feed_forwards_run_alone(norm, seed):
    separate, fused = (model("gpt", "O1", seed, fused=f, positions="learned") for f in (False, True))
    for one in (separate, fused):
        one.blocks[0].ffn_norm = norm
        one.blocks[1].ffn = nn.Tanh()
    tokens = batch()
    (plain, wanted), (loss, got) = (gradients(m, tokens) for m in (separate, fused))
    assert torch.equal(plain, loss) and all(torch.equal(got[name], wanted[name]) for name in wanted)


class OnePlus(nn.RMSNorm):
    """As in Gemma: the gain is one more than the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class Doubled(GELUFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Silent(Attention):
    def forward(self, x: Tensor, *others: Tensor | None) -> Tensor:
        return 0 * super().forward(x, *others)


def put_norm(block: nn.Module) -> None:
    block.ffn_norm = OnePlus(64)
    block.ffn_norm.weight.data = 0.2 * torch.randn(64)


def put_forward(block: nn.Module) -> None:
    out = block.ffn.out
    out.forward = lambda x: 3 * type(out).forward(out, x)


CUSTOMISED = {
    "norm": put_norm,
    "feed-forward": lambda block: setattr(block.ffn, "__class__", Doubled),
    "attention": lambda block: setattr(block.attention, "__class__", Silent),
    "forward": put_forward,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CUSTOMISED)
def test_modules_of_the_users_are_called(change, compiled, seed):
    """What they compute, and the gradients of their parameters, are those of a block that is not fused."""
    results = []
    for fused in (False, True):
        block = model("gpt", "O2", seed, fused=fused).blocks[0]
        torch.manual_seed(seed)
        CUSTOMISED[change](block)
        if compiled:
            block.compile(backend="aot_eager")
        results.append(block_gradients(block, *block_inputs(seed)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_autocast_to_another_dtype_runs_the_layers_apart(dialect, seed):
    tokens = batch()
    losses = []
    for fused in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(gradients(model(dialect, "O2", seed, fused=fused, dtype=torch.float32), tokens))
    (one, wanted), (two, got) = losses
    assert abs(one - two) < 2e-3 and got.keys() == wanted.keys()
    assert all(error(got[name], wanted[name]) < 0.15 for name in wanted)  # (the rotation is another kernel)
