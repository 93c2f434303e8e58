from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from espalier.comm import Channel
from espalier.recipe.errors import UserError
from many_ranks import Died, Fault, forks, outcomes, same, strike


def _rank_and_pid(channel: Channel, factor: int) -> tuple[int, int]:
    return channel.rank() * factor, os.getpid()


def test_results_come_back_in_order_from_real_processes() -> None:
    results = forks(3, _rank_and_pid, 10)
    assert [value for value, _ in results] == [0, 10, 20]
    assert len({pid for _, pid in results} | {os.getpid()}) == 4


def test_tensors_travel_back_bit_for_bit() -> None:
    value = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for result in forks(2, lambda channel: {"x": value * 1.0}):
        same(result, {"x": value}, bitwise=True)


def _one_raises(channel: Channel) -> None:
    if channel.rank() == 1:
        raise KeyError("the cause")
    dist.all_reduce(torch.ones(1))  # fails because rank 1 is gone


def test_the_first_exception_is_raised_as_it_was_with_the_ranks_traceback() -> None:
    with pytest.raises(KeyError, match="the cause") as caught:
        forks(2, _one_raises)
    (note,) = caught.value.__notes__
    assert "raised in rank 1" in note
    assert "_one_raises" in note


def _user_error(channel: Channel) -> None:
    raise UserError("what", why="why", do="do")


def test_our_errors_keep_their_parts() -> None:
    first, second = outcomes(2, _user_error)
    assert isinstance(first, UserError)
    assert (second.what, second.why, second.do) == ("what", "why", "do")


class _Awkward(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"awkward {one} {two}")


def _awkward(channel: Channel) -> None:
    raise _Awkward(1, 2)


def test_an_exception_that_cannot_travel_is_told_by_its_text() -> None:
    with pytest.raises(RuntimeError, match="_Awkward: awkward 1 2"):
        forks(1, _awkward)


def test_a_result_that_cannot_travel_says_so() -> None:
    with pytest.raises(TypeError, match="cannot travel back"):
        forks(1, lambda channel: lambda: None)


def _scripted(channel: Channel, faults: list[Fault]) -> str:
    for step in range(4):
        strike(faults, channel.rank(), step)
    return "done"


def test_a_kill_is_reported_with_its_signal() -> None:
    faults = [Fault(rank=0, step=2, do="kill")]
    assert outcomes(2, _scripted, faults) == [Died(signal=signal.SIGKILL), "done"]
    with pytest.raises(ChildProcessError, match="rank 0 of 2"):
        forks(2, _scripted, faults)


def test_a_scripted_error_names_rank_and_step() -> None:
    with pytest.raises(RuntimeError, match="rank 1, step 3"):
        forks(2, _scripted, [Fault(rank=1, step=3, do="raise")])


@pytest.mark.extremes
@pytest.mark.parametrize("do", ["hang", "stop"])
def test_a_timeout_kills_all_and_says_where_each_was(do: Any) -> None:
    before = _children()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="1 of 2 ranks") as caught:
        forks(2, _scripted, [Fault(rank=1, step=1, do=do)], timeout=2.5)
    assert time.monotonic() - began < 25, "the default is 30"
    assert ("faults.py" if do == "hang" else "did not answer") in str(caught.value)
    assert _children() <= before, "nobody is left"


def _children() -> set[int]:
    """The processes that this one started and has not waited for, by any of its threads. A test before this
    one may have left some: what imports multiprocessing's resource tracker, say, starts one that stays."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_more_than_one_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(UserError, match="set_num_threads"):
        forks(1, _rank_and_pid, 1)
