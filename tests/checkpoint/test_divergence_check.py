"""Ranks that should hold the same: one flipped bit is noticed, and the rank is named where most agree."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from espalier.checkpoint import divergence_check, shared_memory
from espalier.checkpoint.coordination import Coordinator
from espalier.checkpoint.divergence_check import Alike
from espalier.checkpoint.in_memory import CopyOptions, Memory
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.recipe.errors import Corrupted, Diverged, PeerLost
from many_ranks import forks

WORLD = 3


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def state(flipped=-1):
    """Tensors of several types; the bit of that number is another."""
    made = {
        "weights": torch.arange(300, dtype=torch.float32).reshape(20, 15).T,  # does not lie in one piece
        "half": torch.linspace(-1, 1, 31).to(torch.bfloat16),
        "step": torch.tensor(3.0),
        "none": torch.empty(0),
    }
    for name, tensor in made.items():
        bits = 8 * tensor.nbytes
        if 0 <= flipped < bits:
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            flat[flipped // 8] ^= 1 << flipped % 8
            made[name] = flat.view(tensor.dtype).view(tensor.shape)
        flipped -= bits
    return made


BITS = 8 * sum(tensor.nbytes for tensor in state().values())


@given(st.integers(0, BITS - 1))
def test_any_flipped_bit_makes_another_hash(bit):
    assert divergence_check.digest(state(bit)) != divergence_check.digest(state())
    assert divergence_check.digest(state(bit)) == divergence_check.digest(state(bit))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_who_differs_from_most(given):
    odd, known = divergence_check.strangers(given)
    left = [one for rank, one in enumerate(given) if rank not in odd]
    assert len(set(left)) == 1
    assert known == (2 * len(left) > len(given))
    assert all(given.count(given[rank]) <= len(left) for rank in odd)
    assert all(given[rank] != left[0] for rank in odd)


def mean(values):
    dist.all_reduce(values)
    values /= dist.get_world_size()


def compared(channel, world, spoilt):
    """What each of them says, the ranks in `spoilt` holding something else, each its own."""
    rank = channel.rank()
    one = Alike(rank, world, mean)
    one.compare(state())
    try:
        one.compare(state(40 + rank if rank in spoilt else -1))
    except (Corrupted, PeerLost) as error:
        return type(error), error.what, one.good
    return None, "", one.good


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_odd_rank_is_named_where_most_agree(world):
    assert forks(world, compared, world, ()) == [(None, "", True)] * world
    for odd in range(world):
        found = forks(world, compared, world, (odd,))
        assert not any(good for *_, good in found)
        if world == 2:
            assert {kind for kind, *_ in found} == {Diverged}
            continue
        assert found[odd][0] is Corrupted
        assert f"Rank {odd} " in found[odd][1]
        assert {kind for rank, (kind, *_) in enumerate(found) if rank != odd} == {PeerLost}


def test_without_a_majority_nobody_is_named():
    assert {kind for kind, *_ in forks(4, compared, 4, (0, 1))} == {Diverged}


class Part:
    """Something whose state has one bit of `state` flipped, or none."""

    def __init__(self, flipped=-1):
        self.state = state(flipped)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def saved(channel, folder):
    rank = channel.rank()
    checkpoints = Checkpoints(folder, group=dist.new_group(backend="gloo"))
    checkpoints.alike = Alike(rank, WORLD, mean)
    checkpoints.save(1, {"part": Part()}, {}, wait=True)
    with pytest.raises((Corrupted, PeerLost)):
        checkpoints.save(2, {"part": Part(9 if rank == 1 else -1)}, {}, wait=True)
    return checkpoints.newest()


def test_what_differs_is_not_saved(tmp_path):
    assert forks(WORLD, saved, tmp_path) == [1] * WORLD


def copied(channel, refuges):
    rank = channel.rank()
    one = Alike(rank, WORLD, mean)
    team = Coordinator(dist.new_group(backend="gloo"))
    memory = Memory(refuges[rank], team, lambda every, why: None, CopyOptions("alike", alike=one))
    memory.after(1, lambda: {"part": Part()}, {}, mean)
    memory.stay(2, lambda: {"part": Part(9 if rank == 1 else -1)}, {})  # as when another rank is lost
    different = memory.newest()
    with pytest.raises((Corrupted, PeerLost)):
        memory.after(2, lambda: {"part": Part(9 if rank == 1 else -1)}, {}, mean)
    memory.begin(1)
    memory.stay(3, lambda: {"part": Part()}, {})  # what is known to be spoilt is not kept
    return different, memory.newest()


def test_what_differs_is_not_taken_up():
    refuges = shared_memory.build(WORLD, 1 << 22)
    try:
        assert forks(WORLD, copied, refuges) == [(1, 1)] * WORLD
    finally:
        shared_memory.release(refuges)
