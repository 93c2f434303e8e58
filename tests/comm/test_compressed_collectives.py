"""Encoded collectives: the same bits on all ranks, one lossy step, bytes by formula, errors that name the message.

What codecs do is in test_codecs.py. Collectives and messages know of a codec only whether it loses something and
whether its length is fixed: here is one of each kind.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.comm import Channel, Traffic, compressed_collectives, traffic, wire_format
from espalier.comm.base import feedback
from espalier.comm.codecs import codec
from espalier.comm.comm_thread import CommThread
from espalier.recipe.errors import PeerLost, RunFailed, UserError
from many_ranks import forks, ranks, same

KINDS = ["int8", "split"]
"""Lossy and of fixed length; lossless and of a length that the values decide."""


def mine(channel: Channel, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(channel.rank() + 1)
    return torch.randn(length, generator=generator).to(dtype)


def _all_reduced(channel: Channel, name: str, dtype: torch.dtype) -> Any:
    channel.use(Traffic.GRADIENTS, codec(name))
    found = []
    for length in (5000, 8192, 300_001):
        x, plain = mine(channel, length, dtype), mine(channel, length, torch.float64)
        with traffic(Traffic.GRADIENTS):
            dist.all_reduce(x)
        dist.all_reduce(plain)
        found.append((x, float((x - plain).norm() / plain.norm())))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_all_ranks_end_with_the_same_bits(name: str) -> None:
    first, *others = forks(3, _all_reduced, name, torch.float32)
    for other in others:
        same([x for x, _ in other], [x for x, _ in first], bitwise=True)


def test_the_error_does_not_grow_with_the_ranks() -> None:
    """One lossy step for a contribution and one for the sum, whatever the number of ranks."""
    for n in (2, 4, 8):
        assert all(error < 0.02 for _, error in ranks(n, _all_reduced, "int8", torch.float32)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_floats_are_reduced_too(dtype: torch.dtype) -> None:
    for name in ("int8", "split"):
        for x, error in ranks(2, _all_reduced, name, dtype)[0]:
            assert x.dtype == dtype
            assert error < 0.03


def _like_the_plain_one(channel: Channel, name: str) -> None:
    """A lossless codec gives the bits of the Channel's own reduce-scatter and gather, which add in rank order."""
    n = channel.size()
    x = mine(channel, n * 9000)
    results = []
    for use in (None, codec(name)):
        if use is not None:
            channel.use(Traffic.GRADIENTS, use)
        part, whole, turned = torch.empty(9000), torch.empty(n * 9000), torch.empty(n * 9000)
        mean = torch.empty(9000)
        with traffic(Traffic.GRADIENTS):
            dist.reduce_scatter_single(part, x)
            dist.reduce_scatter_single(mean, x, op=dist.ReduceOp.AVG)
            dist.all_gather_single(whole, part)
            dist.all_to_all_single(turned, x)
        results.append([part, mean, whole, turned])
    same(results[1], results[0], bitwise=True)


def test_a_lossless_codec_changes_no_bit() -> None:
    for n in (2, 3):
        ranks(n, _like_the_plain_one, "split")


def _moved(channel: Channel) -> Any:
    rank, n = channel.rank(), channel.size()
    channel.use(Traffic.ACTIVATIONS, codec("int8"))
    whole, x = torch.empty(n * 9000), mine(channel, 9000)
    dist.all_gather_single(whole, x)
    assert not torch.equal(whole[rank * 9000 : (rank + 1) * 9000], x), "the owner sees what the others see"
    sizes = [[0, 1, 7000], [30_000, 2, 0], [5, 6000, 9]]
    given_ = [torch.full((size,), float(10 * rank + peer)) for peer, size in enumerate(sizes[rank])]
    got = [torch.empty(sizes[peer][rank]) for peer in range(n)]
    dist.all_to_all(got, given_)
    for peer, part in enumerate(got):
        torch.testing.assert_close(part, torch.full_like(part, 10.0 * peer + rank), rtol=1e-6, atol=0)
    note = torch.empty(9000)
    if rank == 0:
        dist.send(x, 1, tag=3)
    if rank == 1:
        dist.recv(note, 0, tag=3)
    return whole, note


def test_gathers_all_to_alls_and_messages_are_encoded() -> None:
    found = forks(3, _moved)
    same([whole for whole, _ in found[1:]], [found[0][0]] * 2, bitwise=True)
    same(found[1][1], found[0][0][:9000], bitwise=True)


def _booked(channel: Channel, name: str) -> dict[Any, float]:
    channel.use(Traffic.GRADIENTS, codec(name))
    with traffic(Traffic.GRADIENTS):
        dist.all_reduce(mine(channel, 700_001))
        dist.reduce_scatter_single(torch.empty(90_112), mine(channel, channel.size() * 90_112))
    return dict(channel.ledger.bytes)


