"""A run planned again: fewer places, measured speeds. The batch is always shared whole and in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.plan import build_plan, replan, search
from espalier.plan.request import Request
from espalier.recipe import Pin, defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe


def request(samples: int = 32, **more: object) -> Request:
    table = {
        "model": {"depth": 2, "width": 128, "heads": 4, "vocabulary": 512},
        "train": {"steps": 10, "sequence": 64, "batch_tokens": 64 * samples},
    }
    made = request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0])
    return made.changed(**{"precision": "fp32", **more})


def machine(cores: int = 4, gpus: int = 0) -> clusters.Cluster:
    if gpus:
        return clusters.loads(
            f'[[nodes]]\ndevice = "A100-80GB"\ndevices = {gpus}\ncores = 64\nmemory = "512GiB"\ninside = "300GB/s"'
        )
    return clusters.loads(f'[[nodes]]\ndevice = "cpu"\ncores = {cores}\nmemory = "8GiB"')


def planned(asked: Request, cluster: clusters.Cluster, ranks: int) -> plans.Plan:
    asked = asked.changed(pin=Pin(ranks=ranks, threads=1))
    found = search.search(asked, cluster)
    option = found.best(lambda one: one.layout.optimizer == 1 and one.layout.tp * one.layout.sp * one.layout.pp == 1)
    assert option is not None
    return build_plan.make(asked, found, option)


def shares(plan: plans.Plan) -> list[int]:
    return [rank.share[1] - rank.share[0] for rank in plan.ranks]


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(5, 40), st.booleans(), st.data())
def test_the_batch_stays_whole_and_in_order_on_any_places_that_are_left(ranks, samples, on_gpus, data):
    asked, cluster = request(samples), machine(gpus=6 if on_gpus else 0)
    plan = planned(asked, cluster, ranks)
    slower = tuple(data.draw(st.lists(st.sampled_from([1.0, 1.0, 2.0, 5.0]), min_size=ranks, max_size=ranks)))
    kept = sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
    made = replan.plan_on(asked, cluster, plan, kept, replan.Speeds(slower))
    plans.check(made, samples)
    assert [rank.device for rank in made.ranks] == [plan.ranks[rank].device for rank in kept]
    assert (made.micro_batch, made.recompute) == (min(plan.micro_batch, max(shares(made))), plan.recompute)


def test_a_slow_rank_gets_less_and_the_step_shorter_by_the_model():
    asked, cluster = request(), machine()
    plan = planned(asked, cluster, 4)
    found = replan.speeds(asked, cluster, plan, [0.1, 0.1, 0.4, 0.11])
    assert found.slower == pytest.approx((1.0, 1.0, 4.0, 1.0))
    best = replan.options(asked, cluster, plan, found)[0]
    given = dict(zip(best.remaining, shares(best.plan), strict=True))
    assert given.get(2, 0) < 4 < given[0]
    assert best.ratio < 0.5
    assert replan.seconds(asked, cluster, plan, found) > 2 * replan.seconds(asked, cluster, plan, replan.equal(plan))


def test_a_rank_that_hardly_goes_on_is_left_out():
    asked, cluster = request(8), machine()
    plan = planned(asked, cluster, 4)
    best = replan.options(asked, cluster, plan, replan.Speeds((1.0, 50.0, 1.0, 1.0)))[0]
    assert best.remaining == (0, 2, 3)


def test_where_nothing_is_slow_no_plan_is_much_faster():
    asked, cluster = request(), machine(gpus=4)
    plan = planned(asked, cluster, 4)
    assert all(one.ratio > 0.97 for one in replan.options(asked, cluster, plan, replan.equal(plan)))


def test_a_link_that_has_become_slow_leads_to_fewer_ranks():
    asked, cluster = request(), machine(gpus=4)
    plan = planned(asked, cluster, 4)
    now = replan.seconds(asked, cluster, plan, replan.equal(plan))
    found = replan.with_link(asked, cluster, plan, replan.equal(plan), 20 * now)
    assert replan.seconds(asked, cluster, plan, found) == pytest.approx(21 * now, rel=0.01)
    assert replan.options(asked, cluster, plan, found)[0].remaining == (0,)


def test_what_fewer_cannot_hold_or_share_is_refused_by_name():
    asked, cluster = request(), machine()
    plan = planned(asked, cluster, 4)
    with pytest.raises(UserError, match="3 ranks cannot hold this run"):
        replan.plan_on(asked.changed(memory=1e5), cluster, plan, [0, 1, 2], replan.equal(plan))
    with pytest.raises(UserError, match="cannot be shared by 0 ranks"):
        replan.plan_on(asked, cluster, plan, [], replan.equal(plan))


def on_nodes(samples: list[int], roles: tuple[str, ...] = ("optimizer",)) -> plans.Plan:
    cuts = [sum(samples[:one]) for one in range(len(samples) + 1)]
    workers = (plans.Rank(share=(cuts[one], cuts[one + 1])) for one in range(len(samples)))
    return plans.Plan(ranks=(*workers, *(plans.Rank(role=role) for role in roles)), micro_batch=2)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(5, 40), st.booleans(), st.data())
def test_workers_of_optimizer_nodes_share_the_batch_anew_and_their_nodes_stay(workers, samples, standby, data):
    roles = ("optimizer", "standby") if standby else ("optimizer",)
    plan = on_nodes([samples // workers] * (workers - 1) + [samples - samples // workers * (workers - 1)], roles)
    own = data.draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=workers, max_size=workers))
    found = replan.speeds(request(samples), machine(), plan, own)
    assert found.slower[workers:] == (1.0,) * len(roles)
    kept = sorted(data.draw(st.sets(st.integers(0, workers - 1), min_size=1)))
    serving = [*range(workers, len(plan.ranks))]
    made = replan.plan_on(request(samples), machine(), plan, [*kept, *serving], found)
    plans.check(made, samples)
    assert made.ranks[len(kept) :] == plan.ranks[workers:]
    best = replan.seconds(request(samples), machine(), made, found.of([*kept, *serving]))
    for giving in range(len(kept)):  # no other share of a sample is better
        for taking in set(range(len(kept))) - {giving}:
            other = shares(made)[: len(kept)]
            other[giving], other[taking] = other[giving] - 1, other[taking] + 1
            if other[giving]:
                changed = on_nodes(other, roles)
                assert replan.seconds(request(samples), machine(), changed, found.of([*kept, *serving])) >= best


def test_a_slow_worker_of_an_optimizer_node_has_fewer_samples_or_is_left_out_and_the_node_never_is():
    plan = on_nodes([8, 8])
    asked, cluster = request(16), machine()
    best = replan.options(asked, cluster, plan, replan.speeds(asked, cluster, plan, [8.0, 24.0]))[0]
    assert best.remaining == (0, 1, 2)
    assert shares(best.plan) == [12, 4, 0]
    assert best.ratio == 0.5
    with pytest.raises(UserError, match=r"Rank 2 \(optimizer\) serves the others"):
        replan.plan_on(request(16), machine(), plan, [0, 1], replan.equal(plan))
