"""The windows of delayed scaling at the end of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.cast import scale_from_amax


def update_windows(
    history: Tensor,
    pending: Tensor,
    held: Tensor,
    scales: Tensor,
    limits: Tensor,
    rows: Tensor | None = None,
    done: Tensor | None = None,
) -> None:
    """See `octavo.kernels.windows`."""
    rows = torch.ones_like(held, dtype=torch.bool) if rows is None else rows
    moves = rows if done is None else rows & done
    history.copy_(torch.where(moves[:, None], torch.cat([pending[:, None], history[:, :-1]], 1), history))
    new = history.amax(1)
    held.copy_(torch.where(rows & (new > 0) & (new < torch.inf), new, held))
    pending.masked_fill_(rows, 0.0)
    for limit in limits.unique().tolist():
        if limit > 0:
            scales.copy_(torch.where(limits == limit, scale_from_amax(held.contiguous(), limit), scales))
