"""Output heads: a forward in the compute dtype, a backward in FP8, in `HeadLinear` and in the chunked loss of octavo's own decoder.

E5M2 has two mantissa bits: a value is off by up to 1/8 and by 5% on average. Measured over 150 seeds, both gradients are off by up to
5.7% from those in the compute dtype, with a cosine above 0.9984; the bounds here are 7% and 0.998.
"""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from fp8_layers import always, relative, same_bits
from torch import Tensor, nn

from octavo import kernels
from octavo.convert import convert, convert_report, export, initialize
from octavo.convert.break_even import TooSlow
from octavo.convert.layers import left_for_speed
from octavo.formats import E4M3, E5M2
from octavo.linear import FP8Linear, HeadLinear
from octavo.memory import memory_report
from octavo.models import Transformer, TransformerConfig, head_gradients
from octavo.models.head_gradients import FP8Gradients, unit_scale
from octavo.models.loss import chunk_loss, chunk_tokens, linear_cross_entropy
from octavo.recipe import RECIPES
from octavo.tensor import ScaledTensor

ERROR, COSINE = 0.07, 0.998
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
FORMATS = pytest.mark.parametrize("fmt", [E5M2, E4M3], ids=str)
O1, O2 = RECIPES["O1"], RECIPES["O2"]
WITHOUT = dataclasses.replace(O2, name="without", head_grad_output=None)


class Model(nn.Module):
    """A layer, and a head, named or tied as those of Hugging Face models are."""

    def __init__(self, tied: bool = False, vocabulary: int = 331, dim: int = 96) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, dim)
        self.layer = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        return self.lm_head(x + self.layer(x))


def make_head(k: int, n: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[HeadLinear, nn.Linear]:
    """A head and the plain layer that it was made from."""
    plain = nn.Linear(k, n, bias=bias, dtype=dtype)
    head = copy.deepcopy(plain)
    HeadLinear.adopt(head, O2)
    assert isinstance(head, HeadLinear)
    return head, plain


def cosine(x: Tensor, y: Tensor) -> float:
    return F.cosine_similarity(x.double().flatten(), y.double().flatten(), 0).item()


def near(x: Tensor, exact: Tensor) -> bool:
    return relative(x, exact) < ERROR and cosine(x, exact) > COSINE


def likely_targets(logits: Tensor) -> Tensor:
    """Targets that the model would draw itself: it has learned something."""
    return torch.distributions.Categorical(logits=logits.detach().float()).sample()


# --- the layer


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("k", "n"), [(96, 331), (64, 512), (50, 1003)])
@pytest.mark.parametrize("lead", [(37,), (3, 37), (2, 3, 8)], ids=str)
def test_forward_has_the_bits_of_a_plain_layer_and_gradients_are_near(lead, k, n, bias, dtype, seed):
    head, plain = make_head(k, n, bias, dtype)
    exact = copy.deepcopy(plain).float()
    x = torch.randn(*lead, k).to(dtype)
    xs = [t.clone().requires_grad_() for t in (x, x, x.float())]
    ys = [layer(t) for layer, t in zip((head, plain, exact), xs, strict=True)]
    assert same_bits(ys[0], ys[1])
    targets = likely_targets(4 * ys[1]).flatten()
    for y in (ys[0], ys[2]):
        F.cross_entropy(y.flatten(0, -2).float(), targets).backward()
    assert xs[0].grad.dtype == dtype and head.weight.grad.dtype == dtype and type(head.weight.grad) is Tensor
    assert near(xs[0].grad, xs[2].grad) and near(head.weight.grad, exact.weight.grad)
    if bias:
        assert relative(head.bias.grad, exact.bias.grad) < 0.01


