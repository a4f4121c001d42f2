"""Functional operators `octavo::*` without the layers that `torch.library.custom_op` puts around each call.

Those layers check at each call that no result aliases an argument, keep Dynamo out and step over autograd: 16 µs of a desktop's core,
and a compiled block calls forty operators. Here a call goes from the dispatcher to the function. So an operator defined here changes no
argument, returns nothing that aliases one, and is called where no gradient is asked of it: inside of an `autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

_library = torch.library.Library("octavo", "FRAGMENT")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], OpOverload]:
    """A decorator: the function as the operator of `schema`, `name(arguments) -> results`; `fake` knows the shapes of results only."""
    name = schema.partition("(")[0]

    def define(function: Callable[..., Any]) -> OpOverload:
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"octavo::{name}", fake, lib=_library)
        return getattr(torch.ops.octavo, name).default

    return define
