"""A run repeats itself bit for bit, with every codec and by every agreement: undisturbed, and where it fails between
steps. What strikes it elsewhere is in tests/faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from struck import Struck, plan_of, recipe_of, same, write_corpus

from espalier.comm.codecs import FAMILIES
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.optim.diloco_slowmo import METHODS
from espalier.plan import base as plans
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup
from many_ranks.faults import Fault

CODECS = ("bf16", "int8", "int4", "int1", "int8:stochastic", "topk:0.05", "zfp:8", "split", "mpc")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("repeats") / "corpus")


def by_codec(made: Any, name: str) -> plans.Plan:
    sent = plans.Exchange(traffic="gradients", codec=name)
    return plans.Plan(ranks=plan_of(made, 2).ranks, micro_batch=2, exchanges=(sent,))


def by_method(made: Any, name: str) -> plans.Plan:
    outer = LocalRoundsState(replicas=((0,), (1,)), method=name, steps=4, adapt=False)
    return plans.Plan(ranks=plan_of(made, 2).ranks, micro_batch=8, choices={"local_rounds": outer})


def normal(chosen: bool) -> Any:
    return () if chosen else pytest.mark.slow


KINDS = [(by_codec, name) for name in CODECS] + [(by_method, name) for name in METHODS]


# --- undisturbed ------------------------------------------------------------------------------------------------------


def trained(corpus: Path, planned: Any, name: str, seed: int = 1) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses of six steps and the parameters after them, on each of two ranks."""
    made = recipe_of(corpus, train={"steps": 6, "seed": seed, "validate_every": 100, "optimizer": {"kind": "adamw"}})
    plan, workload = planned(made, name), open_language(made)

    def life(place: launch.RankSpec) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses: list[float] = []

        def emit(event: str, **fields: Any) -> None:
            if event == "step":
                losses.append(fields["loss"])

        with worker.joined(place, 90.0) as channel:
            training = trainer.Trainer(RankSetup(made, plan, workload, place, emit=emit), channel)
            training.run()
            training.built.sharding.summon()
            return losses, {key: value.clone() for key, value in training.built.model.state_dict().items()}

    return agent.run(life, launch.places(plan))


@pytest.mark.extremes
@pytest.mark.parametrize(("planned", "name"), [(by_codec, "exact"), (by_codec, "sparse"), *KINDS])
def test_the_same_seed_gives_the_same_bits(corpus: Path, planned: Any, name: str) -> None:
    first, again = (trained(corpus, planned, name) for _ in range(2))
    for (losses, parameters), (losses_again, parameters_again) in zip(first, again, strict=True):
        assert losses == losses_again
        assert len(losses) == 6
        assert all(torch.equal(value, parameters_again[key]) for key, value in parameters.items())


def test_another_seed_gives_other_bits(corpus: Path) -> None:
    """So the comparison above can fail."""
    ((losses, parameters), _), ((others, _), _) = (trained(corpus, by_codec, "int8", seed) for seed in (1, 2))
    assert losses != others
    assert parameters


def test_every_codec_is_among_them() -> None:
    assert {name.partition(":")[0] for name in ("exact", "sparse", *CODECS)} == set(FAMILIES)


# --- what is due between steps ----------------------------------------------------------------------------------------

PLANNED = {
    "alike": (lambda made: plan_of(made, 2), "alike"),
    "alike, anew": (lambda made: plan_of(made, 2), ""),
    "int8": (lambda made: by_codec(made, "int8"), ""),
    "eager": (lambda made: by_method(made, "eager"), ""),
    "eager, staying": (lambda made: by_method(made, "eager"), "rounds"),
}
STRUCK = [
    pytest.param(kind, what, step, rank, marks=normal((kind, what, step, rank) == ("alike", "kill", 4, 0)))
    for kind in PLANNED
    for what in ("kill", "hang")
    for step in (4, 8, 10)
    for rank in (0, 1)
]


