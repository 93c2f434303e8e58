"""Offload beside the mechanisms that own, cut, save and compute again what waits elsewhere: no bit changes."""

import itertools
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.mechanisms.offload.optimizer import StateFolder
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted, UserError
from espalier.store.direct_io import DirectFile
from espalier.train import rank_spec as launch
from espalier.train import table, trainer, worker
from espalier.train.rank_setup import RankSetup

STEPS = 5
DISK = plans.Offload(optimizer="disk")


def recipe_of(corpus, **train):
    table = {
        "model": train.pop("model", {"depth": 2, "width": 32, "heads": 4, "feed_forward": 64}),
        "plan": train.pop("plan", {}),
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache"), "validation": 0.2},
        "train": {"steps": STEPS, "sequence": 32, "batch_tokens": 256, "validate_tokens": 256, "clip": 0.5}
        | {"optimizer": {"kind": "adamw"}}
        | train,
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(offload=DISK, ranks=1, shard=(), **changes):
    cuts = [8 * rank // ranks for rank in range(ranks + 1)]
    groups = [tuple(range(size)) if size > 1 else () for size in shard]
    unit = plans.Unit(**dict(zip(("params", "grads", "optimizer"), groups, strict=False)), whole=True)
    shares = tuple(plans.Rank(share=share) for share in itertools.pairwise(cuts))
    return plans.Plan(ranks=shares, units=(unit,), offload=offload, **{"micro_batch": 4} | changes)


def counted_by_the_kernel():
    """Bytes that this process has read from storage and written to it, once nothing is on its way."""
    time.sleep(0.05)
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return np.array([int(counts["read_bytes"]), int(counts["write_bytes"])])


def train(recipe, plan, folder=None, stop_after=None, kernel=lambda: None):
    """Of rank 0: (losses, parameters and optimizer states by name at the end, step events)."""
    workload = open_language(recipe)

    def life(place):
        events, saved = [], None

        def emit(event, **fields):
            if event == "step":
                events.append({**fields, "kernel": kernel()})

        with worker.joined(place, 90.0) as channel:
            one = trainer.Trainer(
                RankSetup(recipe, plan, workload, place, folder, emit, stop_after=stop_after), channel
            )
            if folder is not None:
                saved = Checkpoints(folder / "checkpoints", keep=2, group=worker.saving_group(channel))
                one.restore(saved)
            try:
                one.run(saved)
            except Interrupted:
                assert stop_after is not None
            if saved is not None:
                saved.wait()
            one.built.sharding.detach()  # all parameters are here
            kept = {name: value.clone() for name, value in one.built.model.state_dict().items()}
            return [fields["loss"] for fields in events], kept, events

    return agent.run(life, launch.places(plan))[0]


def same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("optimizer", "ranks", "shard"),
    [
        ("muon", 1, ()),
        ("adamw", 2, (1, 1, 2)),
        ("muon", 2, (2, 2, 2)),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("adamw", 1, ()),
                ("adamw", 2, ()),
                ("muon", 2, ()),
                ("muon", 2, (1, 1, 2)),
                ("adamw", 2, (2, 2, 2)),
            )
        ),
    ],
)
def test_states_on_disk_change_no_bit(corpus, optimizer, ranks, shard):
    recipe = recipe_of(corpus, optimizer={"kind": optimizer})
    resident = train(recipe, plan_of(plans.Offload(), ranks, shard))
    away = train(recipe, plan_of(DISK, ranks, shard))
    same(away, resident)
    assert all(fields["offload"]["disk"]["read"] > 0 for fields in away[2])


class SmallExtents(StateFolder):
    def __init__(self, *given):
        super().__init__(*given, chunk=1 << 14)


@OPTIMIZERS
def test_states_for_which_the_plan_has_memory_stay_there(corpus, optimizer, monkeypatch):
    monkeypatch.setattr("espalier.mechanisms.offload.mechanism.StateFolder", SmallExtents)
    recipe = recipe_of(corpus, optimizer={"kind": optimizer})
    resident = train(recipe, plan_of(plans.Offload()))
    moved = []
    for size in (0.0, 60e3, 1e9):
        predicted = plans.Predicted(1.0, 1.0, 1.0, 0.1, {}, {"peak": 1e8, "optimizer": size}, 1e8, {})
        away = train(recipe, plan_of(DISK, predicted=predicted))
        same(away, resident)
        moved.append(away[2][-1]["offload"]["disk"]["read"])
    assert moved[0] > moved[1] > moved[2] == 0


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_stopped_on_disk_and_resumed_in_memory_and_the_other_way_is_unbroken(corpus, tmp_path, optimizer):
    recipe = recipe_of(corpus, optimizer={"kind": optimizer})
    whole = train(recipe, plan_of(plans.Offload()))
    for first, second in itertools.product((DISK, plans.Offload()), repeat=2):
        folder = tmp_path / f"{first} then {second}".replace(" ", "-")
        folder.mkdir()
        before = train(recipe, plan_of(first), folder, stop_after=3)
        after = train(recipe, plan_of(second), folder)
        assert [*before[0], *after[0]] == whole[0]
        assert all(torch.equal(value, after[1][name]) for name, value in whole[1].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, (1, 1, 2)), (1, ()), marks=pytest.mark.slow),
        ((1, ()), (2, (2, 2, 2))),
        ((4, (1, 2, 4)), (3, (1, 1, 3))),
    ],
)
def test_resharded_on_disk_follows_the_curve_of_the_same_change_in_memory(corpus, tmp_path, before, after):
    recipe = recipe_of(corpus)
    found = []
    for offload in (DISK, plans.Offload()):
        folder = tmp_path / f"{offload.optimizer}"
        folder.mkdir()
        train(recipe, plan_of(offload, *before), folder, stop_after=3)
        found.append(train(recipe, plan_of(offload, *after), folder))
    same(*found)


