"""Functional operators `octavo::*` without the layers that `torch.library.custom_op` puts around each call.

Those layers check at each call that no result aliases an argument, keep Dynamo out and step over autograd: 16 µs of a desktop's core,
and a compiled block calls forty operators. Here a call goes from the dispatcher to the function. So an operator defined here changes no
argument, returns nothing that aliases one, and has no gradient: compiled code calls it inside of an `autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._ops import OpOverload

from octavo.kernels.untraced import untraced


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], OpOverload]:
    """A decorator: the function as the operator of `schema`, `name(arguments) -> results`; `fake` knows the shapes of results only.

    An operator of this name stays as it is: where octavo is imported a second time, both copies call that of the first.
    """
    name = schema.partition("(")[0]

    def define(function: Callable[..., Any]) -> OpOverload:
        @untraced
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            with torch.no_grad():  # an exported program, say, whose parameters are trainable
                return function(*args, **kwargs)

        if not hasattr(torch.ops.octavo, name):
            torch.library.define(f"octavo::{name}", schema[len(name) :], tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.impl(f"octavo::{name}", "CompositeExplicitAutograd", call)
            torch.library.register_fake(f"octavo::{name}", fake)
        return getattr(torch.ops.octavo, name).default

    return define
