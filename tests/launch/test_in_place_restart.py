"""Ranks that stay: one is replaced, the others keep their processes and their steps, and no bit changes."""

import pytest
import torch.distributed as dist
from msgspec.structs import replace
from struck import Struck, plan_of, recipe_of, same

from espalier.checkpoint import shared_memory
from espalier.launch.ranks import supervisor
from espalier.launch.ranks.rank_process import Child
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.train.failure import Failure
from espalier.train.heartbeat import Pulses
from espalier.train.rank_spec import RankSpec
from espalier.train.trainer import Trainer
from many_ranks.faults import Fault


def struck(corpus, folder, world, faults):
    return Struck(recipe_of(corpus), world, folder / "run", tuple(faults), memory=1 << 26, stays="alike").run()


def lives(run, rank):
    """The process of each attempt of `rank`."""
    return (run.folder / f"lives-{rank}").read_text().split()


def recovers(corpus, unbroken, folder, world, rank, what):
    """The run, and how it went on: from memory, without a step lost, to the same bits."""
    run = struck(corpus, folder, world, [Fault(rank, 6, what)])
    assert same(run, unbroken(world))
    (incident,) = run.all("incident")
    assert incident["rank"] == rank
    (recovered,) = run.all("recovered")
    assert recovered["lost_steps"] == 0
    assert recovered["source"] == "memory"
    return run, recovered


def stays(corpus, unbroken, folder, world, rank, what):
    run, _ = recovers(corpus, unbroken, folder, world, rank, what)
    for other in range(world):
        assert len(lives(run, other)) == 2
        assert len(set(lives(run, other))) == (2 if other == rank else 1)


@pytest.mark.parametrize(
    ("what", "rank"),
    [
        ("kill", 0),
        pytest.param("stop", 2, marks=pytest.mark.slow),
        pytest.param("raise", 1, marks=pytest.mark.slow),
        pytest.param("hang", 0, marks=pytest.mark.slow),
    ],
)
def test_one_of_three_is_replaced_and_the_others_lose_no_step(corpus, unbroken, tmp_path, what, rank):
    stays(corpus, unbroken, tmp_path, 3, rank, what)


def test_those_that_are_left_do_not_wait_for_each_other_when_the_store_goes_with_the_first(corpus, unbroken, tmp_path):
    """Of four, one has no connection to the first in a ring: it learns of the loss only from those that leave."""
    _, recovered = recovers(corpus, unbroken, tmp_path, 4, 0, "exit")
    assert recovered["seconds"] < 30, "comm.timeout of the run"


@pytest.mark.slow  # in one of forty runs on busy cores another rank was replaced too
def test_all_that_are_left_stay_when_the_store_goes_with_the_first(corpus, unbroken, tmp_path):
    stays(corpus, unbroken, tmp_path, 4, 0, "exit")


@pytest.mark.slow
def test_all_ranks_go_on_saving_at_the_same_steps(corpus, tmp_path):
    """How often copies and checkpoints are made follows from the time between failures, which only the new rank was
    told of at its start."""
    recipe = recipe_of(corpus, train={"steps": 120, "validate_every": 1000}, checkpoint={"every": "auto"})
    whole = Struck(recipe, 2, tmp_path / "whole").run()
    run = Struck(recipe, 2, tmp_path / "run", (Fault(0, 15, "raise"),), memory=1 << 26, stays="alike").run()
    assert same(run, whole)
    assert len(run.all("incident")) == 1


@pytest.mark.slow
def test_what_their_launcher_did_before_makes_no_difference(corpus, unbroken, tmp_path, monkeypatch):
    """Torch names groups by how many a process has made: ranks inherit that number, one that stays begins it anew."""
    monkeypatch.setattr(dist.distributed_c10d._world, "group_count", 3)
    stays(corpus, unbroken, tmp_path, 2, 1, "kill")


@pytest.mark.slow
def test_one_after_the_other_and_two_at_once(corpus, unbroken, tmp_path):
    faults = [Fault(1, 2, "kill"), Fault(0, 4, "kill"), Fault(0, 7, "kill"), Fault(1, 7, "kill")]
    run = struck(corpus, tmp_path, 3, faults)
    assert same(run, unbroken(3))
    assert sum(event["lost_steps"] for event in run.all("recovered")) == 0


# --- who can stay ----------------------------------------------------------------------------------------------------


