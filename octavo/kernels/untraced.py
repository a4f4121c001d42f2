"""Functions that run as they are where Python calls them from compiled code.

In `torch.compile(step)`, with `backward()` inside of `step`, Dynamo watches every call of Python that autograd makes: it would compile
kernels, hooks and what builds a `ScaledTensor`, each by itself, round otherwise and stop with an internal error. `torch.compiler.disable`
says the same as `untraced`, but imports the compiler, and costs the host a microsecond of each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # names of PyTorch's own, which a later release may change
    set_code_exec_strategy = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """A decorator, next to `def`: Dynamo leaves calls of `function` alone, and all that it calls. Tracing a caller goes on."""
    if set_code_exec_strategy is None:
        return torch.compiler.disable(function)
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