@pytest.mark.parametrize("count", [64, 91, 111, 125])
def test_gradients_of_targets_that_are_all_alike_keep_their_size(count, seed):
    """Nothing is learned yet: all are -1/count, which a power-of-two scale would round by up to an eighth, all in one direction."""
    head, plain = make_head(64, 4096, bias=False)
    x, targets = torch.randn(count, 64), torch.randint(4096, (count,))
    for layer in (head, plain):
        F.cross_entropy(layer(x), targets).backward()
    assert relative(head.weight.grad, plain.weight.grad) < 0.04
    assert head.weight.grad.norm() / plain.weight.grad.norm() == pytest.approx(1, abs=0.02)


@FORMATS
def test_gradients_are_the_products_of_the_codes(fmt, seed):
    recipe = dataclasses.replace(O2, head_grad_output=fmt)
    head = nn.Linear(32, 48, bias=False)
    HeadLinear.adopt(head, recipe)
    x, dy = torch.randn(64, 32, requires_grad=True), torch.randn(64, 48)
    head(x).backward(dy)

    def values(t: Tensor, fmt, power_of_two: bool) -> Tensor:
        codes, _, scale, _ = kernels.quantize(t, fmt, power_of_two=power_of_two)
        return codes.float() / scale

    g = values(dy, fmt, False)
    weight = head.weight.detach()
    mean = weight.mean(0)
    dx = g @ values(weight - mean, E4M3, True) + dy.sum(1)[:, None] * mean
    torch.testing.assert_close(x.grad, dx, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.weight.grad, g.t() @ values(x, E4M3, True), rtol=1e-5, atol=1e-5)


def test_what_all_rows_of_the_weight_share_is_not_rounded_into_dx(seed):
    """Gradients of a softmax add up to zero, so dx does not depend on a row that all rows of the weight have in common."""
    head, plain = make_head(64, 512, bias=False)
    common = 100 * plain.weight.std().item() * torch.randn(64)
    for layer in (head, plain):
        layer.weight.data.add_(common)
    x, targets = torch.randn(128, 64), torch.randint(512, (128,))
    one, two, three = (x.clone().requires_grad_() for _ in range(3))
    F.cross_entropy(plain(one), targets).backward()
    F.cross_entropy(head(two), targets).backward()
    linear_cross_entropy(three, head.weight.detach(), targets, grad_output=E5M2).backward()
    assert relative(two.grad, one.grad) < 0.1 and relative(three.grad, one.grad) < 0.1
    with torch.no_grad():
        dy = plain(x).softmax(-1) - F.one_hot(targets, 512)
        codes, _, scale, _ = kernels.quantize(dy, E5M2, power_of_two=False)
        assert (
            relative(codes.float() / scale @ plain.weight, dy @ plain.weight) > 0.2
        )  # the weight itself not even rounded


def test_only_codes_of_the_input_are_kept_and_only_for_a_weight_that_learns(seed):
    head, _ = make_head(64, 128)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        head(torch.randn(32, 64, requires_grad=True))
        assert sum(t.numel() * t.itemsize for t in saved) == 32 * 64 + 4
        saved.clear()
        head.weight.requires_grad_(False)
        head(torch.randn(32, 64, requires_grad=True))
    assert not saved


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [None, "weight", "x"])
def test_the_gradient_of_the_logits_is_read_twice(frozen, bias, seed, monkeypatch):
    """Its largest value comes with the sums of its rows, if dx wants these; with those of its columns, if a bias does."""
    head, _ = make_head(64, 128, bias)
    head.weight.requires_grad_(frozen != "weight")
    y = head(torch.randn(32, 64, requires_grad=frozen != "x"))
    dy, summed, known = torch.randn(32, 128), [], []
    row_sums, quantize = kernels.row_sums, kernels.quantize
    monkeypatch.setattr(kernels, "row_sums", lambda t: summed.append(t.shape) or row_sums(t))
    monkeypatch.setattr(
        kernels,
        "quantize",
        lambda t, *args, **options: (
            known.append((options.get("amax"), options.get("shift"))) or quantize(t, *args, **options)
        ),
    )
    y.backward(dy)
    at_once = frozen != "x" and not bias
    assert summed == [(32, 128)] * at_once
    assert (known[0][0] is not None) == at_once and len(known) == (1 if frozen == "x" else 2)
    if at_once:
        assert same_bits(known[0][0], kernels.amax(dy))
    if frozen != "x":
        assert same_bits(known[1][1], head.weight.detach().mean(0))


