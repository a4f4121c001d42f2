"""The end of a step of delayed scaling by one kernel equals its reference bit for bit.

Without a GPU the kernel can be interpreted, see `interpreter`.
"""

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits

from octavo.kernels import reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu


@pytest.fixture
def cuda():
    from octavo.kernels import cuda

    if INTERPRETED:
        convert_exactly()
    return cuda


@pytest.mark.parametrize("window", [1, 5, 16, 33])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("done", [None, False, True])
def test_update_windows(cuda, window, some, done, seed):
    n = 9
    history = torch.randn(n, window).abs() * 2.0 ** torch.randint(-140, 120, (n, 1))
    history[torch.rand(n) < 0.3] = 0.0
    pending, held, scales = torch.zeros(n, 4), torch.rand(n, 4), torch.rand(n, 4)
    limits = torch.tensor([0.0, 448.0, 57344.0] * 3)
    rows = torch.rand(n) < 0.5 if some else None
    flag = None if done is None else torch.tensor(done)
    ours, theirs = ([tensor.clone().to(DEVICE) for tensor in (history, pending, held, scales)] for _ in range(2))
    for _ in range(3):
        raised = torch.randn(n).abs() * 10
        for module, state in ((cuda, ours), (reference, theirs)):
            state[1][:, 0] = raised.to(DEVICE)
            columns = [state[0], *(tensor[:, 0] for tensor in state[1:])]
            flags = [None if tensor is None else tensor.to(DEVICE) for tensor in (rows, flag)]
            module.update_windows(*columns, limits.to(DEVICE), *flags)
        for got, want in zip(ours, theirs, strict=True):
            assert_same_bits(got, want)
