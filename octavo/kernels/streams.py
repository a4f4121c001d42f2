"""Where work on a tensor is queued: what a cache of tensors made on a GPU has to know, besides the tensor they were made from.

What one stream has queued need not exist yet for another, which waits for the tensor and not for the copy that somebody made of it later:
so a copy serves the stream that made it. A CUDA graph that is captured runs nothing: its replays would not make again a copy that was made
before, however the tensor changes, and a copy that it makes holds nothing until the first replay. So neither serves the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

HOST = 0
CAPTURED = -1
"""The stream of a CUDA graph that is being captured; captures are not told apart."""


def place(x: Tensor) -> int:
    """The current stream of the device of `x`, or `CAPTURED` while that is captured; `HOST`, asking nobody, for a device without streams.

    (The raw stream is what compiled code of PyTorch asks for: a tenth of the host's time of `torch.cuda.current_stream`.)
    """
    device = x.get_device()
    if device < 0:
        return HOST
    return CAPTURED if torch.cuda.is_current_stream_capturing() else torch._C._cuda_getCurrentRawStream(device)
