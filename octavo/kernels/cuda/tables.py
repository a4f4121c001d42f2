"""Many tensors in one launch: tables that tell each program which tensor is its own, and where it lies.

A model has hundreds of tensors, many of them small, and a launch for each costs the host 20 to 50 microseconds. Here a program takes one
chunk of `CHUNK` elements: the chunk table, int32 [chunks, 2], says of which tensor and where in it, and the pointer table, int64
[tensors, width], holds what an ordinary launch would get as arguments. The first depends on sizes alone and is kept; the second is
made anew at each launch, because gradients move, and goes to the device through page-locked memory without waiting for it.

A compiler that knows nothing of a pointer loads byte by byte: `aligned` says whether all may be taken as multiples of 16 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from operator import or_

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 16
"""Elements of a program: 64 tiles of 1,024, so that one atomic a chunk and the loads of the tables do not count."""
ALIGNMENT = 16
TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
}


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers, at least one, as int64 on `device`, without waiting for it; a CUDA graph copies them anew in each replay."""
    words = torch.frombuffer(array("q", numbers), dtype=torch.int64)  # (a fifth of the time of torch.tensor)
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words


@lru_cache(maxsize=256)
def chunk_table(numels: tuple[int, ...], tile: int, device: torch.device, chunk: int = CHUNK) -> Tensor:
    """int32 [chunks, 2] on `device`: tensor, and number of a chunk in it, of the whole tiles of all tensors in order."""
    counts = _counts(numels, tile, chunk)
    tensors = np.repeat(np.arange(len(numels), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return _pairs(tensors, np.arange(counts.sum(), dtype=np.int64) - first[tensors], device)


@lru_cache(maxsize=256)
def chunk_starts(numels: tuple[int, ...], tile: int, device: torch.device) -> Tensor:
    """int32 [tensors + 1] on `device`: where the chunks of each tensor begin in `chunk_table`, and where the last ends."""
    return torch.from_numpy(np.append(0, np.cumsum(_counts(numels, tile, CHUNK))).astype(np.int32)).to(device)


@lru_cache(maxsize=256)
def tail_table(numels: tuple[int, ...], tile: int, device: torch.device) -> Tensor:
    """int32 [tails, 2] on `device`: each tensor whose last tile is not whole, and the number of that tile."""
    sizes = np.asarray(numels, dtype=np.int64)
    (tensors,) = (sizes % tile).nonzero()
    return _pairs(tensors, sizes[tensors] // tile, device)


def _counts(numels: tuple[int, ...], tile: int, chunk: int) -> np.ndarray:
    """Chunks of the whole tiles of each tensor."""
    return -(-(np.asarray(numels, dtype=np.int64) // tile * tile) // chunk)


def _pairs(tensors: np.ndarray, parts: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack([tensors, parts], 1).astype(np.int32)).to(device)


def addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    """Where the tensors lie, 0 for None: what columns of a table hold."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def aligned(addresses: Iterable[int]) -> bool:
    """Whether all are multiples of 16 bytes, as every allocation is, and the beginning of a view need not be."""
    return reduce(or_, addresses, 0) % ALIGNMENT == 0


@triton.jit
def pointer(row_ptr, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a column of a row of a table."""
    address = tl.load(row_ptr + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address