def test_the_ledger_has_the_formulas_bytes() -> None:
    used = codec("int8")
    for n in (2, 3):
        for rank, booked in enumerate(ranks(n, _booked, "int8")):
            assert booked["gradients", "all_reduce"] == compressed_collectives.sent_bytes(
                used, "all_reduce", 700_001, (rank, n)
            )
            parts = compressed_collectives.sent_bytes(used, "reduce_scatter", n * 90_112, (rank, n))
            assert booked["gradients", "reduce_scatter"] == parts


def _fed_back(channel: Channel, name: str, steps: int) -> Any:
    channel.use(Traffic.GRADIENTS, codec(name))
    length = 20_000
    residual = torch.zeros(length)
    wanted, arrived = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    largest = 0.0
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + channel.rank())
        x = torch.randn(length, generator=generator)
        wanted += x
        with traffic(Traffic.GRADIENTS), feedback(residual):
            dist.all_reduce(x)
        arrived += x
        largest = max(largest, float(residual.norm()))
    return wanted, arrived, residual.double(), largest


def test_with_feedback_what_arrives_is_what_was_sent_less_the_residuals() -> None:
    for steps in (1, 2, 3, 12):
        found = ranks(3, _fed_back, "int4", steps)
        wanted, left = (sum(one[index] for one in found) for index in (0, 2))
        for _, arrived, _, _ in found:
            torch.testing.assert_close(arrived, wanted - left, rtol=0, atol=2e-4)


def test_with_feedback_sums_are_neither_longer_nor_shorter() -> None:
    """What arrives, measured along what was given: were the residual added twice or the sum scaled, this were not 1."""
    found = ranks(3, _fed_back, "int8", 12)
    wanted = sum(one[0] for one in found)
    along = float(torch.dot(found[0][1], wanted) / torch.dot(wanted, wanted))
    assert abs(along - 1) < 1e-3


def test_the_residual_stays_bounded() -> None:
    short, long = (ranks(2, _fed_back, "int4", steps)[0][3] for steps in (15, 60))
    assert long < 2 * short


def _not_finite(channel: Channel, name: str) -> None:
    channel.use(Traffic.GRADIENTS, codec(name))
    residual = torch.zeros(20_000)
    for bad in (float("nan"), float("inf")):
        x = mine(channel, 20_000)
        expected = x.clone()
        if channel.rank() == 1:
            x[7], x[19_000] = bad, bad
            expected[7], expected[19_000] = bad, bad
        with traffic(Traffic.GRADIENTS), feedback(residual):
            dist.all_reduce(x)
        dist.all_reduce(expected)
        same(x.isfinite(), expected.isfinite())
        same(x.isnan(), expected.isnan())
        assert residual.isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_nan_and_infinity_arrive_and_stay_where_they_are(name: str) -> None:
    ranks(2, _not_finite, name)


def _left_alone(channel: Channel) -> None:
    channel.use(Traffic.ACTIVATIONS, codec("int1"))
    rank, n = channel.rank(), channel.size()
    for x in (torch.arange(9000) + rank, torch.ones(0), torch.tensor([0.3]), torch.full((100,), 0.3)):
        plain = sum(x - rank + other for other in range(n)) if x.dtype == torch.int64 else x * n
        dist.all_reduce(x)
        same(x, plain)
    largest = torch.full((9000,), 0.3 + rank)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert (largest == torch.tensor(0.3) + n - 1).all()


def test_integers_small_tensors_and_other_reductions_go_as_they_are() -> None:
    ranks(2, _left_alone)


def _empty_parts(channel: Channel) -> None:
    channel.use(Traffic.ACTIVATIONS, codec("int8"))
    nothing = torch.empty(0)
    dist.all_to_all_single(nothing, torch.empty(0))
    sizes = [0] * channel.size()
    dist.all_to_all_single(nothing, torch.empty(0), sizes, sizes)


def test_nothing_can_be_exchanged() -> None:
    ranks(3, _empty_parts)


def _back_to_exact(channel: Channel) -> Any:
    for name in ("int4", "split", "int4", "exact"):
        channel.use(Traffic.ACTIVATIONS, codec(name))
        x = mine(channel, 9000)
        dist.all_reduce(x)
    plain = mine(channel, 9000)
    with traffic(Traffic.GRADIENTS):
        dist.all_reduce(plain)
    same(x, plain, bitwise=True)


def test_a_codec_can_be_changed_and_taken_back() -> None:
    ranks(2, _back_to_exact)


def _disagreeing(channel: Channel) -> None:
    with pytest.raises(UserError, match=r"rank 0 has 'int8', rank 1 has 'int4'"):
        channel.use(Traffic.GRADIENTS, codec("int4" if channel.rank() else "int8"))


