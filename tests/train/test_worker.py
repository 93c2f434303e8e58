"""One rank's life: what it says when memory runs out under it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest

from espalier import recipe as config
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.machine import network_interface
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import RunFailed, UserError
from espalier.train import rank_spec as launch
from espalier.train import table, worker
from espalier.train.rank_setup import RankSetup

MIB = 2**20


def small_recipe(folder: Path) -> config.Recipe:
    (folder / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}\n" for i in range(3_000)))
    table = {
        "model": {"depth": 1, "width": 32, "heads": 2, "feed_forward": 64},
        "data": {"path": str(folder / "text.txt"), "cache": str(folder / "cache")},
        "train": {"steps": 3, "sequence": 32, "batch_tokens": 256, "validate_tokens": 512},
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def test_a_rank_that_runs_out_of_memory_says_what_it_held_and_what_would_fit(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}\n" for i in range(30_000)))
    table = {
        "model": {"depth": 2, "width": 256, "heads": 2, "feed_forward": 512},
        "data": {"path": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache")},
        "train": {"steps": 2, "sequence": 256, "batch_tokens": 256 * 512},
    }
    recipe = defaults.resolve(recipe_file.from_table(table))[0]
    workload = open_language(recipe)
    plan = plans.Plan(ranks=(plans.Rank(share=(0, 512)),), micro_batch=512)

    def life(place: launch.RankSpec) -> Any:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 700 * MIB, now + 700 * MIB))
        return worker.train(RankSetup(recipe, plan, workload, place), {})

    with pytest.raises(RunFailed, match="Rank 0 ran out of memory at") as caught:
        agent.run(life, launch.places(plan))
    assert "parameters not known, 5" in caught.value.why
    assert "plan.pin.micro_batch=256" in caught.value.do


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "alike"),
        ({"ranks": (plans.Rank(device="cuda:0"), plans.Rank(device="cuda:1"))}, ""),
        ({"units": (plans.Unit(optimizer=(0, 1)),)}, ""),
        ({"exchanges": (plans.Exchange("gradients", codec="int8"),)}, ""),
        ({"exchanges": (plans.Exchange("gradients"),)}, "alike"),
        ({"stages": (plans.Stage(ranks=(0, 1), tensor=2),)}, ""),
        ({"choices": {"local_rounds": LocalRoundsState(replicas=((0,), (1,)))}}, "rounds"),
        ({"choices": {"local_rounds": LocalRoundsState(replicas=((0, 1),))}}, ""),
    ],
)
def test_which_plans_let_ranks_stay(changes: dict[str, Any], why: str) -> None:
    plan = plans.Plan(**{"ranks": (plans.Rank(), plans.Rank()), **changes})
    assert table.recovery(config.Recipe(model=config.Gpt()), plan) == why


def test_ranks_of_other_roles_run_their_own_program_beside_the_trainers(tmp_path: Path) -> None:
    """Two trainers and a spare between them: the trainers' curve is that of two ranks, and no exchange waits for it."""
    recipe = small_recipe(tmp_path)
    workload = open_language(recipe)
    samples = workload.global_batch
    shares = [(0, samples // 2), (0, 0), (samples // 2, samples)]
    roles = ["trainer", "spare", "trainer"]
    three = tuple(plans.Rank(role=role, share=share) for role, share in zip(roles, shares, strict=True))
    two = (three[0], three[2])

    def run(ranks: tuple[plans.Rank, ...]) -> list[Any]:
        plan = plans.Plan(ranks=ranks, micro_batch=1)

        def life(place: launch.RankSpec) -> Any:
            losses: list[float] = []

            def emit(event: str, **fields: Any) -> None:
                if event in ("step", "validation"):
                    losses.append(fields["loss"])

            spare = {"spare": lambda setting, channel: {"spare": channel.size()}}
            setting = RankSetup(recipe, plan, workload, place, tmp_path / f"run{len(ranks)}", emit)
            return worker.train(setting, {}, {**worker.PROGRAMS, **spare}), losses

        return agent.run(life, launch.places(plan))

    (first, losses), (beside, nothing), (_, others) = run(three)
    assert beside == {"spare": 3}
    assert nothing == []
    assert losses == others == run(two)[0][1]
    assert first["step"] == recipe.train.steps


def test_a_role_without_a_program_is_refused_by_name(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    plan = plans.Plan(ranks=(plans.Rank(role="evaluator"),))
    setting = RankSetup(recipe, plan, open_language(recipe), launch.places(plan)[0])
    with pytest.raises(UserError, match="Rank 0 is planned as 'evaluator'"):
        worker.train(setting, {})


def test_ranks_of_one_machine_listen_on_loopback_alone(monkeypatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    loopback = next(one.interface for one in network_interface.addresses() if one.address == "127.0.0.1")

    def listening() -> set[tuple[str, int]]:
        return {tuple(one.laddr) for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}

    inherited = listening()

    def life(place: launch.RankSpec) -> list[str]:
        with worker.joined(place, 90.0) as channel:
            assert channel is not None
            channel.barrier().wait()
            found = sorted({host for host, _ in listening() - inherited})
            channel.barrier().wait()
        return [os.environ["GLOO_SOCKET_IFNAME"], *found]

    assert (
        agent.run(life, [launch.RankSpec(rank=index, world=2) for index in range(2)]) == [[loopback, "127.0.0.1"]] * 2
    )
