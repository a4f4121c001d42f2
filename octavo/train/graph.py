"""Forward and backward of a step as one CUDA graph: the host launches it as a whole, and not its thousands of kernels one by one.

The first steps run as they are, on the stream of the graph, so that kernels are compiled and libraries have their memory. The next one
is recorded (nothing runs meanwhile) and replayed, and so is every step after it: a recorded step is a step of training like any other,
with the same kernels on the same numbers, random ones too.

A replay reads its inputs and leaves its gradients where the recording did, in memory that belongs to the graph. Between two replays
`p.grad` may be scaled, replaced or set to None: each replay hands out gradients anew. Parameters have to stay where they are, and so have
the windows of delayed scaling, which a layer makes anew when it loads a state: close the graph before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from octavo.distributed import DataParallel
from octavo.recipe import Recipe
from octavo.scaling import steps_to_settle
from octavo.tensor import ScaledTensor
from octavo.train.config import TrainConfig
from octavo.train.data import Batch

WARMUP = 3
"""Steps before the one that is recorded."""

Work = Callable[[Iterable[Batch]], Tensor]
"""(batches) → losses: forward and backward of all micro-batches of a step, without a wait for the device. Gradients are None before it."""


def steps_before(recipe: Recipe) -> int:
    """How many steps to take before one is recorded: until delayed scales come from the past, if they do."""
    return max(WARMUP, steps_to_settle(recipe.scaling))


def build_graph(config: TrainConfig, device: torch.device, work: Work, parallel: DataParallel) -> StepGraph | None:
    """The graph of a run's steps, if the config wants one. Raises `ValueError` for a device without graphs."""
    if not config.train.graph:
        return None
    if device.type != "cuda":
        raise ValueError(f"train.graph=true needs a GPU, and this run is on {device}: set it to false")
    return StepGraph(work, parallel.parameters(), steps_before(config.recipe), parallel.replayed)


class StepGraph:
    """The `work` of a step over `parameters`, recorded after `warmup` calls and replayed from then on.

    With delayed scaling `warmup` is `steps_before` of the recipe: a graph recorded earlier would scale tensors by themselves for good.
    `after_replay` is called when a replay is on its way, for what `work` does on the host. Calls differ in the values of their batches
    alone: raises `ValueError` for batches of another number, shape or dtype, for gradients that are there already, and for parameters that
    were frozen, unfrozen or moved since the recording, and `RuntimeError` for `work` that cannot be recorded, as it waits for the device.
    """

    def __init__(
        self,
        work: Work,
        parameters: Iterable[Tensor],
        warmup: int = WARMUP,
        after_replay: Callable[[], None] = lambda: None,
    ) -> None:
        self.work, self.parameters, self.after_replay = work, list(parameters), after_replay
        self.warmup = self.remaining = warmup
        self.stream = torch.cuda.Stream(self.parameters[0].device)  # (which need not be the current device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._batches: list[Batch] = []
        self._places: list[tuple[bool, int]] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """The losses; gradients are in `p.grad`. The memory of the losses is written again by the next call."""
        left = sum(p.grad is not None for p in self.parameters if p.requires_grad)
        if left:
            raise ValueError(
                f"{left} parameters have a gradient, to which a replay would not add: call optimizer.zero_grad() before"
            )
        if self.graph is None and self.remaining > 0:
            self.remaining -= 1
            return self._run(batches)
        if self.graph is None:
            self.graph = self._record(batches)
        self._check_parameters()
        for own, batch in zip_longest(self._batches, batches):
            if _kinds(own) != _kinds(batch):
                raise ValueError(
                    f"a micro-batch is {_kinds(batch)}, and that of the recorded step {_kinds(own)}: give it as many, of the same shapes "
                    "and dtypes, or train without a graph"
                )
            for static, value in zip(own, batch, strict=True):
                static.copy_(value)
        self.graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = _alias(gradient)
        self.after_replay()
        return self._losses

    def close(self) -> None:
        """Gives the graph up; the next calls warm up for another, as what has changed may be compiled or sent to the device first.

        A process group of NCCL is not destroyed before the graphs that use it.
        """
        if self.graph is not None:
            self.graph.reset()
            self.graph, self._batches, self._gradients, self.remaining = None, [], [], self.warmup

    def _check_parameters(self) -> None:
        changed = [p for p, place in zip(self.parameters, self._places, strict=True) if _place(p) != place]
        if changed:
            raise ValueError(
                f"{len(changed)} parameters, the first of shape {tuple(changed[0].shape)}, were frozen, unfrozen or moved since the step "
                "was recorded: close() the graph, and the next calls warm up for another"
            )

    def _run(self, batches: Sequence[Batch]) -> Tensor:
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            losses = self.work(batches)
        main.wait_stream(self.stream)
        return losses

    def _record(self, batches: Sequence[Batch]) -> torch.cuda.CUDAGraph:
        self._batches = [tuple(tensor.clone() for tensor in batch) for batch in batches]
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on: that of NCCL asks for its events, autograd's own may load a kernel.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self._losses = self.work(self._batches)
        except RuntimeError as error:
            first: BaseException = error
            while isinstance(first.__context__, RuntimeError):  # the end of a recording that failed fails too
                first = first.__context__
            raise RuntimeError(
                f"the step cannot be recorded as a CUDA graph ({str(first).splitlines()[0]}): train without one (train.graph=false)"
            ) from error
        self._places = [_place(p) for p in self.parameters]
        self._gradients = [(p, _alias(p.grad)) for p in self.parameters if p.grad is not None]
        return graph


def _kinds(batch: Batch | None) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
    return None if batch is None else [(tuple(tensor.shape), tensor.dtype) for tensor in batch]


def _place(parameter: Tensor) -> tuple[bool, int]:
    """What a recording takes for granted: whether a parameter has a gradient, and where it lies."""
    values = parameter.codes if isinstance(parameter, ScaledTensor) else parameter
    return parameter.requires_grad, values.data_ptr()


def _alias(gradient: Tensor) -> Tensor:
    """Another tensor in the memory of `gradient`: what becomes of the one, or is known of it, does not hang on the other."""
    if not isinstance(gradient, ScaledTensor):
        return gradient.detach()
    residual = None if gradient.residual is None else gradient.residual.detach()
    return ScaledTensor(
        gradient.codes.detach(),
        gradient.scale.detach(),
        gradient.dtype,
        residual=residual,
        residual_on_add=gradient.residual_on_add,
    )
