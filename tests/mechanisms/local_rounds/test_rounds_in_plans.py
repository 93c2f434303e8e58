"""Rounds in a plan: the fewest steps that hide the exchange, replicas that share the batch, and when nothing does."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster, Link
from espalier.mechanisms.local_rounds import cost
from espalier.mechanisms.local_rounds import round_plan as co2
from espalier.mechanisms.local_rounds.choice import FIGURES
from espalier.mechanisms.local_rounds.co2 import chosen_of
from espalier.mechanisms.local_rounds.options import ByRounds, Co2, DiLoCo, Eager, LocalSgd
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan.base import Plan, dumps, loads
from espalier.plan.calibration import DATASHEET
from espalier.plan.decide import decide
from espalier.plan.refusals import DoesNotFit
from espalier.plan.request import Request
from espalier.recipe import (
    Auto,
    EveryStep,
    ShardPin,
    defaults,
    recipe_file,
    units,
)
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe


def asked(sync: Any, samples: int = 64, **pins: Any) -> Request:
    table = {
        "model": {"depth": 4, "width": 256},
        "data": {"path": "python:stdlib"},
        "train": {"steps": 10, "sequence": 128, "batch_tokens": samples * 128, "optimizer": {"kind": "adamw"}},
        "plan": {"pin": pins},
    }
    return request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0]).changed(sync=sync)


def office(between: str = "100Mbit/s", machines: int = 4, cores: int = 4) -> Cluster:
    return clusters.loads(
        f'[[nodes]]\ndevice = "cpu"\ncount = {machines}\ncores = {cores}\nmemory = "16GiB"\n[links]\n'
        f'between = {{ bandwidth = "{between}", latency = "5ms" }}'
    )


def planned(request: Request, cluster: Cluster) -> Plan:
    return decide(request, cluster, DATASHEET).taken


def test_a_round_is_the_shortest_that_hides_its_exchange() -> None:
    request = asked(Co2(codec="exact"))
    plan = planned(request, office())
    assert plan.replicas
    assert plan.predicted is not None
    local = plan.predicted.step_seconds
    flight = cost.flight_seconds(4.0 * request.profile.trainable, 4, Link(bandwidth=100e6 / 8, latency=5e-3))
    steps = plan.state(LocalRoundsState).steps
    assert (steps - 1) * local < 1.1 * flight <= steps * local * (1 + 1e-9)
    assert plan.predicted.terms["outer"] == 0
    assert [rule.name for rule in plan.rules] == ["sync.steps", "checkpoint.every", "mtbf"]
    assert any("local steps hide that in full precision" in sentence for sentence in plan.why)
    assert loads(dumps(plan)) == plan


@pytest.mark.sampled(1)
@pytest.mark.parametrize("between", ["30Mbit/s", "15Mbit/s", "5Mbit/s", "2Mbit/s"])
def test_the_mildest_codec_is_taken_with_which_rounds_are_not_long(between: str) -> None:
    names = ["exact", *co2.CODECS]
    plans = [planned(asked(Co2(codec=name)), office(between)) for name in names]
    lengths = [plan.state(LocalRoundsState).steps for plan in plans]
    assert lengths == sorted(lengths, reverse=True)
    short = [name for name, steps in zip(names, lengths, strict=True) if steps <= co2.LONG]
    chosen = planned(asked(Co2()), office(between))
    name = str(chosen.state(LocalRoundsState).settings.get("codec", "exact"))
    assert name == (short or names)[0 if short else -1]
    assert chosen.state(LocalRoundsState).steps == lengths[names.index(name)]
    assert any(f"with the differences as {name}" in sentence for sentence in chosen.why) == (name != "exact")
    (quality,) = (sentence for sentence in chosen.why if "learn less from each token" in sentence)
    assert (f"{name} rounds what travels" in quality) == (name != "exact")


def test_late_rounds_begin_with_some_at_once_and_a_plan_says_what_they_learn() -> None:
    request = asked(Co2(codec="exact", steps=2))  # 10 steps of the run are 5 rounds
    plan = planned(request, office())
    assert dict(plan.state(LocalRoundsState).settings) == {"warm": 1}
    (learns,) = (sentence for sentence in plan.why if "never chooses it" in sentence)
    assert "a run of 5 rounds: 1 at the beginning" in learns
    former = planned(request.changed(sync=Co2(codec="exact", steps=2, penalty="none", momentum=0.8)), office())
    settings = dict(former.state(LocalRoundsState).settings)
    assert settings == {"penalty": "none", "momentum": 0.8}
    assert chosen_of("co2", settings).momentum == 0.8
    assert not any("never chooses it" in sentence for sentence in planned(asked(Eager()), office()).why)


def test_replicas_share_the_batch_and_cut_their_optimizer_among_their_ranks() -> None:
    plan = planned(asked(Co2(), ranks=8), office())
    assert plan.replicas
    assert plan.replicas == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert [rank.node for rank in plan.ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    cuts = [rank.share for rank in plan.ranks]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == 64
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cuts))
    assert all(len(unit.optimizer) == 2 for unit in plan.units)


def test_a_slower_machine_takes_fewer_steps() -> None:
    mixed = clusters.loads(
        '[[nodes]]\ndevice = "A100-80GB"\ncount = 1\ndevices = 1\n[[nodes]]\ndevice = "V100-32GB"\ncount = 1\n'
        'devices = 1\n[links]\nbetween = "50Mbit/s"'
    )
    plan = planned(asked(Co2()).changed(compile=True, global_batch=8192), mixed)
    assert plan.replicas
    assert plan.state(LocalRoundsState).paces[0] == 1.0
    assert 0 < plan.state(LocalRoundsState).paces[1] < 0.9


def test_methods_that_wait_have_rounds_in_which_that_is_little() -> None:
    for options in (DiLoCo(codec="exact"), LocalSgd(codec="exact")):
        plan = planned(asked(options), office("1Gbit/s"))
        assert plan.predicted is not None
        assert 0 < plan.predicted.terms["outer"] <= 0.06 * plan.predicted.step_seconds


@pytest.mark.slow
def test_auto_takes_rounds_only_where_little_else_would_happen() -> None:
    assert not planned(asked(Auto()), office("10Gbit/s")).replicas
    assert planned(asked(Auto()), office("20Mbit/s")).replicas
    assert not planned(asked(EveryStep()), office("20Mbit/s")).replicas
    assert not planned(asked(Auto(), ranks=3), office("20Mbit/s", machines=3)).replicas, "64 samples are no thirds"


SITES = {
    "two sites": ("H100", 2, 8),
    "three sites": ("A100-80GB", 3, 8),
    "eight cards at home": ("RTX 3060", 8, 1),
}
SWEEP = [figure for figure in FIGURES if 2e7 <= 8 * figure <= 2e11]


def stands(plan: Plan) -> tuple[bool, str]:
    """Whether rounds were chosen, and below which bandwidth they are said to pay; empty: that is not said."""
    said = [found[1] for sentence in plan.why if (found := re.search(r"times on, here (.*)\.$", sentence))]
    assert len(said) <= 1
    return bool(plan.replicas), said[0] if said else ""


@pytest.mark.parametrize(
    ("name", "every"), [("two sites", len(SWEEP)), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in SITES)]
)
def test_rounds_are_chosen_below_the_bandwidth_that_the_plan_names_and_at_no_other(name: str, every: int) -> None:
    device, machines, devices = SITES[name]
    request = shape("", Auto(), depth=12, width=1024, heads=16, samples=96 * machines)

    def at(bandwidth: float) -> tuple[bool, str]:
        return stands(planned(request, hosts(device, machines, devices, f"{8 * bandwidth:.0f}bit/s")))

    _, named = at(SWEEP[0])
    last, limit = (units.rate(words.replace(" ", "")) for words in re.findall(r"[\d.]+ [MG]bit/s", named))
    assert SWEEP.index(limit) == SWEEP.index(last) + 1
    sweep = {bandwidth: at(bandwidth) for bandwidth in {*SWEEP[::every], SWEEP[-1], last, 0.9 * limit, limit}}
    chosen = {bandwidth for bandwidth, (rounds, _) in sweep.items() if rounds}
    assert chosen - {0.9 * limit} == {bandwidth for bandwidth in sweep if bandwidth <= last}
    assert {words for bandwidth, (_, words) in sweep.items() if bandwidth != 0.9 * limit} == {named, ""}
    words = units.show_bits(0.9 * limit)
    assert sweep[0.9 * limit][1] == named.replace(units.show_bits(last if 0.9 * limit in chosen else limit), words)
    assert sweep[limit] == (False, named), "on a link that is slow, but not slow enough, the plan says so"
    assert sweep[SWEEP[-1]] == (False, "")


def test_machines_that_gain_nothing_together_are_never_said_to_gain_by_rounds() -> None:
    tiny = asked(Auto(), samples=4)
    chosen, words = stands(planned(tiny, office("1Mbit/s")))
    assert not chosen
    assert words in ("", "at no bandwidth")


@pytest.mark.parametrize(
    ("options", "cluster", "pins", "says"),
    [
        (Co2(), office(machines=1), {}, "needs two replicas"),
        (Co2(replicas=3), office(), {}, "sync.replicas = 3, and there are 4 machines"),
        (Co2(), office(machines=3), {}, "cannot be shared equally by 3 replicas"),
        (Co2(), office(), {"ranks": 6}, "plan.pin.ranks = 6 is no multiple of 4"),
        (Co2(codec="exact"), office("10kbit/s"), {}, "No round of up to 500 steps"),
    ],
)
def test_what_cannot_be_says_what_would(options: ByRounds, cluster: Cluster, pins: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        planned(asked(options, **pins), cluster)
    assert caught.value.do
    if "500" in says:
        assert "Mbit/s" in caught.value.do
        assert "batch" in caught.value.do


def test_steps_by_hand_say_what_stays_in_view() -> None:
    plan = planned(asked(Co2(steps=1, codec="exact")), office())
    assert plan.replicas
    assert plan.state(LocalRoundsState).steps == 1
    assert plan.predicted is not None
    assert plan.predicted.terms["outer"] > 0
    assert any("sync.steps = 1 leaves" in sentence for sentence in plan.why)


def test_settings_are_those_that_differ() -> None:
    assert co2.settings_of(Co2(momentum=0.8, clip=0.5), "exact") == {"clip": 0.5}
    assert co2.settings_of(Co2(momentum=0.2, penalty="none"), "exact") == {"penalty": "none"}
    assert co2.method_of(DiLoCo()) == "diloco"
    assert co2.sharded(asked(EveryStep()), 2).pin.shard == ShardPin(optimizer=2)
    kept = asked(EveryStep(), shard={"params": 1, "grads": 1})
    assert co2.sharded(kept, 2).pin.shard == ShardPin(params=1, grads=1, optimizer=2)


def test_a_penalty_by_tensors_is_refused_where_ranks_hold_pieces_of_them() -> None:
    assert planned(asked(Co2(penalty="per_tensor"), ranks=4), office()).replicas
    with pytest.raises(UserError, match=r"sync\.penalty = 'per_tensor' with replicas of 2 ranks"):
        planned(asked(Co2(penalty="per_tensor"), ranks=8), office())


# --- what rounds keep --------------------------------------------------------------------------------------------


def hosts(device: str = "A100-80GB", machines: int = 4, devices: int = 8, between: str = "100Mbit/s") -> Cluster:
    return clusters.loads(
        f'[[nodes]]\ndevice = "{device}"\ncount = {machines}\ndevices = {devices}\n[links]\nbetween = "{between}"'
    )


def shape(name: str, sync: Any, samples: int = 128, **sizes: Any) -> Request:
    """So many sequences of 2,048 tokens a step of a published shape, or of a decoder of such sizes."""
    table = {
        "model": sizes or {"shape": name},
        "data": {"path": "python:stdlib"},
        "train": {
            "sequence": 2048,
            "batch_tokens": samples * 2048,
            "precision": "bf16",
            "optimizer": {"kind": "adamw"},
        },
    }
    return request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0]).changed(sync=sync)


@pytest.mark.parametrize(
    "options", [Co2(), DiLoCo(steps=100), LocalSgd(steps=100), Eager(), Eager(codec="exact", steps=3000)]
)
def test_what_rounds_keep_is_part_of_the_peak_of_a_plan_that_fits(options: ByRounds) -> None:
    plan = planned(shape("llama-7b", options), hosts())
    assert plan.replicas
    assert plan.predicted is not None
    held = plan.predicted.memory_bytes
    assert held["peak"] == pytest.approx(sum(size for kind, size in held.items() if kind != "peak"))
    assert held["peak"] <= plan.predicted.memory_limit
    chosen = chosen_of(plan.state(LocalRoundsState).method, dict(plan.state(LocalRoundsState).settings))
    assert held["outer"] == pytest.approx(cost.copies(chosen, False) * 4 * 6_738_415_616 / 8, rel=0.01)
    assert any(f"{units.show_size(held['peak'])} of " in sentence for sentence in plan.why)


def test_rounds_whose_states_do_not_fit_are_refused_with_their_bytes() -> None:
    """Without what rounds keep, the same model fits on one machine."""
    assert planned(shape("llama-13b", EveryStep()), hosts(machines=1)).executable
    with pytest.raises(DoesNotFit, match="most of it outer") as caught:
        planned(shape("llama-13b", Co2()), hosts())
    assert "outer 48.5" in caught.value.why, "eight copies: x, momentum, the last update, five for a flight"
    assert caught.value.do.startswith('sync.kind="every_step", which keeps no outer states (')
    kept = planned(shape("llama-13b", Auto()), hosts())
    assert not kept.replicas
    assert kept.predicted is not None
    assert kept.predicted.memory_bytes["peak"] <= kept.predicted.memory_limit


def test_what_rounds_keep_waits_in_host_memory_where_cards_have_no_room_for_it() -> None:
    cards = '[[nodes]]\ndevice = "RTX 3060"\ncount = 8\nmemory = "{}"\n[links]\nbetween = "100Mbit/s"'
    table = {"model": {"shape": "gpt2-355m"}, "data": {"path": "python:stdlib"}, "train": {"sequence": 1024}}
    table["train"]["batch_tokens"] = 2**18
    request = request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0])
    plan = planned(request, clusters.loads(cards.format("32GiB")))
    assert len(plan.replicas) == 8
    assert plan.state(LocalRoundsState).settings == {"offload": True}
    assert plan.predicted is not None
    assert "outer" not in plan.predicted.memory_bytes
    chosen = chosen_of("eager", {"offload": True})
    expected = cost.copies(chosen) * 4 * request.profile.trainable
    assert plan.predicted.waiting_bytes["outer"] == pytest.approx(expected, rel=1e-6)
    assert any("what rounds keep" in sentence for sentence in plan.why)
    refused = planned(request, clusters.loads(cards.format("8GiB")))
    assert not refused.replicas
    assert any("Rounds keep" in sentence for sentence in refused.why)


def test_a_machine_is_a_replica_where_none_of_its_cards_can_hold_one() -> None:
    plan = planned(shape("", Auto(), depth=28, width=2048, heads=16), hosts("A10"))
    assert plan.replicas
    assert len(plan.replicas) == 4
    assert all(len(unit.optimizer) == 8 for unit in plan.units)
    assert plan.predicted is not None
    assert plan.predicted.memory_bytes["peak"] <= plan.predicted.memory_limit
    assert any("replicas agree by rounds, which pay from 3 times on, here up to " in said for said in plan.why)
    assert any("Over the link of 100 Mbit/s" in said for said in plan.why)


@pytest.mark.parametrize(("between", "shown"), [("10Mbit/s", "10.0 Mbit/s"), ("100Mbit/s", "100 Mbit/s")])
def test_a_link_that_is_too_slow_is_told_a_faster_one(between: str, shown: str) -> None:
    with pytest.raises(UserError, match=f"link of {shown}") as caught:
        planned(shape("llama-7b", DiLoCo()), hosts(between=between))
    (wanted,) = re.findall(r"a link of (\S+ [MG]bit/s)", caught.value.do)
    faster = units.rate(wanted.replace(" ", ""))
    assert faster > units.rate(between)
    assert planned(shape("llama-7b", DiLoCo()), hosts(between=f"{1.01 * 8 * faster}bit/s")).replicas
    assert ('sync.kind="eager"' in caught.value.do) == (between == "100Mbit/s")


@pytest.mark.parametrize(
    ("first", "count"), [(0, 6), *(pytest.param(first, 30, marks=pytest.mark.slow) for first in range(0, 240, 30))]
)
def test_a_plan_that_can_be_executed_never_exceeds_its_limit(first: int, count: int) -> None:
    """Outer states and buckets included; the sentence says what is counted. Of `count` drawn requests."""
    planned_ = rounds = 0
    for seed in range(first, first + count):
        draw = random.Random(seed)
        options = draw.choice([EveryStep(), Auto(), Co2(steps=50), Eager(steps=50), DiLoCo(steps=50)])
        sizes = {"depth": draw.choice([4, 12]), "width": draw.choice([512, 1024, 2048]), "heads": 8}
        device = draw.choice(["T4", "RTX 3060", "L4", "A100-80GB"])
        cluster = hosts(device, draw.choice([2, 4]), draw.choice([1, 2, 4]), draw.choice(["50Mbit/s", "10Gbit/s"]))
        try:
            plan = planned(shape("", options, **sizes), cluster)
        except UserError:
            continue
        assert plan.predicted is not None
        held = plan.predicted.memory_bytes
        assert plan.executable, seed
        assert held["peak"] == pytest.approx(sum(size for kind, size in held.items() if kind != "peak")), seed
        assert held["peak"] <= plan.predicted.memory_limit, seed
        assert ("outer" in held) == bool(plan.replicas), seed
        assert any(f"{units.show_size(held['peak'])} of " in sentence for sentence in plan.why), seed
        planned_ += 1
        rounds += bool(plan.replicas)
    assert planned_ >= count // 2
    assert rounds >= count // 6
