"""The shared scalar: one scale for the gradients of all ranks (Eqs. 4-6 of FP8-LM).

    s'_i = largest power of two with which the gradient of rank i does not saturate
    s    = min_i s'_i                               one small collective for all tensors of a bucket
    codes_i = FP8(µ · s · g_i)
    s_mean  = N · µ · s                             the scale of the sum: de-quantising gives the mean

The same collective says what a rank has: 0 where a gradient holds an infinity or NaN, which wins every minimum (a MAX would not
do: NCCL's max(NaN, 3) is 3), the largest scale where a gradient is all zero, so that it does not press the others', and infinity
where a rank has no gradient at all.

The arithmetic is part of the kernels of a bucket, and stands with them.
"""

from octavo.kernels.reference.reduce_scalars import (
    ABSENT,
    LARGEST,
    SharedScales,
    local_scales,
    mean_scale,
    shared_scales,
)

__all__ = ["ABSENT", "LARGEST", "SharedScales", "local_scales", "mean_scale", "shared_scales"]
