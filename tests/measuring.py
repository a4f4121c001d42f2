"""The measured side of the plan: bytes alive in the actual training step, at the boundaries of kernels, and in compiled graphs.

A dispatch mode sees every allocation that an operation makes and every storage that dies. Kernels run as the opaque operators that
`torch.compile` sees, so that what the CPU reference allocates inside of one, and a GPU kernel does not, is left out. On fake
tensors, which have sizes and no memory, models of any size can be measured.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from octavo import kernels
from octavo.convert import convert
from octavo.models import Transformer
from octavo.models.loss import chunk_loss
from octavo.optim import AdamW, clip_grad_norm_, release_gradients
from octavo.plan.shapes import Setup
from octavo.tensor import ScaledTensor


class AliveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made inside the context and that live still: now, and the most after any.

    Fake tensors count where all tensors are fake; elsewhere a compiler made them. Compiled graphs run node by node (`interpreted`).
    """

    supports_higher_order_operators = True

    def __init__(self, fake: bool = False) -> None:
        super().__init__()
        self.fake = fake
        self.now = self.peak = 0
        self.where = ""
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if ScaledTensor in types:
            return NotImplemented  # it computes on plain tensors, which come here
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor) and isinstance(item, FakeTensor) == self.fake:
                self._add(item)
        if self.now > self.peak:
            self.peak, self.where = self.now, str(func)
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self.now += size

        def gone(_, key=key, size=size):
            self._seen.pop(key, None)
            self.now -= size

        self._seen[key] = weakref.ref(storage, gone)


@contextmanager
def _fake(model_of: list[nn.Module]) -> Iterator[None]:
    """Fake tensors, with which a parameter cannot be swapped: converted weights become new parameters instead."""

    def replace(param, value, grad):
        for module in model_of[0].modules():
            for name, own in module._parameters.items():
                if own is param:
                    module._parameters[name] = nn.Parameter(value)

    with FakeTensorMode(allow_non_fake_inputs=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("octavo.convert.layers"), "_check_replaceable", lambda modules: None)
        patch.setattr(importlib.import_module("octavo.linear.module"), "replace_parameter", replace)
        patch.setattr(kernels, "adamw", lambda *args, **kwargs: None)
        patch.setattr(kernels, "magnitudes", lambda values: (torch.ones(len(values)), torch.ones(len(values)).double()))
        yield


def _unseen(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as one operation: no mode sees what it allocates inside."""

    def run(*args, **kwargs):
        with _disable_current_modes():
            return kernel(*args, **kwargs)

    return run


def _opaque(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`_unseen`, but for its results: modes see these as they are allocated."""

    def run(*args, **kwargs):
        return tree_map_only(torch.Tensor, torch.clone, _unseen(kernel)(*args, **kwargs))

    return run


def _interpreted(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A compiled graph that runs operation by operation, and frees each tensor after the last that reads it."""

    def run(inputs):
        return fx.Interpreter(module).boxed_run(inputs)  # (one that stays would hold its results)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _compile(model: Transformer) -> None:
    """`compile_blocks` without generated code; the loss becomes the one kernel that it is when compiled."""
    backend = aot_autograd(
        fw_compiler=_interpreted, bw_compiler=_interpreted, partition_fn=min_cut_rematerialization_partition
    )
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    model._chunk_loss = _opaque(chunk_loss)


def measure(setup: Setup, fake: bool = False, seed: int = 0) -> tuple[int, int, str]:
    """(peak, bytes between steps, operation at the peak) of the second optimizer step on the CPU."""
    holder: list[nn.Module] = []
    with pytest.MonkeyPatch.context() as patch, _fake(holder) if fake else nullcontext(), AliveBytes(fake) as alive:
        for name in ("", ".accumulate", ".activation", ".gemm", ".norm", ".quantize", ".rotary", ".transpose"):
            patch.setattr(importlib.import_module(f"octavo.kernels{name}"), "is_compiling", lambda: True)
        for name in () if fake else ("adamw", "magnitudes"):
            patch.setattr(kernels, name, _unseen(getattr(kernels, name)))
        if fake:
            holder.append(Transformer(setup.model))
            convert(holder[0], setup.recipe)
        else:
            holder.append(Transformer.build(setup.model, setup.recipe, seed=seed))
        model = holder[0]
        if setup.compiled:
            _compile(model)
        optimizer = AdamW(model.parameters(), lr=1e-4, recipe=setup.recipe)
        release = None if setup.release == "none" else release_gradients(model, optimizer, 1.0, setup.release)
        for _ in range(2):
            optimizer.zero_grad()
            alive.peak = rest = alive.now
            for _ in range(setup.micro_batches):
                tokens = torch.randint(setup.model.vocab_size, (2, setup.micro_batch, setup.seq_len))
                loss = model(tokens[0], tokens[1]) / setup.micro_batches
                if release is None:
                    loss.backward()
                else:
                    release.step(loss)
                del loss, tokens
            if release is None:
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return alive.peak, rest, alive.where


def compiled_block(setup: Setup, seed: int = 0) -> tuple[int, int]:
    """(bytes that the compiled first block keeps for backward, most bytes alive in its backward), without parameters.

    A compiled graph frees a tensor after the last operation that reads it, what was kept for backward included.
    """
    graphs: list[fx.Graph] = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    model = Transformer.build(setup.model, setup.recipe, seed=seed)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    model.blocks[0].compile(fullgraph=True, backend=backend)
    tokens = torch.randint(setup.model.vocab_size, (2, setup.micro_batch, setup.seq_len))
    model(tokens[0], tokens[1]).backward()
    forward, backward = graphs
    inputs = [node for node in forward.nodes if node.op == "placeholder"]
    x = inputs[0].meta["val"]
    assert x.shape == (setup.micro_batch, setup.seq_len, setup.model.dim)
    parameters = {key for node in inputs[1:] for key in _storages(node)}
    output, *kept = next(iter(reversed(forward.nodes))).args[0]
    sizes = {key: size for node in kept if isinstance(node, fx.Node) for key, size in _storages(node).items()}
    return sum(size for key, size in sizes.items() if key not in parameters), _most_alive(backward, parameters)


def _storages(node: fx.Node) -> dict[int, int]:
    """Bytes of the storages of what the node computes; views have that of what they view."""
    tensors = [item for item in tree_iter(node.meta.get("val")) if isinstance(item, torch.Tensor)]
    storages = [item.untyped_storage() for item in tensors if isinstance(item.numel(), int)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _most_alive(graph: fx.Graph, apart: set[int]) -> int:
    """Most bytes alive after any node, without the storages `apart`."""
    last = {
        key: place
        for place, node in enumerate(graph.nodes)
        for used in (node, *node.all_input_nodes)
        for key in _storages(used)
    }
    alive = {key: size for node in graph.nodes if node.op == "placeholder" for key, size in _storages(node).items()}
    most = 0
    for place, node in enumerate(graph.nodes):
        alive |= _storages(node)
        most = max(most, sum(size for key, size in alive.items() if key not in apart))
        if node.op != "placeholder":
            alive = {key: size for key, size in alive.items() if last[key] > place}
    return most
