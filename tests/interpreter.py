"""Triton kernels on CPU: `TRITON_INTERPRET=1 pytest tests/gpu` runs them in Triton's interpreter, if Triton is installed.

The interpreter converts floats wrongly (BF16 truncates, FP8 loses NaN and rounds some values twice), so its conversion is replaced by
PyTorch's, which is the hardware's but for saturation: Triton converts to FP8 by `cvt.rn.satfinite`, infinities included. Then even the
interpreted kernels have to equal their references bit for bit.
"""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def convert_exactly() -> None:
    """Replace the interpreter's conversion between floats, once."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
    }
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

    def convert(data, source, target, rounding):
        x = torch.from_numpy(data.copy()).view(dtypes[source])
        if dtypes[target].itemsize == 1:
            largest = torch.finfo(dtypes[target]).max
            x = x.float().clamp(-largest, largest)
        x = x.to(dtypes[target])
        return x.view(words[x.itemsize]).numpy()

    interpreter._convert_float = convert
