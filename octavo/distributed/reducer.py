"""`DataParallel`: every rank computes on its own data, and all step with the mean gradient, which stays in FP8 all the way.

    model = octavo.DataParallel(octavo.convert(model, "O2"))          # under torchrun, after init_process_group
    loss = model(x).loss; loss.backward(); optimizer.step()           # as without it

PyTorch's own reducer copies gradients into buckets of the parameter's dtype and back, so FP8 gradients would be
de-quantised, sent at 2 or 4 bytes and kept twice. Here a gradient that backward has left in `p.grad` (E4M3 code and scale; with a
residual byte after several micro-batches) is sent as one byte and written back in place: what is resident is 1 byte a parameter
and the bucket that is on its way.

When the last gradient of a bucket is there its reduction starts, in the order of the buckets on all ranks, and runs beside the
rest of backward: on a CUDA stream of its own, or in a thread on other devices. Backward ends when all are reduced. Gradients that a
rank does not have count as zero there; one that no rank has stays None. After `no_sync` whatever has accumulated is sent with the
next synchronising pass.

With one rank nothing is registered and nothing happens: the wrapper calls the module.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from octavo.distributed.algorithms import algorithm_of
from octavo.distributed.autoscale import AutoScale
from octavo.distributed.buckets import Bucket, Member, Reduction, assign
from octavo.distributed.collectives import Ranks
from octavo.distributed.replicas import check_alike, check_equal, send_from_first, share_maxima
from octavo.distributed.samples import Loss, Sampler
from octavo.distributed.wrapping import device_of, own_group, recipe_of, scaled_parameters, tensors_in, watch, world_of
from octavo.kernels import streams
from octavo.linear.storage import store_gradient
from octavo.recipe import Recipe, get_recipe


class DataParallel(nn.Module):
    """`module` on every rank of a process group, with gradients averaged in backward.

    Args:
        module: converted or not; on its device. Rank 0's parameters, buffers and scales are sent to all ranks.
        recipe: how gradients are reduced (`grad_reduce`, `grad_scaling`, …); default: that of the converted layers.
        group: a process group of `torch.distributed`; default: all ranks. Without an initialised one there is one rank.
        bucket_mb: megabytes on the wire of a bucket. Smaller ones start earlier, larger ones cost fewer launches.
        node_size: ranks per node, consecutive in the group, for `grad_reduce="hierarchical"`.
        check_every: compare a checksum of all parameters between the ranks in every so many synchronising backward passes.
        timeout: seconds after which a rank that does not answer is an error, in the groups that are made here (with gloo, or for nodes).

    Raises `ValueError` on all ranks if their models differ or the arguments do not fit; in backward `CollectiveError` when another rank
    is gone, and `NumericsError` naming the parameter when replicas have drifted apart.

    `state_dict` and `load_state_dict` are those of the module, without a prefix; µ is in `scaling_state_dict`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        recipe: str | Recipe | None = None,
        group: Any = None,
        bucket_mb: float = 128.0,
        node_size: int | None = None,
        check_every: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        super().__init__()
        if any(isinstance(part, DataParallel) for part in module.modules()):
            raise ValueError("the module, or a part of it, is wrapped already: wrap it once")
        if not (bucket_mb > 0 and timeout > 0) or (check_every is not None and check_every < 1):
            raise ValueError(f"bucket_mb={bucket_mb}, check_every={check_every} and timeout={timeout} must be positive")
        self.module = module
        self.register_load_state_dict_pre_hook(_add_prefix)
        self.recipe = recipe_of(module) if recipe is None else get_recipe(recipe)
        self._bucket_bytes, self._check_every = int(bucket_mb * 2**20), check_every
        self._timeout = timedelta(seconds=timeout)
        self.wire: Counter[str] = Counter()
        """Bytes that this rank has sent since the start, by kind."""
        self.world = world_of(group)
        self._sync, self._replaced = True, False
        self.autoscale = AutoScale([], 1)
        """µ of the converted weights, by name."""
        self.nonfinite_steps = torch.zeros((), dtype=torch.int64)
        """Synchronising passes in which a gradient was not finite on some rank; 0-d, on the device, and counted with several ranks."""
        if self.world > 1:
            self._open(group, node_size)

    def _open(self, group: Any, node_size: int | None) -> None:
        device = device_of(self.module)
        ranks = Ranks(own_group(group, device, self._timeout), self.wire)
        self.ranks = ranks
        check_alike(self.module, ranks, self._describe(node_size))
        send_from_first(self.module, ranks)
        scaled = {id(p) for p in scaled_parameters(self.module)}
        self._members: list[Member] = []
        for name, param in self.module.named_parameters():
            if param.is_complex():
                raise ValueError(f"{name} is {param.dtype}: hold complex parameters as real ones (torch.view_as_real)")
            number = sum(m.scaled is not None for m in self._members) if id(param) in scaled else None
            self._members.append(Member(name, param, number))
        self.autoscale = AutoScale(
            [m.name for m in self._members if m.scaled is not None],
            self.world,
            strategy=self.recipe.grad_scaling,
            sums_exactly=self.recipe.grad_reduce in ("two_shot", "hierarchical"),
            threshold=self.recipe.mu_threshold,
            period=self.recipe.mu_period,
            device=device,
        )
        algorithm = algorithm_of(self.recipe.grad_reduce, ranks, node_size, self._timeout)
        self._reduction = Reduction(ranks, self.recipe.grad_reduce, algorithm, self.autoscale)
        self.nonfinite_steps = self.nonfinite_steps.to(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1, thread_name_prefix="octavo-reduce")
        self._trainable: tuple[bool, ...] = ()
        self._buckets: list[Bucket] = []
        self._place: dict[int, tuple[Bucket, int]] = {}
        self._running: list[Future[None]] = []
        self._in_backward, self._launched, self._passes = False, 0, 0
        self._wire_before, self._recorded = Counter(self.wire), Counter[str]()
        self._finisher: Callable[[], Any] = ref(self._finish)
        for member in self._members:
            watch(member.param, self)

    def _describe(self, node_size: int | None) -> str:
        """What must not differ between the ranks, beside the module: they would wait for each other in different collectives."""
        nodes = f", node_size={node_size}" if self.recipe.grad_reduce == "hierarchical" else ""
        return (
            f"DataParallel with {self.extra_repr()}, mu_threshold={self.recipe.mu_threshold}, mu_period={self.recipe.mu_period}, "
            f"bucket_mb={self._bucket_bytes / 2**20:g}, check_every={self._check_every}{nodes}"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        if self.world == 1 or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._replaced:
            raise RuntimeError("a newer DataParallel has wrapped parameters of this model: use that one")
        self._rebuild_if_frozen()
        output = self.module(*args, **kwargs)
        if not torch.compiler.is_compiling():  # (inside `no_sync` too: the backward may come after it)
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:  # (a leaf would keep the hook)
                    tensor.register_hook(self._begin)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; what they left is reduced by the next one outside."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def measure(self) -> Iterator[dict[str, Loss]]:
        """Compares the FP8 reductions inside with FP32 ones; the dict, by parameter, is filled at the end. All ranks must call it."""
        found: dict[str, Loss] = {}
        if self.world == 1:
            yield found
            return
        self._reduction.sampler = sampler = Sampler(self.ranks)
        try:
            yield found
        finally:
            self._reduction.sampler = None
            found.update(sampler.read())

    # --- one backward pass

    def _rebuild_if_frozen(self) -> None:
        """New buckets when parameters were frozen or unfrozen since the last pass. They hold no state, so none is lost."""
        trainable = tuple(m.param.requires_grad for m in self._members)
        if self._running_pass() or trainable == self._trainable:
            return
        self._trainable = trainable
        members = [m for m in self._members if m.param.requires_grad]
        self._buckets = assign(members, self.world, self._bucket_bytes)
        self._place = {id(m.param): (bucket, i) for bucket in self._buckets for i, m in enumerate(bucket.members)}

    def _begin(self, _: Any = None) -> None:
        """At the first gradient of a synchronising pass: have `_finish` called at its end.

        A hook on the output runs in the outermost backward; parameters may first see one inside of a re-entrant checkpoint.
        """
        if self._replaced or not self._sync or self._running_pass():
            return
        self._rebuild_if_frozen()
        self._in_backward, self._launched, self._wire_before = True, 0, self.wire.copy()
        self._running.clear()
        for bucket in self._buckets:
            bucket.start()
        finish = self._finish
        self._finisher = ref(finish)
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _running_pass(self) -> bool:
        """Whether a pass is running. Autograd has dropped the callback of one that raised an error: such a pass is forgotten here."""
        if self._in_backward and self._finisher() is None:
            self._abandon()
        return self._in_backward

    def _abandon(self) -> None:
        """The last backward raised an error on its way, and the user goes on: forget it, when what it had started has ended."""
        for future in self._running:
            future.exception()
        if self._stream is not None:  # it may still write into gradients that are let go here
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for bucket in self._buckets:
            bucket.start()
        self._in_backward = False

    def _ready(self, param: Tensor) -> None:
        """Hook of a parameter whose gradient has accumulated."""
        if self._replaced or not self._sync:
            return
        self._begin()
        bucket, position = self._place[id(param)]
        member = bucket.members[position]
        if bucket.grads:
            raise RuntimeError(
                f"{member.name} got a second gradient in one backward pass, after its bucket was sent: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        if member.scaled is not None:
            store_gradient(param)  # (hooks run in any order)
        bucket.waiting.discard(position)
        while self._launched < len(self._buckets) and not self._buckets[self._launched].waiting:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.take()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                self._reduction.reduce(bucket)
        else:
            assert self._thread is not None
            self._running.append(self._thread.submit(self._reduction.reduce, bucket))

    def _finish(self) -> None:
        """At the end of backward: send what is left, wait for all, hand out."""
        try:
            while self._launched < len(self._buckets):
                self._launch()
            for future in self._running:
                future.result()
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            finite = [
                bucket.finite.to(self.nonfinite_steps.device) for bucket in self._buckets if bucket.finite is not None
            ]
            if finite:
                self.nonfinite_steps += ~torch.stack(finite).all()
            for bucket in self._buckets:
                bucket.give()
            share_maxima(self.module, self.ranks)
        finally:
            self._in_backward = False
        if streams.place(self.nonfinite_steps) == streams.CAPTURED:
            self._recorded = self.wire - self._wire_before
            self.wire.subtract(self._recorded)  # nothing has been sent yet
        else:
            self._end_pass()

    def replayed(self) -> None:
        """To be called after each replay of a CUDA graph that holds a synchronising pass, the last one that was recorded: counts the bytes
        that it sends, and compares the parameters when it is time to (`check_every`), with the errors of a backward."""
        if self.world > 1:
            self.wire.update(self._recorded)
            self._end_pass()

    def _end_pass(self) -> None:
        self._passes += 1
        if self._check_every and self._passes % self._check_every == 0:
            check_equal(self.module, self.ranks)

    # --- state

    def __getstate__(self) -> Any:
        if self.world > 1:
            raise TypeError(
                "DataParallel belongs to its ranks and cannot be copied or pickled: use that of model.module"
            )
        return self.__dict__

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The state of the module, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads a state of the module. Raises `ValueError` for `assign`: new parameters would not be reduced."""
        self._check_loading(assign)
        return self.module.load_state_dict(state_dict, strict, assign)

    def _check_loading(self, assign: bool) -> None:
        if assign and self.world > 1:
            raise ValueError(
                "assign=True would replace the parameters that are reduced: load before wrapping, or copy (assign=False)"
            )

    def extra_repr(self) -> str:
        """Ranks, and how they reduce."""
        return f"ranks={self.world}, grad_reduce={self.recipe.grad_reduce}, grad_scaling={self.recipe.grad_scaling}"

    def scaling_state_dict(self) -> dict[str, Tensor]:
        """µ and its counters by "parameter/entry", 0-d tensors that share memory; empty with one rank."""
        return self.autoscale.state_dict()

    def load_scaling_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores µ, also from another number of ranks."""
        self.autoscale.load_state_dict(state)


def _add_prefix(wrapper: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Before a module that holds the wrapper loads: its state, too, has the names without the wrapper."""
    wrapper._check_loading(metadata.get("assign_to_params_buffers", False))
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)