def ranks(*ended):
    """Three ranks, of which some have ended; and signs of life of three that have made steps."""
    children = [Child(RankSpec(rank=rank, world=3), -1, -1, -1) for rank in range(3)]
    for rank in ended:
        children[rank].status = -9
    pulses = Pulses(3, 1.0)
    for rank in range(3):
        pulses.of(rank).stepped(4)
    return children, pulses


def test_the_dead_and_the_culprit_are_replaced():
    children, pulses = ranks(1)
    assert supervisor.ranks_to_replace(Failure("killed", 1, ""), children, pulses.read()) == [1]
    assert supervisor.ranks_to_replace(Failure("hang", 2, ""), children, pulses.read()) == [1, 2]


@pytest.mark.parametrize("kind", ["user", "lost", "anomaly", "signal", "replanned"])
def test_what_concerns_all_ranks_begins_all_anew(kind):
    children, pulses = ranks(1)
    assert supervisor.ranks_to_replace(Failure(kind, 1, ""), children, pulses.read()) == []


def test_a_hang_of_nobody_knows_whom_begins_all_anew():
    children, pulses = ranks()
    assert supervisor.ranks_to_replace(Failure("hang", -1, ""), children, pulses.read()) == []


def test_ranks_that_still_meet_cannot_be_called():
    children, pulses = ranks(1)
    pulses.of(2).starts()
    assert supervisor.ranks_to_replace(Failure("killed", 1, ""), children, pulses.read()) == []
    pulses.of(2).stands()
    assert supervisor.ranks_to_replace(Failure("killed", 1, ""), children, pulses.read()) == [1]


def test_nobody_is_left():
    children, pulses = ranks(0, 1, 2)
    assert supervisor.ranks_to_replace(Failure("killed", 1, ""), children, pulses.read()) == []


def test_what_has_done_its_part_does_not_come_back():
    children, pulses = ranks(1)
    children[0].status, children[0].received = 0, b"done"
    assert supervisor.ranks_to_replace(Failure("killed", 1, ""), children, pulses.read()) == []


def test_without_room_for_copies_all_begin_anew(corpus, unbroken, tmp_path):
    run = Struck(
        recipe_of(corpus), 2, tmp_path / "run", (Fault(1, 6, "kill"),), memory=shared_memory.SLOTS, stays="alike"
    ).run()
    assert same(run, unbroken(2))
    assert run.all("recovered")[-1]["source"] != "memory"


# --- the log -------------------------------------------------------------------------------------------------------


def test_the_step_in_which_the_rank_that_logs_was_killed_is_in_the_log(corpus, unbroken, tmp_path):
    """The others have made it; the state goes on from there."""
    recipe = recipe_of(corpus)
    fault = Fault(0, 6, "kill")  # while it reports step 5
    options = {"memory": 1 << 26, "stays": "alike", "inside": (Trainer, "_report")}
    run = Struck(recipe, 2, tmp_path / "run", (fault,), **options).run()
    assert same(run, unbroken(2))
    assert [event["step"] for event in run.all("step")] == list(range(1, recipe.train.steps + 1))
    assert run.all("recovered")[0]["lost_steps"] == 0
    assert run.validated == unbroken(2).validated


# --- replicas that agree by rounds ------------------------------------------------------------------------------------


def by_rounds(corpus, folder, *faults, steps=24):
    recipe = recipe_of(corpus, train={"steps": steps}, checkpoint={"every": 100})
    outer = LocalRoundsState(replicas=((0,), (1,), (2,)), method="eager", steps=2, adapt=False)
    plan = replace(plan_of(recipe, 3), choices={"local_rounds": outer})
    return Struck(recipe, 3, folder, faults, memory=1 << 26, stays="rounds", plan=plan).run()


@pytest.mark.slow
def test_replicas_that_agree_by_rounds_begin_again_where_all_have_a_copy(corpus, tmp_path):
    """Whose supervisor lives: a mean without the lost one would have other bits."""
    whole = by_rounds(corpus, tmp_path / "whole")
    for rank in (0, 2):
        run = by_rounds(corpus, tmp_path / str(rank), Fault(rank, 7, "kill"))
        assert same(run, whole)
        assert run.validated == whole.validated
        (recovered,) = run.all("recovered")
        assert recovered["step"] >= 4
        assert recovered["source"] == "memory"