@pytest.mark.parametrize("frozen", ["weight", "x"])
def test_what_needs_no_gradient_gets_none(frozen, seed):
    head, plain = make_head(64, 128)
    x, dy = torch.randn(2, 16, 64, requires_grad=frozen != "x"), torch.randn(2, 16, 128)
    for layer in (head, plain):
        layer.weight.requires_grad_(frozen != "weight")
    head(x).backward(dy)
    if frozen == "weight":
        assert head.weight.grad is None and near(x.grad, dy @ plain.weight)
    else:
        assert near(head.weight.grad, dy.flatten(0, 1).t() @ x.flatten(0, 1))
    assert relative(head.bias.grad, dy.sum((0, 1))) < 1e-5


def test_no_tokens(seed):
    head, _ = make_head(64, 331)
    x = torch.empty(2, 0, 64, requires_grad=True)
    y = head(x)
    y.sum().backward()
    assert y.shape == (2, 0, 331) and x.grad.shape == x.shape
    assert not head.weight.grad.any() and not head.bias.grad.any()


@pytest.mark.parametrize("where", ["x", "dy", "weight"])
def test_what_is_not_finite_shows_in_the_gradients(where, seed):
    head, _ = make_head(64, 128)
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 128)
    with torch.no_grad():
        {"x": x, "dy": dy, "weight": head.weight}[where][3, 5] = math.inf if where == "dy" else math.nan
    head(x).backward(dy)
    assert where == "x" or x.grad.isnan().any()
    assert where == "weight" or head.weight.grad.isnan().any()


def test_fp16_gradients_overflow_only_where_they_are_large(seed):
    """Σ dy over the vocabulary is beyond FP16, its product with the mean row is not."""
    head, plain = make_head(64, 2000, bias=False)
    head, plain = head.half(), plain.half()
    x, dy = torch.randn(32, 64).half(), torch.empty(32, 2000).uniform_(40, 80).half()
    assert dy.float().sum(1).amin() > 65_504
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(one).backward(dy)
    head(two).backward(dy)
    assert one.grad.isfinite().all() and relative(two.grad.float(), one.grad.float()) < ERROR


def test_integers_are_refused(seed):
    head, _ = make_head(64, 128)
    with pytest.raises(ValueError, match=r"the head takes floating \[..., 64\], but the input is torch.int64"):
        head(torch.ones(2, 64, dtype=torch.int64))


