from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor

from espalier import comm
from espalier.comm import Channel, Traffic, traffic
from espalier.recipe.errors import RunFailed, UserError
from many_ranks import Died, Fault, forks, outcomes, ranks, strike


def _reduce(kind: Traffic = Traffic.GRADIENTS, group: Any = None) -> None:
    with comm.phase("backward"), traffic(kind):
        dist.all_reduce(torch.ones(1000), group=group)


def _one_stays_away(channel: Channel) -> None:
    _reduce()  # the first one starts everybody; only then is a second enough
    channel.set_timeout(timedelta(seconds=1))
    if channel.rank() == 1:
        with comm.phase("reading data"):
            time.sleep(4)
    _reduce()


def test_timeout_names_rank_phase_operation_class_and_who_is_missing() -> None:
    began = time.monotonic()
    results = outcomes(3, _one_stays_away, timeout=20)
    assert time.monotonic() - began < 19, "the deadline of all is 20"
    for rank in (0, 2):
        error = results[rank]
        assert isinstance(error, RunFailed), error
        text = str(error)
        assert f"Rank {rank} waited" in text
        assert "in phase 'backward' for all_reduce #2" in text
        assert "(gradients, 3.91 KiB)" in text
        assert "rank 1 has not entered it" in text
        assert "rank 1: running in phase 'reading data', last collectives: all_reduce #1" in text


def _killed(channel: Channel, do: str) -> None:
    channel.set_timeout(timedelta(seconds=20))
    for step in range(100):
        strike([Fault(rank=1, step=5, do=do)], channel.rank(), step)  # type: ignore[arg-type]
        _reduce()


def test_a_killed_peer_is_named_within_seconds() -> None:
    began = time.monotonic()
    results = outcomes(3, _killed, "kill", timeout=40)
    assert time.monotonic() - began < 19, "before the deadline of a collective"
    assert results[1] == Died(signal=signal.SIGKILL)
    for rank in (0, 2):
        assert isinstance(results[rank], RunFailed)
        assert "rank 1 has not entered it" in str(results[rank])
        assert "rank 1 has given no sign of life" in str(results[rank])


def _raise_alone(channel: Channel) -> None:
    if channel.rank() == 0:
        comm.disconnect()
        return
    _reduce()


def test_a_rank_that_left_is_said_to_have_left() -> None:
    (_, error) = outcomes(2, _raise_alone, timeout=4)
    assert isinstance(error, RunFailed)
    assert "rank 0 has left the run" in str(error)


def _message(channel: Channel) -> None:
    channel.set_timeout(timedelta(seconds=1))
    if channel.rank() == 1:
        dist.recv(torch.empty(3), src=0)
    else:
        time.sleep(4)


@pytest.mark.slow
def test_a_message_that_never_comes_names_its_sender() -> None:
    error = outcomes(2, _message, timeout=15)[1]
    assert isinstance(error, RunFailed)
    assert "for recv #1" in str(error)
    assert "rank 0 has not entered it" in str(error)


def _functional(channel: Channel) -> Any:
    value = wait_tensor(all_reduce(torch.ones(3), "sum", channel))
    if channel.rank() == 1:
        os._exit(3)
    wait_tensor(all_reduce(value, "sum", channel))
    return None


def test_the_error_survives_functional_collectives() -> None:
    error, died = outcomes(2, _functional, timeout=10)
    assert isinstance(error, RunFailed), error
    assert "rank 1 has not entered it" in str(error)
    assert died == Died(signal=0, code=3)


def _mistake(channel: Channel) -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.complex64), op=dist.ReduceOp.MAX)


def test_a_mistake_in_the_call_is_not_taken_for_a_lost_peer() -> None:
    for error in outcomes(2, _mistake, timeout=10):
        assert isinstance(error, Exception)
        assert not isinstance(error, RunFailed)


def test_ranks_that_never_come_are_named() -> None:
    store = dist.HashStore()
    with pytest.raises(RunFailed, match=r"Ranks 1 and 2 did not come.\n.*Rank 0 waited 1.0 s for all 3 ranks"):
        comm.connect(store, 0, 3, timeout=1.0)
    assert not dist.is_initialized()


def test_an_unknown_inner_group_is_a_user_error() -> None:
    with pytest.raises(UserError, match="gloo"):
        comm.connect(dist.HashStore(), 0, 1, timeout=1.0, inner="glooo")


def _twice(channel: Channel) -> Any:
    store = dist.PrefixStore("outer", channel.get_group_store())
    comm.disconnect()
    totals = []
    for attempt in range(2):
        space = dist.PrefixStore(f"attempt{attempt}", store)
        again = comm.connect(space, channel.rank(), channel.size(), timeout=10)
        value = torch.ones(1)
        dist.all_reduce(value, group=again)
        totals.append(value.item())
        comm.disconnect()
    return totals


def test_each_attempt_has_an_address_book_of_its_own() -> None:
    assert forks(2, _twice) == [[2.0, 2.0]] * 2


def _phases(channel: Channel) -> list[str]:
    watch = channel.line.watch
    seen = [watch.phase]
    with comm.phase("backward"):
        seen.append(watch.phase)
    return [*seen, watch.phase]


def test_phase_lasts_for_its_block() -> None:
    assert ranks(2, _phases) == [["start", "backward", "start"]] * 2
    with comm.phase("nowhere"):
        assert not dist.is_initialized()
