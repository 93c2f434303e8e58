"""Who holds which tokens, and which blocks of attention lie between two slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.parallel.sequence_slots import SequenceSlots, bounds_of, shares_of
from espalier.recipe.errors import UserError


@st.composite
def some_slots(draw: st.DrawFn) -> SequenceSlots:
    context, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    length = draw(st.integers(4 * context * heads, 90))
    shares = draw(st.sampled_from([(), tuple(1.0 + 0.5 * (slot % 2) for slot in range(context))]))
    return SequenceSlots(length, context, heads, draw(st.booleans()), shares)


@st.composite
def bounds(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    inside = draw(st.sets(st.integers(1, length - 1), max_size=6))
    return (0, *sorted(inside), length)


@given(some_slots())
def test_every_token_is_held_once_and_comes_back_to_its_place(slots: SequenceSlots) -> None:
    whole = torch.arange(slots.length).repeat(2, 1)
    parts = [slots.take(whole, number) for number in range(slots.context * slots.heads)]
    assert torch.equal(slots.join(parts), whole)
    assert [part.shape[1] for part in parts] == [n for slot in range(slots.context) for n in slots.pieces(slot)]
    assert all(np.array_equal(part[0].numpy(), slots.index(number)) for number, part in enumerate(parts))


@settings(max_examples=80)
@given(st.data(), some_slots())
def test_blocks_are_the_mask_each_entry_once_and_nothing_else(data: st.DataObject, slots: SequenceSlots) -> None:
    row = data.draw(bounds(slots.length))
    labels = np.searchsorted(row, np.arange(slots.length), "right")
    mask = (labels[:, None] == labels[None, :]).astype(int)
    if slots.causal:
        mask = np.tril(mask)
    order = [np.concatenate([np.arange(*one) for one in slots.ranges(slot)]) for slot in range(slots.context)]
    found = np.zeros_like(mask)
    for slot in range(slots.context):
        for other in range(slots.context):
            needed = slots.needed(other, [slot], (row,))
            for q0, q1, k0, k1, causal in slots.blocks(slot, other, row):
                assert k1 - k0 == q1 - q0 or not causal
                assert any(start <= k0 and k1 <= stop for start, stop in needed)
                block = np.ones((q1 - q0, k1 - k0), int)
                np.add.at(found, np.ix_(order[slot][q0:q1], order[other][k0:k1]), np.tril(block) if causal else block)
    assert np.array_equal(found, mask)


def entries(slots: SequenceSlots, slot: int, other: int) -> int:
    """Scores that `slot` computes on the keys of `other`."""
    total = 0
    for q0, q1, k0, k1, causal in slots.blocks(slot, other, (0, slots.length)):
        total += (q1 - q0) * (q1 - q0 + 1) // 2 if causal else (q1 - q0) * (k1 - k0)
    return total


@pytest.mark.parametrize("context", [2, 3, 8])
def test_zigzag_slots_do_the_same_work_at_every_step(context: int) -> None:
    slots = SequenceSlots(64 * context, context)
    steps = [[entries(slots, slot, (slot - s) % context) for slot in range(context)] for s in range(context)]
    assert all(len(set(step)) == 1 for step in steps[1:])
    assert len(set(steps[0])) == 1


def test_work_is_proportional_to_the_speed_of_slots() -> None:
    slots = SequenceSlots(5000, 4, shares=(2.0, 1.0, 1.0, 1.0))
    work = np.array([sum(entries(slots, slot, other) for other in range(4)) for slot in range(4)])
    assert np.allclose(work / work.sum(), [0.4, 0.2, 0.2, 0.2], rtol=0.02)


def test_short_documents_need_no_keys_of_distant_slots() -> None:
    slots = SequenceSlots(64, 4, causal=False)
    row = tuple(range(0, 65, 16))
    assert all(slots.needed(owner, [slot], (row,)) == () for owner in range(4) for slot in range(4) if slot != owner)
    assert slots.needed(1, [0, 2], ((0, 40, 64),)) == ((0, 16),)


def test_a_sequence_shorter_than_its_slots_is_refused() -> None:
    with pytest.raises(UserError, match="5 tokens is too short for cp = 2 and hp = 3"):
        SequenceSlots(5, 2, 3)


def test_documents_of_another_length_and_torn_ones_are_refused() -> None:
    with pytest.raises(UserError, match="sequences have 8 tokens"):
        bounds_of(torch.zeros(1, 9, dtype=torch.long), 8)
    with pytest.raises(UserError, match="in several places"):
        bounds_of(torch.tensor([[0, 1, 1, 0]]), 4)


def test_shares_of_a_grid_are_those_of_its_ranks() -> None:
    slots, heads = shares_of((2.0, 1.0, 4.0, 2.0), heads=2)
    assert slots == (3.0, 6.0)
    assert heads[0] / heads[1] == pytest.approx(2.0)
    found = SequenceSlots(360, 2, 2, True, slots, heads)
    assert [found.pieces(slot) for slot in range(2)] == [[80, 40], [160, 80]]
    assert shares_of((), heads=2) == ((), ())
