"""Which plan is shown and which is trained: measurements reach both, and machines that do not help are left out."""

from __future__ import annotations

import pytest

from espalier.machine import cluster as clusters
from espalier.plan import search
from espalier.plan.ask import PlanDecision
from espalier.plan.calibration import DATASHEET, Calibration
from espalier.plan.calibration_factors import CostFactors
from espalier.plan.decide import decide
from espalier.plan.request import Request
from espalier.recipe import EveryStep, Pin, ShardPin, defaults, recipe_file
from espalier.train import request_from_recipe

SLOW = Calibration(factors=CostFactors(product=3.0, attention=3.0, memory=3.0, issue=3.0), spread=0.07, rows=9)


def request(width: int = 256, samples: int = 64, **more: object) -> Request:
    table = {
        "model": {"depth": 4, "width": width, "heads": 4, "vocabulary": 512},
        "train": {"steps": 10, "sequence": 128, "batch_tokens": 128 * samples},
    }
    made = request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0])
    return made.changed(**{"precision": "fp32", **more})


def processors(count: int, between: str = "1Gbit/s", cores: int = 2) -> clusters.Cluster:
    return clusters.loads(
        f'[[nodes]]\ndevice = "cpu"\ncores = {cores}\nmemory = "8GiB"\ncount = {count}\n[links]\nbetween = "{between}"'
    )


def decided(
    cluster: clusters.Cluster, calibration: Calibration = DATASHEET, asked: Request | None = None
) -> PlanDecision:
    return decide(asked or request(), cluster, calibration)


def test_a_calibration_reaches_plans_of_processors() -> None:
    """Steps take three times as long, and the plan says how sure that is."""
    plain, slow = (decided(processors(1), calibration).taken for calibration in (DATASHEET, SLOW))
    assert plain.layout.shard == slow.layout.shard == {"params": 1, "grads": 1, "optimizer": 1}
    assert plain.predicted is not None
    assert slow.predicted is not None
    assert slow.predicted.step_seconds == pytest.approx(3 * plain.predicted.step_seconds, rel=0.01)
    assert (plain.predicted.spread, slow.predicted.spread) == (1.0, SLOW.spread), (
        "of an assumed processor, and of a measured one"
    )


def test_processors_behind_a_slow_network_are_left_out_where_all_agree_at_every_step() -> None:
    near, far = (
        decided(processors(4, between), asked=request(sync=EveryStep())) for between in ("10Gbit/s", "1Mbit/s")
    )
    assert {rank.node for rank in near.plan.ranks} == {0, 1, 2, 3}
    assert {rank.node for rank in far.plan.ranks} == {0}
    assert far.taken == far.plan, "what is shown is what is trained"
    assert max(rank.share[1] for rank in far.plan.ranks) == 64


def test_processors_behind_a_slow_network_agree_by_rounds() -> None:
    far = decided(processors(4, "10Mbit/s"))
    assert far.taken is not None
    assert far.taken.replicas
    assert {rank.node for rank in far.taken.ranks} == {0, 1, 2, 3}
    assert far.taken == far.plan


def test_slow_processors_are_left_out_of_mixed_machines() -> None:
    """The fastest machines first, by their numbers in the user's file."""
    kinds = "".join(f'[[nodes]]\ndevice = "cpu"\ncores = {cores}\nmemory = "8GiB"\ncount = 1\n' for cores in (1, 16))
    mixed = clusters.loads(kinds + '[links]\nbetween = "1Mbit/s"')
    assert {rank.node for rank in decided(mixed).plan.ranks} == {1}


def test_as_many_processors_as_are_allowed_and_no_more() -> None:
    asked = request(max_devices=2)
    found = search.search(asked, processors(4, "10Gbit/s"))
    assert {int(one.layout.world) for one in found.options} <= {1, 2, 4}
    assert {len(one.cluster.devices()) for one in found.options} == {1, 2}
    assert {rank.node for rank in decided(processors(4, "10Gbit/s"), asked=asked).plan.ranks} == {0, 1}


def test_over_slow_links_the_sharded_plan_is_best_and_taken() -> None:
    """States shard inside machines: each rank moves less, and what comes back crosses no slow link."""
    pinned = request(pin=Pin(ranks=4))
    machines = '[[nodes]]\nname = "{}"\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'
    links = '[links]\nbetween = { bandwidth = "200Mbit/s", latency = "2ms" }'
    found = decided(clusters.loads(machines.format("a") + machines.format("b") + links), asked=pinned)
    assert found.taken is not None
    assert found.taken is found.plan
    assert found.taken.planner == "search"
    assert found.taken.layout is not None
    assert found.taken.layout.shard == {"params": 1, "grads": 1, "optimizer": 2}
    assert [rank.node for rank in found.taken.ranks] == [0, 0, 1, 1]


def test_replicas_on_processors_of_different_speed_keep_their_samples_by_speed() -> None:
    host = (
        '[[nodes]]\nname = "host {0}"\ncores = 1\nmemory = "8GiB"\n[nodes.device]\nname = "{0}"\nkind = "cpu"\n'
        "memory = 8589934592\nmemory_bandwidth = {0}e10\nflops = {{ fp32 = {0}e10 }}\n"
    )
    links = '[links]\nbetween = { bandwidth = "10Gbit/s", latency = "50us" }'
    pinned = request(pin=Pin(ranks=2, shard=ShardPin(params=1, grads=1, optimizer=1)))
    taken = decided(clusters.loads(host.format(4) + host.format(1) + links), asked=pinned).taken
    assert taken is not None
    first, second = (rank.share[1] - rank.share[0] for rank in taken.ranks)
    assert first + second == 64
    assert first > 3 * second


def test_why_replicas_by_rounds_were_left_out_is_said() -> None:
    """Nobody asked for them, so a batch that they cannot share is no error."""
    far = decided(processors(3, "10Mbit/s"), asked=request(samples=64)).plan
    assert not far.replicas
    assert any(
        line.startswith("Rounds of local steps were left out: A batch of 64 samples cannot be shared equally")
        for line in far.why
    )