@pytest.mark.parametrize("recompute", [pytest.param("block", marks=pytest.mark.slow), "selective"])
def test_beside_recomputation(corpus, recompute):
    recipe = recipe_of(corpus)
    same(train(recipe, plan_of(DISK, recompute=recompute)), train(recipe, plan_of(plans.Offload())))


ACTIVATIONS = plans.Offload(optimizer="disk", activations="disk")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tier", "ranks", "shard", "recompute"),
    [
        ("disk", 2, (2, 2, 2), "selective"),
        ("host", 1, (), "block"),
        *(
            pytest.param(tier, ranks, shard, recompute, marks=pytest.mark.slow)
            for tier in ("disk", "host")
            for ranks, shard in ((1, ()), (2, (2, 2, 2)))
            for recompute in ("block", "selective")
            if (tier, ranks, recompute) not in (("disk", 2, "selective"), ("host", 1, "block"))
        ),
    ],
)
def test_activations_elsewhere_change_no_bit_and_are_read_once(corpus, recompute, ranks, shard, tier):
    recipe = recipe_of(corpus, model=UNTIED)
    resident = train(recipe, plan_of(plans.Offload(), ranks, shard, recompute=recompute))
    away = train(recipe, plan_of(plans.Offload(activations=tier), ranks, shard, recompute=recompute))
    same(away, resident)
    rows = 2 * 8 // 2 // ranks  # samples of 32 tokens and 32 numbers, from two of three blocks
    for fields in away[2]:
        assert fields["activations"][tier]["read"] == fields["activations"][tier]["written"]
        assert fields["activations"][tier]["written"] == 2 * rows * 32 * 32 * 4


def test_a_disk_that_activations_fill_is_named_with_what_is_missing_and_the_run_goes_on(corpus, tmp_path):
    """The limit on file sizes stands for a small disk."""
    recipe, folder = recipe_of(corpus, model=UNTIED), tmp_path / "run"
    whole = train(recipe, plan_of(plans.Offload(), recompute="block"))
    away = plan_of(plans.Offload(activations="disk"), recompute="block")
    folder.mkdir()
    before = train(recipe, away, folder, stop_after=2)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(UserError, match=r"[\d,]+ bytes more"):
            train(recipe, away, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    after = train(recipe, away, folder)
    assert [*before[0], *after[0]] == whole[0]


def test_activations_wait_only_where_they_are_computed_again(corpus):
    with pytest.raises(UserError, match="recomputes activations"):
        table.ordered(recipe_of(corpus), plan_of(ACTIVATIONS))


PARAMETERS = plans.Offload(optimizer="disk", parameters="disk")
UNTIED = {"depth": 3, "width": 32, "heads": 4, "feed_forward": 64, "tied": False}


def alike(one, other):
    """The exchange adds up more than two ranks' gradients in an order that depends on where they lie in a unit."""
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=1e-4, atol=1e-5)