def test_a_second_derivative_is_refused(seed):
    head, _ = make_head(32, 64)
    x = torch.randn(16, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(head(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_weight_that_changes_before_backward_is_refused(seed):
    head, _ = make_head(32, 64)
    y = head(torch.randn(16, 32))
    with torch.no_grad():
        head.weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        y.sum().backward()


def test_autocast(seed):
    """As for a plain layer, and a cast that was made without gradients must not wait in autocast's cache for whoever is tied to it."""
    head, plain = make_head(64, 331)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = head(x), plain(x)
        tied = F.linear(x, head.weight)
    assert same_bits(y, want) and y.dtype == torch.bfloat16 and tied.grad_fn is not None
    (gradient,) = torch.autograd.grad(tied.float().sum(), head.weight)
    assert gradient.any()
    dy = torch.randn(32, 331)
    y.backward(dy.bfloat16())
    assert x.grad.dtype == head.weight.grad.dtype == torch.float32
    assert near(x.grad, dy @ plain.weight) and near(head.weight.grad, dy.t() @ x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_graph_break(autocast, backend, seed):
    head, _ = make_head(64, 331)
    compiled = torch.compile(head, fullgraph=True, backend=backend)
    x, dy = torch.randn(2, 16, 64), torch.randn(2, 16, 331)
    found = []
    for layer in (head, compiled):
        own = x.clone().requires_grad_()
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(own)
        y.backward(dy.to(y.dtype))
        found.append((y, own.grad, head.weight.grad, head.bias.grad))
    # A compiler sums the mean row in its own order: a weight that then is beyond a tie has the next code, 2^-4 of one of 21,184 weights.
    bound = 1e-2 if autocast else 1e-5 if backend == "aot_eager" else 1e-3
    for eager, other in zip(*found, strict=True):
        assert eager.dtype == other.dtype and eager.any() and relative(other, eager) < bound


# --- conversion


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", [O1, O2], ids=["O1", "O2"])
def test_convert_and_back(recipe, tied, seed):
    model = Model(tied)
    plain = copy.deepcopy(model)
    weight = model.lm_head.weight
    convert(model, recipe)
    assert type(model.lm_head) is HeadLinear and model.lm_head.weight is weight and type(weight) is nn.Parameter
    assert (model.embed_tokens.weight is weight) == tied
    assert list(model.state_dict()) == list(plain.state_dict())
    report = next(report for report in convert_report(model) if report.fqn == "lm_head")
    assert not report.converted and report.backward
    assert "output head" in report.reason and report.reason.endswith("forward as it is, backward in FP8")
    assert str(report).startswith("lm_head: backward converted, ")
    convert(model, recipe)
    assert type(model.lm_head) is HeadLinear and report in convert_report(model)
    assert memory_report(model).converted == model.layer.weight.numel()
    export(model)
    assert type(model.lm_head) is nn.Linear and model.lm_head.__dict__.keys() == plain.lm_head.__dict__.keys()
    assert model.lm_head.weight is weight


def test_tied_model_trains_like_the_plain_one(seed):
    model = Model(tied=True)
    plain = copy.deepcopy(model)
    convert(model, O2)
    tokens = torch.randint(331, (4, 32))
    for m in (model, plain):
        F.cross_entropy(m(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert type(model.embed_tokens.weight.grad) is Tensor
    assert (
        relative(model.embed_tokens.weight.grad, plain.embed_tokens.weight.grad) < 0.12
    )  # (through an FP8 layer, too)


def test_a_step_of_the_optimizer_sees_a_plain_parameter(seed):
    model, optimizer = initialize(*(lambda m: (m, torch.optim.AdamW(m.parameters())))(Model()), O2)
    before = model.lm_head.weight.clone()
    model(torch.randint(331, (2, 16))).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model.lm_head.weight]["exp_avg"].dtype == torch.float32
    assert not torch.equal(model.lm_head.weight, before)
    again = Model()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert type(copy.deepcopy(model).lm_head) is HeadLinear


def test_a_filter_decides_as_before(seed):
    model = convert(Model(), O2, filter=lambda module, fqn: fqn == "layer")
    assert type(model.lm_head) is nn.Linear
    model = convert(Model(), O2, filter=always)
    assert type(model.lm_head) is FP8Linear and isinstance(model.lm_head.weight, ScaledTensor)
    model = convert(convert(Model(), O2), O2, filter=always)  # a new filter adds a layer
    assert type(model.lm_head) is FP8Linear and isinstance(model.lm_head.weight, ScaledTensor)
    assert type(export(model).lm_head) is nn.Linear


def test_heads_that_stay(seed):
    assert type(convert(Model(), WITHOUT).lm_head) is nn.Linear
    assert type(convert(Model(), "paper").lm_head) is nn.Linear
    assert type(convert(Model(vocabulary=8), O2).lm_head) is nn.Linear  # a side under 32
    with pytest.raises(ValueError, match="turn the model back first"):
        convert(convert(Model(), O2), WITHOUT)
    with pytest.raises(ValueError, match="this one differs in head_grad_output: turn the model back first"):
        convert(convert(Model(), O2), dataclasses.replace(O2, head_grad_output=None))

    def slow(inputs: int, outputs: int, device: torch.device) -> str | None:
        return TooSlow("measured to be slow") if outputs == 331 else None

    model = convert(Model(), O2, break_even=slow)
    assert type(model.lm_head) is nn.Linear and left_for_speed(model) == [(96, 331)]
    assert "an output head by its name 'lm_head'; measured" in [r.reason for r in convert_report(model)][-1]
    assert type(convert(model, O2).lm_head) is nn.Linear
    assert type(convert(model, O2, break_even=False).lm_head) is HeadLinear


def test_recipes_say_whether_heads_have_fp8_gradients():
    assert {name for name, recipe in RECIPES.items() if recipe.head_grad_output is E5M2} == {"O1", "O2"}
    assert all(recipe.head_grad_output is None for name, recipe in RECIPES.items() if name not in ("O1", "O2"))


# --- the chunked loss


def losses(n: int, vocabulary: int, dim: int, classes: int, fmt, dtype=torch.float32, chunk: int = 1 << 27):
    """(x, w, targets), and a function of a format that gives loss, dx and dw."""
    x, w = torch.randn(n, dim).to(dtype).requires_grad_(), torch.randn(vocabulary, dim, requires_grad=True)
    targets = likely_targets((x.float() @ w.t())[:, :classes] / 2)
    targets[::7] = -100

    def run(fmt):
        loss = linear_cross_entropy(
            x, w / 2, targets, classes=classes, chunk_elements=chunk * vocabulary, grad_output=fmt
        )
        return loss, *torch.autograd.grad(3 * loss, (x, w))

    return run(None), run(fmt)


@DTYPES
@FORMATS
@pytest.mark.parametrize("chunk", [1, 128, 300, 1000])
@pytest.mark.parametrize(("vocabulary", "classes"), [(331, 331), (384, 330)])
def test_the_chunked_loss_has_its_bits_and_near_gradients(vocabulary, classes, chunk, fmt, dtype, seed):
    (loss, dx, dw), (loss8, dx8, dw8) = losses(500, vocabulary, 72, classes, fmt, dtype, chunk)
    assert same_bits(loss, loss8)
    assert dx8.dtype == dtype and dw8.dtype == torch.float32
    assert near(dx8, dx) and near(dw8, dw)
    assert not dw8[classes:].any() and dw8[:classes].any()
    assert not dx8[::7].any()  # targets that do not count


def test_several_groups_equal_one(seed, monkeypatch):
    torch.manual_seed(seed)
    one = losses(700, 352, 64, 350, E5M2, chunk=64)[1]
    sizes = []
    original = kernels.transpose_codes
    monkeypatch.setattr(head_gradients, "group_tokens", lambda vocabulary, chunk: 3 * chunk)
    monkeypatch.setattr(
        kernels, "transpose_codes", lambda codes, out: sizes.append(tuple(out.shape)) or original(codes, out=out)
    )
    torch.manual_seed(seed)
    several = losses(700, 352, 64, 350, E5M2, chunk=64)[1]
    assert len(sizes) == 11 and sizes[-1] == (352, 64)
    assert same_bits(one[0], several[0]) and same_bits(one[1], several[1])
    assert relative(several[2], one[2]) < 0.02  # each group casts its input with a scale of its own


def test_groups_and_chunks_are_whole():
    assert chunk_tokens(50_304) == 2560 and chunk_tokens(331, 1) == 16 and chunk_tokens(331, 40 * 331) == 32
    assert head_gradients.group_tokens(50_304, 2560) == 8 * 2560
    assert head_gradients.group_tokens(128_256, 1024) == 8 * 1024
    assert head_gradients.group_tokens(1 << 26, 16) == 16


@FORMATS
def test_codes_of_the_gradient_are_its_nearest(fmt, seed):
    logits, targets = 3 * torch.randn(64, 200), torch.randint(200, (64,))
    targets[5] = -100
    loss, gradient = chunk_loss(logits, targets, logits.shape[1])
    loss8, codes = chunk_loss(logits, targets, logits.shape[1], fmt)
    assert same_bits(loss, loss8) and same_bits(codes, (gradient * unit_scale(fmt)).to(fmt.dtype))
    assert unit_scale(E5M2) == 2**15 and unit_scale(E4M3) == 2**8
    sure = torch.tensor([[100.0, -100.0]])
    _, extremes = chunk_loss(sure, torch.tensor([1]), sure.shape[1], fmt)
    assert extremes.float().tolist() == [[unit_scale(fmt), -unit_scale(fmt)]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_show_in_both_gradients(value, seed):
    x, w = torch.randn(40, 32), torch.randn(64, 32)
    x[3, 4] = value
    x.requires_grad_(), w.requires_grad_()
    loss = linear_cross_entropy(x, w, torch.randint(64, (40,)), grad_output=E5M2)
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert loss.isnan() and dx[3].isnan().all() and dw.isnan().all()


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_the_gradients_that_are_wanted_are_made(needs, seed):
    x, w = torch.randn(40, 32, requires_grad=needs[0]), torch.randn(64, 32, requires_grad=needs[1])
    linear_cross_entropy(x, w, torch.randint(64, (40,)), grad_output=E5M2).backward()
    assert (x.grad is not None, w.grad is not None) == needs


def test_chunks_come_in_place(seed):
    """Each chunk writes its own columns of the stash: gradients of single tokens add up to the whole."""
    x, w, dy = torch.randn(50, 32), torch.randn(48, 32), torch.randn(50, 48).clamp(-1, 1)
    gradients = FP8Gradients(x, w, E5M2, True, True, 16)
    codes = (dy * unit_scale(E5M2)).to(E5M2.dtype)
    for start in range(0, 50, 16):
        rows = slice(start, min(start + 16, 50))
        gradients.add(rows, codes[rows])
    dx, dw = gradients.finish()
    values = codes.float() / unit_scale(E5M2)
    assert relative(dx, values @ (w - w.mean(0))) < 0.05 and relative(dw, values.t() @ x) < 0.05


# --- octavo's decoder


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_has_fp8_gradients_of_its_head(tied, seed):
    config = TransformerConfig(
        "llama", 64, 1, 2, vocab_size=250, max_seq_len=32, tie_embeddings=tied, dtype=torch.float32
    )
    model, without = (Transformer.build(config, recipe, seed=seed) for recipe in (O2, WITHOUT))
    tokens, targets = torch.randint(250, (2, 4, 32))
    found = []
    for m in (model, without):
        loss = m(tokens, targets)
        hidden = m.hidden(tokens).detach()
        loss.backward()
        head = m.embedding if tied else m.lm_head
        found.append((loss, hidden, head.weight.grad))
    assert same_bits(found[0][0], found[1][0]) and same_bits(found[0][1], found[1][1])
    assert (
        0.001 < relative(found[0][2], found[1][2]) < 0.15
    )  # (where tied, with the embedding's own, through FP8 blocks)
    assert not found[0][2][250:].any()
    assert same_bits(model(tokens), without(tokens))
    if not tied:
        assert type(model.lm_head) is HeadLinear
        model(tokens).float().logsumexp(-1).sum().backward()
    export(model)
    assert model._head_grad_output() is None


def test_the_compiled_loss_gives_the_codes_of_the_eager_one(seed):
    compiled = torch.compile(chunk_loss, fullgraph=True)
    logits, targets = 3 * torch.randn(64, 200), torch.randint(200, (64,))
    (loss, codes), (loss2, codes2) = (f(logits, targets, 200, E5M2) for f in (chunk_loss, compiled))
    torch.testing.assert_close(loss, loss2)
    assert codes2.dtype == E5M2.dtype and (codes.view(torch.uint8) == codes2.view(torch.uint8)).float().mean() > 0.99
    assert relative(codes2.float(), codes.float()) < 0.02