def test_ranks_with_different_codecs_are_told_at_once() -> None:
    ranks(2, _disagreeing)


# --- messages --------------------------------------------------------------------------------------------------------

TOLD = (wire_format.Bucket("gradients", 7), 3)


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_flipped_bit_is_found(name: str, data: Any) -> None:
    one = codec(name)
    x = torch.linspace(-1, 1, 600)
    sends, _ = wire_format.seal(one, x, TOLD[0])
    which = data.draw(st.integers(0, len(sends) - 1))
    place = data.draw(st.integers(0, sends[which].numel() - 1))
    sends[which][place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RunFailed, match=r"class 'gradients' from rank 3 is damaged \(collective 7") as error:
        wire_format.opened(one, (sends[0], sends[1] if len(sends) > 1 else None), x, TOLD)
    assert error.value.why


@pytest.mark.parametrize("name", KINDS)
def test_a_sealed_message_opens(name: str) -> None:
    for length in (0, 1, 300):
        for bad in (False, True):
            x = torch.linspace(-1, 1, length)
            if bad and length:
                x[0] = torch.nan
            one = codec(name)
            sends, raw = wire_format.seal(one, x, TOLD[0])
            assert raw == (bad and length > 0 and not one.lossless)
            assert sends[0].numel() == wire_format.first_bytes(one, length, 4)
            back = wire_format.opened(one, (sends[0], sends[1] if len(sends) > 1 else None), x, TOLD)
            same(back.isnan(), x.isnan())


def test_the_message_of_another_collective_is_refused() -> None:
    sends, _ = wire_format.seal(codec("int8"), torch.ones(10), wire_format.Bucket("gradients", 6))
    with pytest.raises(RunFailed, match="damaged"):
        wire_format.opened(codec("int8"), (sends[0], None), torch.ones(10), TOLD)


# --- the lane --------------------------------------------------------------------------------------------------------


def test_a_lane_keeps_the_order_and_stops_at_an_error() -> None:
    seen: list[int] = []
    lane = CommThread("test")

    def job(number: int) -> Any:
        def run() -> None:
            time.sleep(0.002 * (5 - number))
            if number == 3:
                raise RuntimeError("the third")
            seen.append(number)

        return run

    tasks = [lane.put(job(number)) for number in range(5)]
    futures = [task.get_future() for task in tasks]
    assert tasks[2].wait()
    for task in tasks[3:]:
        with pytest.raises(RuntimeError, match="the third"):
            task.wait()
        assert task.is_completed()
        assert not task.is_success()
    assert seen == [0, 1, 2]
    assert futures[1].wait() == []
    with pytest.raises(RuntimeError, match="the third"):
        futures[4].wait()
    lane.close()


def test_a_task_has_a_deadline() -> None:
    lane, gate = CommThread("test"), threading.Event()
    task = lane.put(gate.wait)
    with pytest.raises(RuntimeError, match="Timed out"):
        task.wait(timedelta(milliseconds=20))
    gate.set()
    assert task.wait()
    lane.close()


# --- faults ----------------------------------------------------------------------------------------------------------


def _absent(channel: Channel) -> str:
    channel.use(Traffic.GRADIENTS, codec("int8"))
    if channel.rank() == 1:
        time.sleep(3)  # longer than the others wait
        return ""
    channel.set_timeout(timedelta(seconds=1))
    with pytest.raises(PeerLost) as error, traffic(Traffic.GRADIENTS):
        dist.all_reduce(mine(channel, 20_000))
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    said = forks(3, _absent)
    for rank in (0, 2):
        assert "gradients" in said[rank]
        assert "rank 1 has not entered it" in said[rank]


class _Noise:
    """A group that flips a bit of what it sends."""

    def __init__(self, inner: Any) -> None:
        self.send_whole, self.recv = inner.send, inner.recv

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        tensors[0][5000] ^= 4
        return self.send_whole(tensors, peer, tag)


def _damaged(channel: Channel) -> str:
    channel.use(Traffic.GRADIENTS, codec("int8"))
    channel.set_timeout(timedelta(seconds=2))
    if channel.rank() == 1:
        own = channel._coded[Traffic.GRADIENTS]
        own.inner = _Noise(own.inner)
    with pytest.raises(RunFailed) as error, traffic(Traffic.GRADIENTS):
        dist.all_reduce(mine(channel, 40_000))
    return str(error.value)


@pytest.mark.slow
def test_a_message_damaged_on_its_way_ends_the_run_and_names_its_sender() -> None:
    said = forks(2, _damaged)
    assert "class 'gradients' from rank 1 is damaged (collective 1" in said[0]
