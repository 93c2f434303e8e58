"""Access plans: every position in one level, the disk budget kept exactly, pages counted as they will be read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.mechanisms.disk_batches import row_placement as access
from espalier.mechanisms.disk_batches.row_placement import AccessPlan, AccessSplit, Limits, Splitter
from espalier.recipe.errors import UserError

PAGE = 4096


@st.composite
def pools(draw):
    """(batches, nodes): duplicate seeds, empty batches and isolated nodes among them."""
    nodes = draw(st.integers(1, 60))
    ids = st.lists(st.integers(0, nodes - 1), max_size=40)
    batches = []
    for _ in range(draw(st.integers(0, 7))):
        one = list(dict.fromkeys(draw(ids)))
        batches.append(np.array(one[:1] + one, np.int64))  # the first seed is named twice
    return batches, nodes


def limits(nodes, hot=0, disk=None, row_bytes=512, ranges=1) -> Limits:
    bounds = np.linspace(0, nodes, ranges + 1).astype(np.int64)
    return Limits(hot, disk, row_bytes, bounds)


def splits(plan: AccessPlan, batches) -> list[AccessSplit]:
    splitter = Splitter(plan.hot, plan.segments, plan.length, plan.nodes)
    return [splitter.split(at, ids) for at, ids in enumerate(batches)]


def budgets(batches, nodes, hot):
    """A disk budget between the least that is possible and more than is used."""
    plan = access.plan(batches, nodes, limits(nodes, hot))
    waiting = [ids[~np.isin(ids, plan.hot)] for ids in batches]
    least = len(np.unique(np.concatenate([*waiting, np.zeros(0, np.int64)])))
    return least, sum(map(len, waiting)) + 1


@given(pools(), st.data())
def test_each_position_has_its_row_from_one_level(pool, data):
    batches, nodes = pool
    hot, row_bytes = data.draw(st.integers(0, nodes)), data.draw(st.sampled_from((4, 100, 512, 5732, 8200)))
    disk = data.draw(st.none() | st.integers(*budgets(batches, nodes, hot)))
    plan = access.plan(batches, nodes, limits(nodes, hot, disk, row_bytes, data.draw(st.integers(1, 4))))
    for at, (ids, one) in enumerate(zip(batches, splits(plan, batches), strict=True)):
        positions = np.concatenate([one.hot_at, one.shared_at, one.cold_at])
        assert np.array_equal(np.sort(positions), np.arange(len(ids)))
        assert np.array_equal(plan.hot[one.hot_slots], ids[one.hot_at])
        assert np.array_equal(plan.segments[at // plan.length][one.shared_slots], ids[one.shared_at])
        assert (np.diff(ids[one.cold_at]) > 0).all()  # ascending, each once
        assert (len(one.shared_at), len(one.cold_at)) == (plan.shared[at], plan.cold[at])
        touched = {page for slot in one.shared_slots for page in pages(int(slot), row_bytes)}
        own = {page for slot in range(len(one.cold_at)) for page in pages(slot, row_bytes)}
        assert plan.pages[at] == len(touched) + len(own)
    assert disk is None or plan.disk_rows <= disk


def pages(slot: int, row_bytes: int) -> range:
    return range(slot * row_bytes // PAGE, ((slot + 1) * row_bytes - 1) // PAGE + 1)


@given(pools(), st.data())
def test_the_segment_search_equals_brute_force(pool, data):
    batches, nodes = pool
    stored = access.stored_rows(batches, len(batches), nodes)
    brute = [0]
    for length in range(1, len(batches) + 1):
        segments = [batches[at : at + length] for at in range(0, len(batches), length)]
        brute.append(sum(len(np.unique(np.concatenate(segment))) for segment in segments))
    assert stored.tolist() == brute
    if not batches:
        return
    budget = data.draw(st.integers(0, max(brute) + 1))
    fitting = [length for length in range(1, len(brute)) if brute[length] <= budget]
    if fitting:
        assert access.segment_length(stored, limits(nodes, disk=budget)) == min(fitting)
        plan = access.plan(batches, nodes, limits(nodes, disk=budget))
        assert plan.length == min(fitting)
        assert plan.disk_rows == brute[plan.length]
    else:
        with pytest.raises(UserError, match=f"{min(brute[1:]):,} different rows"):
            access.segment_length(stored, limits(nodes, disk=budget))


@given(pools(), st.data())
def test_the_rows_in_memory_are_the_most_used(pool, data):
    batches, nodes = pool
    uses = np.zeros(nodes, np.int64)
    for ids in batches:
        uses[np.unique(ids)] += 1
    plan = access.plan(batches, nodes, limits(nodes, data.draw(st.integers(0, nodes))))
    outside = np.setdiff1d(np.arange(nodes), plan.hot)
    assert (np.diff(uses[plan.hot]) <= 0).all()
    assert uses[outside].max(initial=0) <= uses[plan.hot].min(initial=len(batches) + 1)
    assert (uses[plan.hot] > 0).all()


@given(pools(), st.integers(1, 5))
def test_rows_of_an_extent_are_in_the_order_of_their_ranges(pool, ranges):
    batches, nodes = pool
    disk = budgets(batches, nodes, 0)[0] if batches else None
    chosen = limits(nodes, 0, disk, ranges=ranges)
    for ids in access.plan(batches, nodes, chosen).segments:
        assert (np.diff(np.searchsorted(chosen.ranges, ids, side="right")) >= 0).all()


def test_without_a_disk_budget_no_row_is_shared():
    batches = [np.arange(10), np.arange(5, 15)]
    plan = access.plan(batches, 20, limits(20))
    assert plan.length == 1
    assert not any(map(len, plan.segments))
    assert plan.cold.tolist() == [10, 10]


def overlapping(kind: str, groups: int = 12, rows: int = 400) -> list:
    """`groups` sets of rows, each used by 3 batches (known overlap), or every row by a random pair of batches."""
    random = np.random.default_rng(3)
    order = random.permutation(groups * rows)
    if kind == "groups":
        users = [random.choice(groups, 3, replace=False) for _ in range(groups)]
        return [
            np.sort(np.concatenate([order[g * rows : (g + 1) * rows] for g in range(groups) if b in users[g]]))
            for b in range(groups)
            if any(b in one for one in users)
        ]
    return [np.sort(order)] * 4  # all batches use all rows


def test_rows_have_the_same_minhash_as_often_as_their_batches_are_the_same():
    """Half of the four batches of the first two rows are common to both, none with the third row, all with the last."""
    uses = [np.array(used) for used in ([0, 1, 3], [0, 1, 3], [0, 3], [1], [2])]
    first = np.array([access._minhash(uses, 4, seed) // len(uses) for seed in range(400)])
    equal = (first == first[:, :1]).mean(0)
    assert equal[1] == pytest.approx(0.5, abs=0.08)
    assert (equal[2], equal[3]) == (0, 1)


@pytest.mark.parametrize("ranges", [1, 3])
def test_minhash_reads_few_pages_where_batches_overlap(ranges):
    batches = overlapping("groups")
    ids = np.unique(np.concatenate(batches))
    uses = [np.searchsorted(ids, one) for one in batches]
    chosen = limits(len(ids), ranges=ranges)
    random = access._reads(np.random.default_rng(0).permutation(len(ids)), uses, chosen)
    minhash = access._reads(
        np.lexsort((access._minhash(uses, len(ids), 0), np.searchsorted(chosen.ranges, ids, side="right"))),
        uses,
        chosen,
    )
    best, name = access.page_order(uses, ids, chosen)
    assert minhash <= 0.6 * random
    assert access._reads(best, uses, chosen) <= minhash
    assert name in ("minhash", "rcm++")


def test_no_order_reads_fewer_pages_where_there_is_no_overlap_to_find():
    batches = overlapping("all")
    ids = batches[0]
    uses = [np.arange(len(ids))] * len(batches)
    random = access._reads(np.random.default_rng(0).permutation(len(ids)), uses, limits(len(ids)))
    assert access._reads(np.argsort(access._minhash(uses, len(ids), 0)), uses, limits(len(ids))) == random
    assert access.page_order(uses, ids, limits(len(ids)))[1] == "ids"
