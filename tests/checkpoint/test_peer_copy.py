"""What another machine keeps: every rank's state is there again when a machine is lost with all that was in it."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from espalier.checkpoint import peer_copy, shared_memory
from espalier.checkpoint.coordination import Coordinator
from espalier.checkpoint.in_memory import CopyOptions, Memory
from many_ranks import forks


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_no_rank_s_copies_are_kept_on_its_own_machine(nodes):
    apart = peer_copy.distance(nodes)
    if apart:
        assert all(nodes[rank] != nodes[(rank + apart) % len(nodes)] for rank in range(len(nodes)))
    else:
        shifted = [nodes[one:] + nodes[:one] for one in range(1, len(nodes))]
        assert all(any(a == b for a, b in zip(nodes, other, strict=True)) for other in shifted)


@pytest.mark.parametrize(
    ("nodes", "apart"), [([0], 0), ([0, 0], 0), ([0, 1], 1), ([0, 0, 1, 1], 2), ([0, 1, 0, 1], 1), ([0, 0, 1], 0)]
)
def test_it_is_the_least_distance(nodes, apart):
    assert peer_copy.distance(nodes) == apart


class Own:
    """The state of one rank after a step: no other rank has it, and its size is its own too."""

    def __init__(self, rank, step):
        self.state = {"part": torch.arange(1000.0 + 300 * rank) + 10_000 * rank + step, "step": step}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def _run(channel, refuges, lost, spoilt):
    """Three steps with copies of each; then the machine of rank `lost` is another. What each takes up."""
    rank, world = channel.rank(), channel.size()
    group = dist.new_group(backend="gloo")
    kept = Memory(refuges[rank], Coordinator(group), lambda every, why: None, kin=CopyOptions(apart=1))

    def mean(values):
        dist.all_reduce(values, group=group)
        values /= world

    for step in (1, 2, 3):
        kept._due = 0
        kept.after(step, lambda step=step: {"own": Own(rank, step)}, {"step": step}, mean)
    if rank == lost:
        for file in refuges[rank].files:
            os.ftruncate(file, 0)
    if rank == (lost + 1) % world and spoilt:
        slot = next(one for one in kept._partner._slots if one.step == 3)
        os.pwrite(slot.file, b"\xff\x00\xff", 4500)
    again, own = (
        Memory(refuges[rank], Coordinator(group), lambda every, why: None, kin=CopyOptions(apart=1)),
        Own(rank, -1),
    )
    step = again.newest()
    meta = again.take(step, {"own": own})
    same = meta is not None and torch.equal(own.state["part"], Own(rank, step).state["part"])
    return step, meta, same


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("spoilt", [False, True])
def test_a_machine_is_lost_and_its_rank_goes_on_from_what_another_kept(lost, spoilt):
    torch.set_num_threads(1)
    refuges = shared_memory.build(3, 3 << 20, 2 * shared_memory.SLOTS)
    try:
        found = forks(3, _run, refuges, lost, spoilt)
    finally:
        shared_memory.release(refuges)
    step = 2 if spoilt else 3
    assert found == [(step, {"step": step}, True)] * 3


def _crowded(channel, refuges):
    """One rank has no room: then no rank keeps any copy, and none waits for another."""
    rank, world = channel.rank(), channel.size()
    group = dist.new_group(backend="gloo")
    told = []
    kept = Memory(refuges[rank], Coordinator(group), lambda every, why: told.append(why), kin=CopyOptions(apart=1))

    def mean(values):
        dist.all_reduce(values, group=group)
        values /= world

    for step in (1, 2):
        kept.after(step, lambda step=step: {"own": Own(rank, step)}, {"step": step}, mean)
    return kept.newest(), "4 of them" in told[0]


def test_without_room_on_one_rank_there_are_none():
    torch.set_num_threads(1)
    refuges = [shared_memory.build(1, size, 2 * shared_memory.SLOTS)[0] for size in (1 << 20, 1 << 12, 1 << 20)]
    try:
        assert forks(3, _crowded, refuges) == [(-1, True)] * 3
    finally:
        shared_memory.release(refuges)
