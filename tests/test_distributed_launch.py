"""What ranks agree on: means, stops, who writes, and errors that reach everybody."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import ranks
import torch
import torch.distributed as dist

from octavo.distributed.collectives import CollectiveError
from octavo.distributed.launch import Place, join


def test_alone_everything_is_local():
    place = join("cpu")
    values = torch.rand(3)
    assert place.world == 1 and place.is_first and place.mean(values) is values
    assert place.share("x") == "x" and place.any_so_far(True) and not place.any_so_far(False)
    with place.first_goes_first():
        place.wait()
    with pytest.raises(OSError, match="full"):
        place.on_first(lambda: (_ for _ in ()).throw(OSError("full")))
    place.leave()


def agrees() -> None:
    place, rank = join("cpu"), dist.get_rank()
    assert (place.rank, place.world) == (rank, dist.get_world_size())
    assert place.mean(torch.tensor([float(rank), 1.0])).tolist() == [(place.world - 1) / 2, 1.0]
    assert place.share(f"from {rank}") == "from 0"
    done: list[int] = []
    place.on_first(lambda: done.append(rank))
    assert done == ([0] if rank == 0 else [])
    flags = [place.any_so_far(call == 1 and rank == 1) for call in range(4)]
    assert flags == [False, False, True, False]  # one call later, on all ranks


def test_ranks_agree():
    ranks.run(3, agrees)


def errors_reach_all() -> None:
    place = join("cpu")

    def fails() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        place.on_first(fails)
    with pytest.raises(ValueError, match="no text|rank 0 failed: ValueError: no text"):
        with place.first_goes_first():
            if place.is_first:
                raise ValueError("no text")


def test_an_error_of_the_first_rank_reaches_all():
    ranks.run(2, errors_reach_all)


def hears_nothing() -> str:
    """Rank 1 leaves rank 0 waiting."""
    place = join("cpu", timeout=1.0)
    if not place.is_first:
        return ""
    with pytest.raises(CollectiveError) as caught:
        place.wait()
    return str(caught.value)


def test_a_silent_rank_is_an_error_within_the_timeout():
    message = ranks.run(2, hears_nothing)[0]
    assert "rank 0 of 2" in message and "started again from its last checkpoint" in message
    ranks.forget(2)  # the processes have lost step


def works_longer_than_the_timeout() -> list[int]:
    place, order = join("cpu", timeout=2.0), []
    with place.first_goes_first():
        if place.is_first:
            time.sleep(3.0)
        order.append(1)

    def work() -> None:
        time.sleep(3.0)
        order.append(2)

    place.on_first(work)
    return order


def test_work_of_the_first_rank_may_take_longer_than_the_timeout():
    """A long text is tokenized by rank 0 alone, and so is a large checkpoint read for its checksums."""
    assert ranks.run(2, works_longer_than_the_timeout) == [[1, 2], [1]]


RESTARTS = """
import os, signal
import torch.distributed as dist
from octavo.distributed.launch import join

place, restarts = join("cpu", timeout=30.0), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
store = dist.distributed_c10d._get_default_store()
if restarts:
    left = store.check(["left"])
    print(f"rank {place.rank}: {place.share('together')} after {restarts} restarts, left: {left}")
    place.leave()
else:
    store.set("left", "where gloo leaves the addresses of processes")
    place.wait()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    place.wait()
"""


def test_ranks_that_torchrun_starts_again_find_nothing_of_the_start_before(tmp_path):
    script = tmp_path / "restarts.py"
    script.write_text(RESTARTS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*torchrun, "--max-restarts", "1", str(script)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert all(f"rank {rank}: together after 1 restarts, left: False" in ended.stdout for rank in range(2))


def test_a_place_knows_who_writes():
    assert Place(0, 4).is_first and not Place(3, 4).is_first
