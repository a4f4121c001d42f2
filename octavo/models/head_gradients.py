"""Both gradients of a head by FP8 GEMMs, from the gradient of its logits in chunks of tokens (see `octavo.models.loss`).

    dx [n, C] = g · w,    dw [V, C] = gᵀ · x,    g [n, V] = softmax - onehot, in [-1, 1]

Nobody looks for the largest value of g: its scale is the largest power of two that 1 bears, 2¹⁵ for E5M2, and the targets of what is
not learned yet, all near -1, are hardly rounded. The weight is cast once, transposed, without its mean row, which each row of g, as it adds
up to zero, leaves out (see `octavo.linear.head`); it is also kept in the compute dtype for the logits.

dw contracts over tokens, so its GEMM reads gᵀ. Each chunk is transposed into a stash [V, tokens], and one GEMM multiplies a group of
chunks by the input of its tokens, cast as a whole: 1 byte a logit, 0.8 GB for 16,384 tokens and a vocabulary of 50,304, at most 2³⁰ codes.
Only beyond that there are several groups, whose products are summed in FP32. The last is multiplied when the weights of the compute dtype
are gone, and the stash is freed before backward begins, which holds dw twice: so the peak of a step grows only where the stash is larger
than dw in FP32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo import kernels
from octavo.formats import E4M3, Format
from octavo.kernels import ALIGN
from octavo.kernels.ops import padded
from octavo.linear.gemm import gemm
from octavo.linear.head import weight_codes_t

STASH_ELEMENTS = 1 << 30
"""Codes of one group of chunks; a larger batch has several groups."""


def unit_scale(fmt: Format) -> float:
    """The largest power of two that is a scale for values in [-1, 1]."""
    return 2.0 ** math.floor(math.log2(fmt.max))


def group_tokens(vocabulary: int, chunk: int) -> int:
    """Tokens of a group: whole chunks of `chunk` tokens, at least one."""
    return max(STASH_ELEMENTS // vocabulary // chunk, 1) * chunk


class FP8Gradients:
    """dx [n, C] in the dtype of x and dw [V, C], FP32, from chunks that come in order; each None if it is not needed.

    x [n, C] and w [V, C] are in the compute dtype. All chunks have `chunk` tokens but the last, a multiple of 16 if there is more than
    one. Values that are not finite, in w, x or g, are NaN in what is computed from them.
    """

    def __init__(self, x: Tensor, w: Tensor, fmt: Format, need_x: bool, need_w: bool, chunk: int) -> None:
        self.x, self.vocabulary = x, len(w)
        self.dx = torch.empty_like(x) if need_x else None
        self.dw: Tensor | None = None
        self.need_w, self.group_tokens = need_w, group_tokens(self.vocabulary, chunk)
        self.inverse = torch.full((), 1 / unit_scale(fmt), dtype=torch.float32, device=x.device)
        self.weight = weight_codes_t(w, True) if need_x else None
        self.stash: Tensor | None = None

    def add(self, rows: slice, codes: Tensor) -> None:
        """codes [rows, V]: the gradient of these tokens' logits, which adds up to zero in each row before it is rounded."""
        if self.dx is not None and self.weight is not None:
            aligned = kernels.pad_codes(codes) if self.vocabulary % ALIGN else codes
            weight_codes, weight_inverse, _ = self.weight
            dx = gemm(aligned, weight_codes, self.inverse, weight_inverse, self.x.dtype)
            self.dx[rows] = dx[: len(codes), : self.x.shape[1]]
        if self.need_w:
            self._keep(rows, codes)

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """(dx, dw), after the last chunk."""
        self.weight = None
        self._wgrad(len(self.x))
        return self.dx, self.dw

    def _keep(self, rows: slice, codes: Tensor) -> None:
        """Transpose `codes` into the stash of their group; the first of a group has the group before multiplied."""
        first = rows.start % self.group_tokens
        if first == 0:
            self._wgrad(rows.start)
            tokens = min(self.group_tokens, len(self.x) - rows.start)
            self.stash = torch.empty(padded(self.vocabulary), padded(tokens), dtype=codes.dtype, device=codes.device)
        assert self.stash is not None
        kernels.transpose_codes(codes, out=self.stash[:, first : first + padded(len(codes))])

    def _wgrad(self, stop: int) -> None:
        """The product of the group that ends before token `stop`, if there is one, added to dw."""
        if self.stash is None:
            return
        x = self.x[(stop - 1) // self.group_tokens * self.group_tokens : stop]
        _, x_codes_t, _, _, x_inverse = kernels.quantize(x, E4M3, row=False, return_inverse=True)
        dw = gemm(self.stash, x_codes_t, self.inverse, x_inverse, torch.float32)
        self.stash = None
        dw = dw[: self.vocabulary, : x.shape[1]]
        self.dw = dw if self.dw is None else self.dw.add_(dw)
