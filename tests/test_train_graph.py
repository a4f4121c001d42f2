"""A step that is replayed. Graphs are pretended on CPU: a recording leaves everything as it was, and a replay does the work in the memory
of the recording. Those of a GPU are in `gpu/test_graph_gpu.py`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training import assert_same_checkpoint, exact_records, small_config

import octavo
from octavo.distributed import DataParallel
from octavo.recipe import RECIPES
from octavo.settings import override
from octavo.tensor import ScaledTensor
from octavo.train import graph, trainer
from octavo.train.checkpoint_folder import latest
from octavo.train.graph import StepGraph, build_graph, steps_before
from octavo.train.trainer import Trainer


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        pass


class PretendedGraph:
    """Filled by `recording`."""

    step: StepGraph
    closed = False

    def reset(self) -> None:
        self.closed = True

    def replay(self) -> None:
        for parameter in self.step.parameters:
            parameter.grad = None
        self.step._losses.copy_(self.step.work(self.step._batches))
        for parameter, parts in self.step._gradients:
            for own, new in zip(memory(parts), memory(parameter.grad), strict=True):
                own.copy_(new)


def memory(gradient: Tensor | None) -> list[Tensor]:
    assert gradient is not None
    if not isinstance(gradient, ScaledTensor):
        return [gradient]
    parts = [gradient.codes.view(torch.uint8), gradient.scale]
    return parts if gradient.residual is None else [*parts, gradient.residual]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[PretendedGraph]:
    """Every graph that is recorded."""
    made: list[StepGraph] = []
    recordings: list[PretendedGraph] = []
    init = StepGraph.__init__

    def remember(self: StepGraph, *args: object, **options: object) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        init(self, *args, **options)  # type: ignore[arg-type]
        made.append(self)

    @contextlib.contextmanager
    def recording(recorded: PretendedGraph, **options: object) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        recorded.step = made[-1]
        recordings.append(recorded)
        state = torch.get_rng_state()
        yield
        torch.set_rng_state(state)

    monkeypatch.setattr(StepGraph, "__init__", remember)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(
        trainer,
        "build_graph",
        lambda config, device, work, parallel: build_graph(config, torch.device("cuda"), work, parallel),
    )
    return recordings


@pytest.mark.parametrize("recipe", ["bf16", "O1", "O2", "paper"])
def test_replayed_steps_are_those_of_a_run_without(
    recipe: str, tmp_path: Path, pretended: list[PretendedGraph]
) -> None:
    """Bit for bit, with clipping, micro-batches, a step that counts, validation, and a new process in between."""
    settings = [
        f"recipe={recipe}",
        "train.steps=14",
        "optim.clip=0.1",
        "log.stats_every=6",
        "train.eval_every=7",
        "checkpoint.every=7",
    ]
    runs = {}
    for name, extra in (("plain", []), ("graph", ["train.graph=true"])):
        config = small_config(tmp_path, *settings, *extra, f"out={tmp_path}/{name}")
        runs[name] = Trainer(config)
        runs[name].run()
    same(tmp_path)
    (recorded,) = pretended
    assert recorded.closed and recorded.step.graph is None
    for run in runs.values():
        Trainer(override(run.config, ["train.steps=20"]), resume=True).run()
    same(tmp_path)
    assert len(pretended) == 2


def same(folder: Path) -> None:
    """Both runs have had the same losses, norms and weights."""
    assert exact_records(folder / "plain") == exact_records(folder / "graph")
    assert_same_checkpoint(*(latest(folder / name / "checkpoints") for name in ("plain", "graph")))


def linear_work(model: nn.Module, losses: Callable[[Tensor], Tensor] = lambda y: y.square().mean()) -> graph.Work:
    def work(batches: Sequence[tuple[Tensor, ...]]) -> Tensor:
        found = []
        for (x,) in batches:
            loss = losses(model(x))
            loss.backward()
            found.append(loss.detach())
        return torch.stack(found)

    return work


@pytest.mark.parametrize("recipe", ["bf16", "O1", "O2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_replay_hands_out_gradients_anew(
    recipe: str, micro_batches: int, seed: int, pretended: list[PretendedGraph]
) -> None:
    """Whatever was done to those of the step before."""
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64))
    if recipe != "bf16":
        model = octavo.convert(model, recipe)
    replays: list[int] = []
    step = StepGraph(linear_work(model), model.parameters(), 1, lambda: replays.append(1))
    for number in range(5):
        model.zero_grad()
        batches = [(torch.randn(8, 64),) for _ in range(micro_batches)]
        losses = step(batches).clone()
        got = [parameter.grad for parameter in model.parameters()]
        values = [memory(gradient) for gradient in got]
        values = [[part.clone() for part in parts] for parts in values]
        model.zero_grad()
        assert torch.equal(losses, step.work(batches))
        for parts, parameter in zip(values, model.parameters(), strict=True):
            assert all(map(torch.equal, parts, memory(parameter.grad)))
        for gradient in got:  # as clipping and a careless user do
            gradient.mul_(0.5)
            if isinstance(gradient, ScaledTensor):
                octavo.optim.clip.remember_amax(gradient.codes, torch.tensor(-1.0))
        assert len(replays) == number  # the first call is no replay


def test_known_maxima_do_not_outlive_a_step(seed: int, pretended: list[PretendedGraph]) -> None:
    model = octavo.convert(nn.Sequential(nn.Linear(64, 48)), "O2")
    step = StepGraph(linear_work(model), model.parameters(), 0)
    step([(torch.randn(8, 64),)])
    first = model[0].weight.grad
    octavo.clip_grad_norm_(model.parameters(), 1e-3)
    model.zero_grad()
    step([(torch.randn(8, 64),)])
    assert model[0].weight.grad is not first and model[0].weight.grad.codes is not first.codes
    assert octavo.optim.clip.known_amax(model[0].weight.grad.codes) is None


def test_batches_of_another_kind_are_refused(pretended: list[PretendedGraph]) -> None:
    model = nn.Linear(8, 8)
    step = StepGraph(linear_work(model), model.parameters(), 0)
    step([(torch.randn(4, 8),)])
    model.zero_grad()
    x = torch.randn(4, 8)
    for batches, given in (
        ([(torch.randn(5, 8),)], r"\[\(\(5, 8\), torch.float32\)\]"),
        ([(x.double(),)], r"\[\(\(4, 8\), torch.float64\)\]"),
        ([(x, x)], r"\[\(\(4, 8\), torch.float32\), \(\(4, 8\), torch.float32\)\]"),
        ([], "None"),
    ):
        with pytest.raises(
            ValueError, match=rf"is {given}, and that of the recorded step \[\(\(4, 8\), torch.float32\)\]: give"
        ):
            step(batches)
    with pytest.raises(ValueError, match="the recorded step None: give it as many"):
        step([(x,)] * 2)


def test_gradients_that_are_left_are_refused(pretended: list[PretendedGraph]) -> None:
    model = nn.Linear(8, 8)
    step = StepGraph(linear_work(model), model.parameters(), 1)
    for _ in range(3):
        step([(torch.randn(4, 8),)])
        with pytest.raises(ValueError, match=r"2 parameters have a gradient.*zero_grad"):
            step([(torch.randn(4, 8),)])
        model.zero_grad()


def move(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.detach().clone()


@pytest.mark.parametrize(
    ("change", "recipe", "refused"),
    [
        (lambda layer: layer.bias.requires_grad_(False), "bf16", r"1 parameters, the first of shape \(48,\)"),
        (move, "bf16", r"1 parameters, the first of shape \(48, 64\)"),
        (lambda layer: layer.bfloat16(), "O2", r"2 parameters, the first of shape \(48, 64\)"),
    ],
    ids=["frozen", "moved", "codes moved"],
)
def test_parameters_that_change_are_refused(
    change: Callable[[nn.Linear], object], recipe: str, refused: str, seed: int, pretended: list[PretendedGraph]
) -> None:
    """A replay would read the memory where they were. What is recorded anew is warmed up anew: buckets of other parameters are sent to the
    device, which a recording could not."""
    model = nn.Sequential(nn.Linear(64, 48))
    if recipe != "bf16":
        model = octavo.convert(model, recipe)
    step = StepGraph(linear_work(model), model.parameters(), 1)
    for _ in range(3):
        step([(torch.randn(4, 64),)])
        model.zero_grad()
    change(model[0])
    batches = [(torch.randn(4, 64, dtype=model[0].bias.dtype),)]
    with pytest.raises(ValueError, match=rf"{refused}, were frozen.*moved.*close\(\)"):
        step(batches)
    step.close()
    for recordings in (1, 2):
        step(batches)
        assert len(pretended) == recordings
        model.zero_grad()


def test_the_stream_is_on_the_device_of_the_parameters(pretended: list[PretendedGraph]) -> None:
    """That need not be the current one: what runs on another device would not be recorded."""
    step = StepGraph(linear_work(nn.Linear(2, 2)), nn.Linear(2, 2, device="meta").parameters())
    assert step.stream.device == torch.device("meta")


def test_what_cannot_be_recorded_says_why(pretended: list[PretendedGraph]) -> None:
    def work(batches: Sequence[tuple[Tensor, ...]]) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(
        RuntimeError, match=r"recorded as a CUDA graph \(operation not permitted .* capturing\).*train.graph=false"
    ):
        StepGraph(work, [torch.zeros(1)], 0)([(torch.zeros(1),)])


def test_settings_that_cannot_be_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a GPU, and this run is on cpu"):
        Trainer(small_config(tmp_path, "train.graph=true"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"optim\.release=partial needs there"):
        small_config(tmp_path, "train.graph=true", "optim.release=partial", "train.micro_batches=1")
    with pytest.raises(ValueError, match=r"maxima of recipe.scaling=delayed are not counted .* two of the three"):
        small_config(tmp_path, "train.graph=true", "train.compile=true", "recipe.scaling=delayed")


def test_delayed_scales_come_from_the_past_before_a_step_is_recorded() -> None:
    assert steps_before(RECIPES["O2"]) == 3
    assert steps_before(override(RECIPES["O2"], ["scaling=delayed"])) == 17


def test_a_run_that_fails_gives_its_graph_up(tmp_path: Path, pretended: list[PretendedGraph]) -> None:
    run = Trainer(small_config(tmp_path, "train.graph=true", "train.steps=9", "recipe=O2"))
    run._validate = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        run.run()
    assert pretended[0].closed


def test_one_rank_has_nothing_to_count_after_a_replay() -> None:
    DataParallel(nn.Linear(2, 2), check_every=1).replayed()


def test_the_setting_is_saved_with_the_run(tmp_path: Path, pretended: list[PretendedGraph]) -> None:
    config = small_config(tmp_path, "train.graph=true", "train.steps=5", "recipe=O2")
    Trainer(config).run()
    assert json.loads((Path(config.out) / "run.json").read_text())["config"]["train"]["graph"] is True