ON_HOST = plans.Offload(optimizer="host", parameters="host")
"""What is on a GPU's host; a processor copies within its memory, by the same code."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("away", "micro_batch", "ranks", "equal"),
    [
        pytest.param(PARAMETERS, 4, 2, same, marks=pytest.mark.slow),
        (PARAMETERS, 2, 2, same),
        (PARAMETERS, 2, 4, alike),
        (ON_HOST, 2, 2, same),
    ],
)
def test_parameters_elsewhere_of_several_ranks_change_no_bit_of_two(corpus, away, micro_batch, ranks, equal):
    recipe = recipe_of(corpus, model=UNTIED)
    resident = train(recipe, plan_of(plans.Offload(), ranks=ranks, micro_batch=micro_batch))
    equal(train(recipe, plan_of(away, ranks=ranks, micro_batch=micro_batch)), resident)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((PARAMETERS, 2), (PARAMETERS, 1), marks=pytest.mark.slow),
        ((plans.Offload(), 1), (PARAMETERS, 2)),
    ],
)
def test_parameters_on_disk_resharded_follow_the_curve_of_the_same_change_in_memory(corpus, tmp_path, before, after):
    recipe = recipe_of(corpus, model=UNTIED)
    found = []
    for away in (True, False):
        folder = tmp_path / f"{away}"
        folder.mkdir()
        first, second = ((one if away else plans.Offload(), ranks) for one, ranks in (before, after))
        train(recipe, plan_of(*first), folder, stop_after=3)
        found.append(train(recipe, plan_of(*second), folder))
    same(*found)


@pytest.mark.parametrize("micro_batch", [pytest.param(8, marks=pytest.mark.slow), 2])
def test_parameters_elsewhere_change_no_bit(corpus, micro_batch):
    recipe = recipe_of(corpus, model=UNTIED)
    resident = train(recipe, plan_of(plans.Offload(), micro_batch=micro_batch))
    same(train(recipe, plan_of(PARAMETERS, micro_batch=micro_batch)), resident)
    on_host = train(recipe, plan_of(ON_HOST, micro_batch=micro_batch))
    same(on_host, resident)
    assert all(fields["offload"]["host"]["read"] > 0 for fields in on_host[2])


@pytest.mark.parametrize(
    ("tier", "micro_batch", "ranks"),
    [
        ("host", 2, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("disk", 2, 2), ("host", 8, 1), ("disk", 1, 1))),
    ],
)
def test_parameters_and_activations_elsewhere_change_no_bit_and_are_read_once(corpus, tier, micro_batch, ranks):
    recipe = recipe_of(corpus, model=UNTIED)
    away = plans.Offload(optimizer=tier, parameters=tier, activations=tier)
    made = [train(recipe, plan_of(way, ranks, micro_batch=micro_batch)) for way in (away, plans.Offload())]
    same(*made)
    for fields in made[0][2]:
        moved = fields["activations"][tier]
        assert moved["read"] == moved["written"] == 2 * 8 // ranks * 32 * 32 * 4  # inputs of two of three blocks


@pytest.mark.slow
def test_parameters_elsewhere_are_saved_and_restored_like_those_in_memory(corpus, tmp_path):
    recipe = recipe_of(corpus, model=UNTIED)
    whole = train(recipe, plan_of(plans.Offload()))
    resident = plans.Offload()
    for first, second in ((PARAMETERS, resident), (resident, ON_HOST), (DISK, PARAMETERS), (ON_HOST, PARAMETERS)):
        folder = tmp_path / f"{first} then {second}".replace(" ", "-")
        folder.mkdir()
        before = train(recipe, plan_of(first), folder, stop_after=3)
        after = train(recipe, plan_of(second), folder)
        assert [*before[0], *after[0]] == whole[0]
        assert all(torch.equal(value, after[1][name]) for name, value in whole[1].items())


def test_parameters_on_disk_need_adamw(corpus):
    with pytest.raises(UserError, match="muon"):
        table.ordered(recipe_of(corpus, optimizer={"kind": "muon"}), plan_of(PARAMETERS))


def test_a_memory_that_holds_no_layer_is_refused_with_the_least(corpus):
    recipe = recipe_of(corpus, model=UNTIED, plan={"memory": "16KiB"})
    with pytest.raises(UserError, match=r"16\.0 KiB") as caught:
        train(recipe, plan_of(PARAMETERS))
    assert "at least" in str(caught.value.why)


def test_copies_in_memory_are_refused_where_the_recipe_asks_for_them(corpus):
    asked = defaults.resolve(recipe_file.from_table({"data": {"path": str(corpus)}, "faults": {"memory": "1GiB"}}))[0]
    with pytest.raises(UserError, match=r"faults\.memory and offload_optimizer|offload_optimizer and faults\.memory"):
        table.ordered(asked, plan_of())

    def brought(plan):
        return {one for made in table.chosen(recipe_of(corpus), plan) for one in made.claim.changes}

    assert "states are copied" not in brought(plan_of())
    assert "states are copied" in brought(plan_of(plans.Offload()))
    assert table.recovery(recipe_of(corpus), plan_of(ranks=2)) == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "offload",
    [DISK, pytest.param(PARAMETERS, marks=pytest.mark.slow), ACTIVATIONS],
    ids=["states", "parameters", "activations"],
)
def test_the_kernel_counts_the_bytes_that_steps_tell(corpus, tmp_path, offload):
    with DirectFile(tmp_path / "probe", "create") as probe:
        if not probe.direct:
            pytest.skip("the page cache would answer")
    recipe = recipe_of(corpus, model={**UNTIED, "width": 256, "feed_forward": 1024})
    plan = plan_of(offload, recompute="block" if offload == ACTIVATIONS else "none")
    events = train(recipe, plan, kernel=counted_by_the_kernel)[2]
    tiers = [fields[what]["disk"] for fields in events[1:] for what in ("offload", "activations") if what in fields]
    told = [sum(one[way] for one in tiers) for way in ("read", "written")]
    assert told == pytest.approx(events[-1]["kernel"] - events[0]["kernel"], rel=0.02)
    assert min(told) > 100 << 20
