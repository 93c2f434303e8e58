"""An aggregator on a machine of its own, between workers and an optimizer node: it changes no bit of a run, neither
exact nor in 8 bits, also where it is killed in a step, and it passes on the bytes of the plan."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from node_runs import STEPS, STRUCK, OnNode, on_node, recipe
from struck import same, write_corpus

from espalier.mechanisms.optimizer_node.aggregator import Aggregator
from espalier.plan import base as plans
from espalier.recipe import Recipe
from espalier.train import rank_spec as launch

pytestmark = pytest.mark.slow


def apart(recipe: Recipe, codec: str, *helpers: str) -> plans.Plan:
    """Two workers, a node and its helpers, each on another machine."""
    plan = on_node(recipe, 2, *helpers, exchanges=(plans.Exchange(traffic="gradients", codec=codec),))
    return plan.changed(ranks=tuple(rank.changed(node=machine) for machine, rank in enumerate(plan.ranks)))


def dying(marker: Path) -> Any:
    """What kills the aggregator once, in the middle of a step."""

    def arm(place: launch.RankSpec) -> None:
        plain = Aggregator._send

        def send(self: Aggregator, slot: Any, session: Any) -> None:
            if place.role == "aggregator" and slot.round == STRUCK and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            plain(self, slot, session)

        Aggregator._send = send  # type: ignore[method-assign]

    return arm


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_a_run_through_an_aggregator_that_is_killed_ends_with_the_bits_of_a_run_without_one(
    tmp_path: Path, codec: str
) -> None:
    asked = recipe(write_corpus(tmp_path / "corpus"))
    direct, summed = apart(asked, codec), apart(asked, codec, "aggregator")
    whole = OnNode(asked, 3, tmp_path / "direct", (), plan=direct).run()
    marker = tmp_path / "killed"
    run = OnNode(asked, 4, tmp_path / "summed", (), plan=summed, arm=dying(marker)).run()
    assert marker.exists()
    assert len(run.losses) == STEPS
    assert same(run, whole)
    (incident,) = (one for one in run.all("incident") if one["rank"] == 3)
    assert "start it again, the others stay" in incident["action"]