@pytest.mark.parametrize(("kind", "what", "step", "rank"), STRUCK)
def test_a_failure_in_validation_changes_no_figure_and_leaves_none_out(
    corpus: Path, tmp_path: Path, kind: str, what: Any, step: int, rank: int
) -> None:
    planned, stays = PLANNED[kind]
    made = recipe_of(corpus, train={"steps": 10, "validate_every": 4}, checkpoint={"every": 4})
    plan = planned(made)
    whole = Struck(made, 2, tmp_path / "whole", plan=plan).run()
    fault = (Fault(rank, step, what),)
    run = Struck(made, 2, tmp_path / "run", fault, memory=1 << 26, plan=plan, stays=stays, validating=True).run()
    assert run.all("incident")
    assert same(run, whole)
    assert run.validated == whole.validated
    assert {step, 10} <= {event["step"] for event in run.all("checkpoint")}  # one that was being written may be lost


# --- rounds that follow measured waits -------------------------------------------------------------------------------


def adapting(made: Any, shards: int) -> plans.Plan:
    """Two replicas of so many ranks, whose rounds follow the measured waits."""
    several = tuple(range(shards)) if shards > 1 else ()
    unit = plans.Unit(optimizer=several, whole=True)
    groups = tuple(tuple(range(one * shards, (one + 1) * shards)) for one in range(2))
    outer = LocalRoundsState(replicas=groups, method="eager", steps=1, adapt=True)
    return plans.Plan(
        ranks=plan_of(made, 2 * shards).ranks, units=(unit,), micro_batch=2, choices={"local_rounds": outer}
    )


def following(corpus: Path, steps: int, log: Path | None = None) -> Any:
    sync = {"kind": "eager", "adapt": str(log) if log is not None else True}
    return recipe_of(corpus, train={"steps": steps}, checkpoint={"every": 100}, sync=sync)


def lengths(run: Struck) -> dict[int, float]:
    return {event["step"]: event["value"] for event in run.all("rule") if event["name"] == "sync.steps"}


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rounds_that_follow_waits_never_stand_still_and_repeat_by_their_log(
    corpus: Path, tmp_path: Path, shards: int
) -> None:
    world, plan = 2 * shards, adapting(following(corpus, 40), shards)
    first = Struck(following(corpus, 40), world, tmp_path / "first", plan=plan).run()
    assert not first.all("incident")
    assert len(lengths(first)) > 1, "rounds have changed"
    recipe = following(corpus, 40, tmp_path / "first")
    again = Struck(recipe, world, tmp_path / "again", plan=plan).run()
    assert same(again, first)
    assert lengths(again) == lengths(first)
    killed = Fault(world - 1, 23, "kill")
    run = Struck(recipe, world, tmp_path / "run", (killed,), memory=1 << 26, plan=plan).run()
    assert same(run, first)
    assert lengths(run) == lengths(first)


@pytest.mark.slow
def test_what_is_done_again_has_the_rounds_that_it_had(corpus: Path, tmp_path: Path) -> None:
    """No other log is given: a run that was killed follows its own, which then describes the undisturbed run too."""
    plan, killed = adapting(following(corpus, 40), 1), Fault(1, 31, "kill")
    run = Struck(following(corpus, 40), 2, tmp_path / "run", (killed,), memory=1 << 26, plan=plan).run()
    assert len(run.all("recovered")) == 1
    assert len(lengths(run)) > 1, "rounds have changed"
    whole = Struck(following(corpus, 40, tmp_path / "run"), 2, tmp_path / "whole", plan=plan).run()
    assert same(run, whole)
    assert lengths(run) == lengths(whole)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(5))
def test_undisturbed_rounds_of_two_by_two_ranks_have_no_incident(corpus: Path, tmp_path: Path, turn: int) -> None:
    made = following(corpus, 80)
    run = Struck(made, 4, tmp_path / "run", heartbeat=1.0, memory=1 << 26, plan=adapting(made, 2)).run()
    assert not run.all("incident")
    assert max(run.losses) == 80
