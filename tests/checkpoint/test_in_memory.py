"""Copies in memory: whole or not at all, taken by all ranks or by none, never larger than allowed."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from espalier.checkpoint import shared_memory, state_tree
from espalier.checkpoint.coordination import Coordinator
from espalier.checkpoint.in_memory import CopyOptions, CopySlot, Memory, salvage, take_up
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.tensor_slice import Slice
from espalier.machine import resource_limits
from many_ranks import forks


class Part:
    """Something with tensors, numbers and text."""

    def __init__(self, seed=0, size=1000):
        generator = torch.Generator().manual_seed(seed)
        self.state = {
            "weights": torch.rand(size, generator=generator),
            "table": {3: torch.rand(7, 5, generator=generator).to(torch.bfloat16), "step": seed},
            "scalar": torch.tensor(float(seed), dtype=torch.float64),
            "words": ["a", seed, None],
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def equal(one, other):
    return (
        torch.equal(one.state["weights"], other.state["weights"])
        and torch.equal(one.state["table"][3], other.state["table"][3])
        and torch.equal(one.state["scalar"], other.state["scalar"])
        and one.state["words"] == other.state["words"]
        and one.state["table"]["step"] == other.state["table"]["step"]
    )


@pytest.fixture
def own():
    refuges = shared_memory.build(1, 1 << 20)
    yield refuges[0]
    shared_memory.release(refuges)


def memory(own, told=None):
    return Memory(own, Coordinator(None), lambda every, why: None if told is None else told.append((every, why)))


def alone(values):
    """The mean over one rank."""


def keep(kept, step):
    kept._due = 0
    kept.after(step, lambda: {"part": Part(step)}, {"step": step, "tokens": 10 * step}, alone)


def test_a_copy_survives_the_process_that_made_it(own):
    pid = os.fork()
    if pid == 0:
        try:
            keep(memory(own), 7)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    found, part = memory(own), Part(99)
    assert found.newest() == 7
    assert found.take(7, {"part": part}) == {"step": 7, "tokens": 70}
    assert equal(part, Part(7))


def test_later_changes_do_not_reach_a_copy(own):
    kept, part = memory(own), Part(3)
    kept.after(3, lambda: {"part": part}, {}, alone)
    part.state["weights"].zero_()
    part.state["words"][1] = "changed"
    found = Part(0)
    kept.take(3, {"part": found})
    assert equal(found, Part(3))


def test_two_copies_take_turns_and_the_newest_is_found(own):
    kept = memory(own)
    for step in range(1, 6):
        keep(kept, step)
        assert kept.newest() == step
        assert sorted(slot.step for slot in kept._slots) == sorted({step, max(step - 1, -1) or -1})


@pytest.mark.parametrize("place", [4096, 4096 + 500, 20, -1])
def test_one_flipped_byte_and_the_copy_before_is_taken(own, place):
    kept = memory(own)
    keep(kept, 4)
    keep(kept, 5)
    newest = next(slot for slot in kept._slots if slot.step == 5)
    where = newest._header()[2] - 1 if place == -1 else place
    byte = os.pread(newest.file, 1, where)[0]
    os.pwrite(newest.file, bytes([byte ^ 1]), where)
    assert kept.newest() == 4
    found = Part(0)
    kept.take(4, {"part": found})
    assert equal(found, Part(4))


def test_a_copy_broken_off_is_none(own):
    kept = memory(own)
    keep(kept, 4)
    plain = CopySlot._digest
    try:
        CopySlot._digest = lambda slot, end: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            keep(kept, 5)
    finally:
        CopySlot._digest = plain
    assert memory(own).newest() == 4


def test_a_rank_alone_has_one_copy_and_where_that_broke_off_it_goes_on_from_the_disk(tmp_path):
    assert (shared_memory.slots(1), shared_memory.slots(2), shared_memory.slots(8)) == (1, 2, 2)
    (own,) = shared_memory.build(1, 1 << 20, shared_memory.slots(1))
    saved = Checkpoints(tmp_path)
    saved.save(2, {"part": Part(2)}, {"step": 2, "tokens": 20}, wait=True)
    kept = memory(own)
    for step in (3, 4):
        keep(kept, step)
    pid = os.fork()
    if pid == 0:
        CopySlot._digest = lambda slot, end: os.kill(os.getpid(), signal.SIGKILL)  # all is written but the header
        keep(memory(own), 5)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    found = Part(0)
    loaded, source = take_up(memory(own), saved, {"part": found})
    assert (loaded.step, source) == (2, "disk (nothing whole is in memory)")
    assert equal(found, Part(2))
    keep(kept, 6)
    loaded, source = take_up(memory(own), saved, {"part": found})
    assert (loaded.step, source) == (6, "memory (the newest on disk is of step 2)")
    assert equal(found, Part(6))
    shared_memory.release([own])


def test_copies_that_would_take_more_than_allowed_are_not_made():
    refuges, told = shared_memory.build(1, 5000), []
    kept = memory(refuges[0], told)
    keep(kept, 1)
    keep(kept, 2)
    assert kept.newest() == -1
    assert [every for every, _ in told] == [0]
    assert "faults.memory" in told[0][1]
    assert sum(os.fstat(file).st_size for file in refuges[0].files) == 0
    shared_memory.release(refuges)


def test_what_is_not_said_is_a_part_of_a_quarter_of_what_is_free():
    refuges = shared_memory.build(3, None)
    assert 0 < refuges[0].allowed() <= resource_limits.free_memory() // 4 // 3 * 1.2
    assert shared_memory.build(2, 1000)[1].allowed() == 500
    shared_memory.release(refuges)


def test_a_part_of_another_shape_takes_nothing_and_stays_as_it_was(own):
    kept, other = memory(own), Part(1, size=999)
    keep(kept, 4)
    assert kept.take(4, {"part": other}) is None
    assert equal(other, Part(1, size=999))


def saved_at(folder, step):
    saved = Checkpoints(folder)
    saved.save(step, {"part": Part(step)}, {"step": step, "tokens": 0}, wait=True)
    return saved


@pytest.mark.parametrize(
    ("disk", "copy", "taken"), [(3, 5, "memory"), (5, 5, "memory"), (6, 5, "disk"), (3, 0, "disk")]
)
def test_the_newest_good_state_is_taken_up_and_it_is_said_which(own, tmp_path, disk, copy, taken):
    saved, kept, part = saved_at(tmp_path, disk), memory(own), Part(0)
    if copy:
        keep(kept, copy)
    loaded, where = take_up(kept, saved, {"part": part})
    assert loaded.step == max(disk, copy)
    assert where.startswith(taken)
    assert equal(part, Part(loaded.step))


def test_copies_of_an_attempt_that_is_given_up_are_forgotten(own, tmp_path):
    saved, kept = saved_at(tmp_path, 3), memory(own)
    keep(kept, 5)
    keep(kept, 6)
    kept.begin(4)
    assert kept.newest() == -1
    loaded, where = take_up(kept, saved, {"part": Part(0)})
    assert (loaded.step, where) == (3, "disk (nothing whole is in memory)")


def test_nothing_saved_anywhere_is_a_fresh_start(own, tmp_path):
    assert take_up(memory(own), Checkpoints(tmp_path), {"part": Part(0)}) == (None, "")
    assert take_up(None, Checkpoints(tmp_path), {"part": Part(0)}) == (None, "")


# --- copies that outlive all ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("disk", "saved_step"), [(3, 5), (5, -1), (6, -1)])
def test_the_newest_copy_becomes_a_checkpoint_where_none_is_as_new(own, tmp_path, disk, saved_step):
    saved, kept, part = saved_at(tmp_path, disk), memory(own), Part(0)
    keep(kept, 4)
    keep(kept, 5)
    assert salvage([own], saved) == saved_step
    loaded = Checkpoints(tmp_path).load({"part": part})
    assert loaded.step == max(disk, 5)
    assert equal(part, Part(loaded.step))
    assert loaded.meta["step"] == loaded.step


def test_without_a_whole_copy_nothing_is_saved(own, tmp_path):
    assert salvage([own], Checkpoints(tmp_path)) == -1
    slot = CopySlot(own.files[0])
    keep(memory(own), 4)
    slot.content()[-1] ^= 1
    assert salvage([own], Checkpoints(tmp_path)) == -1
    assert Checkpoints(tmp_path).newest() == -1


def test_what_a_rank_holds_flat_has_its_shape_again_in_the_checkpoint(own, tmp_path):
    value = torch.arange(12.0).reshape(3, 4)
    flat = Part()
    flat.state = {"weight": Slice(value.flatten(), value.shape, 0)}
    memory(own).after(7, lambda: {"part": flat}, {"step": 7, "report": {"loss": 1.0}}, alone)
    assert salvage([own], Checkpoints(tmp_path)) == 7
    plain = Part()
    plain.state = {"weight": torch.zeros(3, 4)}
    loaded = Checkpoints(tmp_path).load({"part": plain})
    assert torch.equal(plain.state["weight"], value)
    assert loaded.meta == {"step": 7}


# --- copies of other ranks --------------------------------------------------------------------------------------------


def _several(channel, refuges, having, damaged):
    """Ranks with copies of these steps; one of those copies is spoilt. What each then takes up."""
    rank = channel.rank()
    kept = Memory(
        refuges[rank], Coordinator(dist.new_group(backend="gloo")), lambda every, why: None, kin=CopyOptions("alike")
    )
    for step in having[rank]:
        kept._oldest().write(step, *_flat(step))
        kept._newest = step
    if damaged is not None and damaged[0] == rank:
        slot = next(one for one in kept._slots if one.step == damaged[1])
        os.pwrite(slot.file, b"\xff\x00\xff", 5000)
    step, part = kept.newest(), Part(99)
    meta = kept.take(step, {"part": part})
    return step, meta, meta is not None and equal(part, Part(step))


def _flat(step):
    tensors, skeletons = state_tree.flatten({"part": Part(step)})
    return tensors, (skeletons, {"step": step})


@pytest.mark.parametrize(
    ("having", "damaged", "newest"),
    [
        (((4, 5), (4,), ()), None, 5),
        (((), (3, 4), (5, 6)), None, 6),
        (((4, 5), (4, 5), (4, 5)), (1, 5), 5),
        (((4, 5), (4,), ()), (0, 5), 4),
    ],
)
def test_where_ranks_are_alike_one_without_a_copy_is_sent_one(having, damaged, newest):
    torch.set_num_threads(1)
    refuges = shared_memory.build(3, 3 << 20)
    try:
        found = forks(3, _several, refuges, having, damaged)
    finally:
        shared_memory.release(refuges)
    assert found == [(newest, {"step": newest}, True)] * 3


def _spoilt(channel, refuges):
    """Rank 1 is sent a copy that does not arrive as it was."""
    rank = channel.rank()
    kept = Memory(
        refuges[rank], Coordinator(dist.new_group(backend="gloo")), lambda every, why: None, kin=CopyOptions("alike")
    )
    if rank == 0:
        kept._slots[0].write(4, *_flat(4))
    elif rank == 1:
        kept._oldest().good = lambda: False
    return kept.take(4, {"part": Part(99)})


def test_a_copy_that_arrives_damaged_is_taken_by_nobody():
    torch.set_num_threads(1)
    refuges = shared_memory.build(2, 2 << 20)
    try:
        assert forks(2, _spoilt, refuges) == [None, None]
    finally:
        shared_memory.release(refuges)


def test_a_rank_that_stays_keeps_the_state_as_it_is_where_all_are_alike(own):
    alike = Memory(own, Coordinator(None), lambda every, why: None, kin=CopyOptions("alike"))
    keep(alike, 4)
    alike.stay(5, lambda: {"part": Part(5)}, {"step": 5})
    assert alike.newest() == 5
    other = memory(own)
    other.stay(9, lambda: {"part": Part(9)}, {"step": 9})
    assert other.newest() == 5
