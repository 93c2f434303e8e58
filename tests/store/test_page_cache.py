"""Belady's cache: pages come back as they were, never more than the capacity, and no policy reads fewer."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.store.cost import PAGE
from espalier.store.page_cache import NEVER, PageCache, next_uses

sequences = st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6)


def page(key):
    return torch.full((PAGE,), key + 1, dtype=torch.uint8)


def reads(sequence, capacity):
    """Pages read in all, with what comes out compared."""
    cache, total = PageCache(capacity), 0
    lists = [np.array(sorted(one), np.int64) for one in sequence]
    for at, keys in enumerate(lists):
        out = torch.zeros(len(keys), PAGE, dtype=torch.uint8)
        held = cache.take(keys, out)
        for row in np.flatnonzero(~held):
            out[row] = page(int(keys[row]))
        total += int((~held).sum())
        assert all(torch.equal(row, page(int(key))) for row, key in zip(out, keys, strict=True))
        cache.keep(keys, out, lists[at + 1 :])
        assert len(cache.keys) <= capacity
    return total


def fewest(sequence, capacity):
    """Pages that the best of all policies reads, by trying all."""
    states = {frozenset(): 0}
    for keys in sequence:
        after: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            every = held | keys
            for kept in combinations(sorted(every), min(capacity, len(every))):
                state = frozenset(kept)
                after[state] = min(after.get(state, 1 << 30), cost + len(keys - held))
        states = after
    return min(states.values())


@given(sequences, st.integers(0, 4))
def test_no_policy_reads_fewer_pages(sequence, capacity):
    assert reads(sequence, capacity) == fewest(sequence, capacity)


@given(st.sets(st.integers(0, 20)), sequences)
def test_next_uses_are_the_first_that_hold_a_key(keys, future):
    found = next_uses(np.array(sorted(keys), np.int64), [np.array(sorted(one), np.int64) for one in future])
    for key, use in zip(sorted(keys), found.tolist(), strict=True):
        assert use == next((at for at, one in enumerate(future) if key in one), NEVER)
