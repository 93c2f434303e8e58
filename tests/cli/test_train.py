"""One way through a run, wherever its ranks are: what is decided is heard by all, and each process ends as it must."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from espalier.cli import train
from espalier.launch.hosts.announcement import Announcement
from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted, PeerLost, UserError
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
