"""Copies in memory are part of the memory that a plan foretells, and never make one impossible."""

from __future__ import annotations

import msgspec
import pytest
from asked import decoder, gpus, processor

from espalier import recipe as config
from espalier.plan import checkpoint_cost
from espalier.plan.ask import PlanDecision
from espalier.plan.base import Plan
from espalier.plan.decide import decide
from espalier.recipe import Faults, Pin, ShardPin, defaults
from espalier.train import request_from_recipe


def decided(given: int | str, ranks: int = 1, **more: object) -> PlanDecision:
    pin = Pin(ranks=ranks, threads=1, micro_batch=1)
    return decide(decoder(faults=Faults(memory=given), pin=pin, **more), processor(cores=2))


def held(plan: Plan) -> dict[str, float]:
    assert plan.predicted is not None
    return plan.predicted.memory_bytes


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 2)])
def test_copies_count_once_for_one_rank_and_twice_for_several(ranks: int, count: int) -> None:
    without, kept = held(decided(0, ranks).plan), held(decided("auto", ranks).plan)
    assert "copies" not in without
    assert kept["copies"] == count * (without["params"] + without["optimizer"]) > 0
    assert kept["peak"] == without["peak"] + kept["copies"]
    assert kept["peak"] == pytest.approx(sum(size for kind, size in kept.items() if kind != "peak"))


def test_copies_that_take_more_than_a_rank_may_use_are_left_out_and_that_is_said() -> None:
    without, found = decided(0, 2).plan, decided(1000, 2).plan
    assert held(found) == held(without)
    assert found.why[-1].startswith("No copies in memory: 2 copies of a rank's state")
    assert found.why[:-1] == without.why


def test_what_training_needs_comes_before_copies() -> None:
    big = decoder(pin=Pin(ranks=1, threads=1), faults=Faults(), width=512)
    peak = held(decide(big.changed(faults=Faults(memory=0)), processor()).taken)["peak"]
    tight = processor(memory=f"{int(peak / 0.89)}B")
    found = decide(big, tight).taken
    assert held(found) == held(decide(big.changed(faults=Faults(memory=0)), tight).taken)
    assert found.why[-1].startswith("No copies in memory")


def test_a_limit_set_by_hand_does_not_count_copies_and_the_plan_says_so() -> None:
    peak = held(decided(0).plan)["peak"]
    found = decided("auto", memory=peak + 1).taken
    assert held(found) == held(decided(0, memory=peak + 1).taken)
    assert found.why[-1].startswith("Copies in memory come on top of the peak")


def test_copies_beside_a_gpu_are_named_and_take_none_of_its_memory() -> None:
    asked = decoder()
    found, without = decide(asked.changed(faults=Faults()), gpus()).plan, decide(asked, gpus()).plan
    assert held(found) == held(without)
    assert "of the host's memory" in found.why[-1]


def test_a_rank_keeps_another_machine_s_part_where_states_are_cut() -> None:
    machines = processor(count=2)
    asked = decoder(faults=Faults(), pin=Pin(ranks=2, threads=2, shard=ShardPin(params=1, grads=1, optimizer=2)))
    cut = held(decide(asked, machines).plan)
    assert cut["copies"] == 4 * (cut["params"] + cut["optimizer"])
    replicated = msgspec.structs.replace(asked.pin, shard=ShardPin(params=1, grads=1, optimizer=1))
    whole = held(decide(asked.changed(pin=replicated), machines).plan)
    assert whole["copies"] == 2 * (whole["params"] + whole["optimizer"])


@pytest.mark.parametrize("given", ["auto", "2MiB", 0])
def test_a_recipe_s_faults_memory_is_what_is_priced(given: str | int) -> None:
    recipe = config.Recipe(
        model=config.Gpt(depth=1, width=32, heads=2, feed_forward=64, vocabulary=64),
        faults=config.Faults(memory=given),
    )
    request = request_from_recipe.of_recipe(defaults.resolve(recipe)[0])
    bytes_ = 2**21 if given == "2MiB" else given
    same = decide(request.changed(faults=config.Faults(memory=bytes_)), processor(cores=2)).plan
    assert decide(request, processor(cores=2)).plan == same
    assert any("(faults.memory)" in why for why in same.why) == (given != 0)


def test_a_plan_without_a_prediction_stays_as_it_is() -> None:
    assert checkpoint_cost.with_copies(Plan(), "auto", processor()) == Plan()


def test_a_checkpoint_is_written_from_a_copy_that_counts_and_training_waits_where_it_has_no_room() -> None:
    roomy = decide(decoder(pin=Pin(ranks=1, threads=1)), processor(cores=2)).plan
    sizes = held(roomy)
    assert sizes["staging"] == sizes["params"] + sizes["optimizer"] > 0
    assert sizes["peak"] == pytest.approx(sum(size for kind, size in sizes.items() if kind != "peak"))
    asked = decoder(pin=Pin(ranks=1, threads=1, micro_batch=1))
    without = held(decide(asked, processor(cores=2)).plan)
    limit = without["peak"] - without["staging"] / 2
    tight = decide(asked.changed(memory=limit), processor(cores=2)).taken
    assert held(tight)["staging"] == 0
    assert any(sentence.startswith("Training waits while a checkpoint is written") for sentence in tight.why)


def test_a_compiler_that_is_imported_counts() -> None:
    runtime = {
        mode: held(decide(decoder(pin=Pin(ranks=1, threads=1), recompute=mode), processor(cores=2)).plan)["runtime"]
        for mode in ("none", "block")
    }
    assert runtime["block"] - runtime["none"] == 66 * 2**20
