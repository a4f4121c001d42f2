"""A bucket: gradients side by side in one flat buffer, in rows, so that every pass over it is one operation.

Each tensor begins at a row of `ROW` elements and its last row is filled up with zeros; the whole is filled up to a multiple of the
number of ranks. A value of a tensor (scale, maximum, count) is then spread over its rows by an index, and gathered by a
reduction over rows: no loop over tensors, no look at the device. The price is at most ROW - 1 elements a tensor on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from octavo.kernels import ROW, Places


class Layout:
    """Where tensors of the given shapes lie in a flat buffer of `rows` x ROW elements; `rows` is a multiple of `world`.

    Scalars of tensors are FP32 [T]; those of rows [rows] for all of them, or of a `part` (slice) of the rows.
    """

    def __init__(self, shapes: Sequence[torch.Size], world: int, device: torch.device | str = "cpu") -> None:
        self.shapes = [torch.Size(shape) for shape in shapes]
        counts = [-(-prod(shape) // ROW) for shape in self.shapes]
        first_rows = [0, *accumulate(counts)]
        filled = first_rows.pop()
        self.rows = -(-max(filled, 1) // world) * world
        self.places = Places(tuple(prod(shape) for shape in self.shapes), tuple(first_rows), self.rows)
        """The same for the kernels."""
        self.world = world
        self.numel = torch.tensor(self.places.numels, dtype=torch.float32, device=device)
        """Elements of each tensor, FP32 [T]."""
        self.ones = torch.ones_like(self.numel)
        owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
        padding = torch.full((self.rows - filled,), len(counts))
        self._owner = torch.cat([owners, padding]).to(device)
        self._reader = self._owner.clamp(max=len(counts) - 1)

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """An empty bucket, [rows, ROW] of `dtype`."""
        return torch.zeros(self.rows, ROW, dtype=dtype, device=self._owner.device)

    def views(self, bucket: Tensor) -> list[Tensor]:
        """The tensors in a bucket, in their shapes."""
        flat = bucket.view(-1)
        return [
            flat[row * ROW : row * ROW + numel].view(shape)
            for row, numel, shape in zip(self.places.first_rows, self.places.numels, self.shapes, strict=True)
        ]

    def part(self, rank: int) -> slice:
        """The rows that `rank` sums."""
        each = self.rows // self.world
        return slice(rank * each, (rank + 1) * each)

    def spread(self, values: Tensor) -> Tensor:
        """[rows, 1]: the value of each row's tensor; that of the last one for rows of padding, which nobody reads."""
        return values[self._reader].unsqueeze(1)

    def maximum(self, rows: Tensor, part: slice = slice(None)) -> Tensor:
        """The largest of the rows' values for each tensor, 0 where it has none in this part; NaN counts as infinity."""
        return self._gather(torch.where(rows.isnan(), torch.inf, rows), part, "amax")

    def total(self, rows: Tensor, part: slice = slice(None)) -> Tensor:
        """The sum of the rows' values for each tensor."""
        return self._gather(rows, part, "sum")

    def _gather(self, rows: Tensor, part: slice, how: str) -> Tensor:
        out = torch.zeros(len(self.shapes) + 1, dtype=torch.float32, device=rows.device)
        return out.scatter_reduce_(0, self._owner[part], rows.float(), how)[:-1]
