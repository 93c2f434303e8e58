"""One way through a run, wherever its ranks are: what is decided is heard by all, and each process ends as it must."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from espalier.cli import train
from espalier.launch.hosts.announcement import Announcement
from espalier.launch.ranks.supervisor import Supervisor
from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.plan import checkpoint_cost
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted, PeerLost, UserError
from espalier.train import rank_spec, worker
from espalier.train.workload_registry import Resolved

MACHINE = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n')
PLAN = plans.Plan(ranks=(plans.Rank(share=(0, 1)), plans.Rank(share=(1, 2))), micro_batch=1)


@pytest.fixture
def others() -> Announcement:
    return Announcement(dist.HashStore(), "plan", "Rank 0")


RESOLVED = defaults.resolve(recipe_file.from_table({"model": {"kind": "gcn"}, "data": {"path": "made"}}))


def given() -> Any:
    return SimpleNamespace(resolved=Resolved(*RESOLVED), workload=None, path=Path("runs/it"))


@pytest.mark.parametrize("finished", [False, True])
def test_what_the_first_decides_is_what_the_others_run(others: Announcement, finished: bool) -> None:
    checkpoint = RESOLVED[0].checkpoint.changed(target="/elsewhere/it-1")
    resolved = Resolved(RESOLVED[0].changed(checkpoint=checkpoint), RESOLVED[1])
    job: Any = SimpleNamespace(plan=PLAN, cluster=MACHINE, finished=finished, resolved=resolved)
    assert train.announced(lambda: (job, [0, 1]), others) == (job, [0, 1])
    heard, hosts = train.heard(given, others)
    assert (heard.plan, heard.cluster, heard.finished, tuple(hosts)) == (PLAN, MACHINE, finished, (0, 1))
    assert heard.resolved.recipe.checkpoint.target == "/elsewhere/it-1"


def test_why_nothing_was_decided_is_told_before_it_ends_the_first(others: Announcement) -> None:
    def decide() -> Any:
        raise UserError("data.path names no file.")

    with pytest.raises(UserError):
        train.announced(decide, others)
    with pytest.raises(PeerLost, match=r"Rank 0 could not start: data.path names no file"):
        train.heard(given, others)


def follows(finished: bool, outcome: bool | Interrupted) -> tuple[int, int]:
    """The exit code of a process that does not decide, and how often its ranks were run."""
    job: Any = SimpleNamespace(finished=finished)
    ran = []

    def run(job: Any, hosts: Any) -> bool:
        ran.append(hosts)
        if isinstance(outcome, Interrupted):
            raise outcome
        return outcome

    return train.carry_out(train.Ranks(lambda: (job, ()), run, first=False), as_json=True), len(ran)


def test_who_does_not_decide_ends_with_its_ranks_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert follows(False, outcome=True) == (0, 1)
    assert follows(False, outcome=False) == (1, 1)
    assert follows(False, outcome=Interrupted("saved")) == (130, 1)
    assert follows(True, outcome=False) == (0, 0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("expected", [600.0, 7e6])
def test_a_run_begins_with_the_failures_that_its_plan_expects(expected: float) -> None:
    starts = {checkpoint_cost.NAME: 40, checkpoint_cost.FAILURES: expected}
    rules = tuple(plans.AdaptiveRule(name, start, 0, 1e9, "failures") for name, start in starts.items())
    job: Any = SimpleNamespace(plan=PLAN.changed(rules=rules), resolved=Resolved(*RESOLVED))
    agent: Any = SimpleNamespace(signals=None)
    supervisor = Supervisor(rank_spec.places(job.plan), train.care_of(job), agent)
    assert supervisor._begin().between_failures == pytest.approx(expected, abs=9)
    place = SimpleNamespace(refuge=None, attempt=0)
    setting = SimpleNamespace(place=place, plan=job.plan, new=True)
    trainer: Any = SimpleNamespace(setting=setting, step=0)
    assert worker._pace(trainer, SimpleNamespace())._steps == 40  # type: ignore[arg-type]
    place.attempt = 1
    after_one = min(expected, 3600) / 2
    assert worker._pace(trainer, SimpleNamespace())._steps == round(40 * (after_one / expected) ** 0.5)  # type: ignore[arg-type]
