"""Trials of candidates: the best of several is kept with its load, and measured anew where steps disagree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from espalier.cli import train
from espalier.machine import cluster as clusters
from espalier.machine import probe, resource_limits
from espalier.plan.base import Plan, Predicted, Rank
from espalier.plan.trials import Trials
from espalier.recipe import Gpt, Recipe, defaults
from espalier.train.run_folder import RunFolder

CLUSTER = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n')
PLANS = [Plan(ranks=tuple(Rank(threads=2 // count) for _ in range(count))) for count in (1, 2)]
RECIPE = defaults.resolve(Recipe(model=Gpt(depth=1, vocabulary=256)))[0]


@dataclass
class Machine:
    """Steps take `seconds`, while other programs use `load` cores; `runs` counts trials."""

    seconds: float = 1.0
    load: float = 0.0
    runs: list[Plan] = field(default_factory=list)

    def run(self, plan: Plan, fastest: float) -> float:
        self.runs.append(plan)
        return self.seconds * len(plan.ranks)

    def tried(self) -> list[float]:
        return sorted(Trials(RECIPE, CLUSTER, self.run)(PLANS).values())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Machine()
    monkeypatch.setattr(resource_limits, "busy", lambda seconds: made.load)
    return made


def test_a_quiet_machine_is_measured_once(machine: Machine) -> None:
    assert machine.tried() == machine.tried() == [1.0, 2.0]
    assert len(machine.runs) == 4


def predicted(plan: Plan, seconds: float) -> Plan:
    return plan.changed(
        predicted=Predicted(
            step_seconds=seconds, tokens_per_second=1.0, tokens_per_second_per_device=1.0, mfu=0.1, terms={},
            memory_bytes={}, memory_limit=1.0, sent_bytes={},
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "runs"),
    [(10, 0), (110, 0), (130, 2), (190, 3), (10_000, 6)],  # a trial of steps of 0.1 s is expected to take 0.6 s
)
def test_trials_take_at_most_a_tenth_of_the_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, steps: int, runs: int
) -> None:
    now = [0.0]
    monkeypatch.setattr("espalier.plan.trials.time.monotonic", lambda: now[0])

    def run(plan: Plan, fastest: float) -> float:
        now[0] += 0.6
        machine.runs.append(plan)
        return 0.1

    recipe = RECIPE.changed(train=RECIPE.train.changed(steps=steps))
    ranks = [predicted(Plan(ranks=(Rank(threads=1),) * count), 0.1) for count in (1, 2, 3)]
    trials = Trials(recipe, CLUSTER, run)
    measured = trials(ranks)
    assert len(machine.runs) == runs
    assert 0.6 * len(machine.runs) <= 0.1 * steps * 0.1
    assert len(measured) == min(3, runs)
    assert Trials(recipe, CLUSTER)(ranks) == measured, "whoever plans without trials knows the same"


def test_a_hopeless_plan_is_tried_once_and_knows_how_fast_others_are(machine: Machine) -> None:
    limits = []

    def run(plan: Plan, fastest: float) -> float:
        limits.append(fastest)
        return machine.run(plan, fastest) * (1 if len(plan.ranks) == 1 else 1.6)

    assert sorted(Trials(RECIPE, CLUSTER, run)(PLANS).values()) == [1.0, 3.2]
    assert [len(plan.ranks) for plan in machine.runs] == [1, 2, 1]
    assert limits == [float("inf"), 1.0, 1.0]


def test_what_a_busy_machine_said_is_measured_anew_once_it_is_quiet(machine: Machine) -> None:
    machine.seconds, machine.load = 3.0, 1.5
    assert machine.tried() == [3.0, 6.0]
    assert Trials(RECIPE, CLUSTER).load == 1.5
    machine.seconds = 1.0
    assert machine.tried() == [3.0, 6.0], "still busy: another trial would be no better"
    machine.load = 0.0
    assert machine.tried() == [1.0, 2.0]
    assert Trials(RECIPE, CLUSTER).load == 0.0
    machine.seconds, machine.load = 9.0, 1.5
    assert machine.tried() == [1.0, 2.0], "the best stays"


@pytest.mark.parametrize(("seconds", "again"), [(1.1, 0), (1.6, 4), (0.5, 4)])
@pytest.mark.parametrize("busy", [0.0, 1.5])
def test_what_disagrees_with_steps_is_measured_again(
    machine: Machine, tmp_path: Path, seconds: float, again: int, busy: float
) -> None:
    """Trials whichever they promised; the machine where it was busy then and steps are faster."""
    machine.tried()
    probe.save(msgspec.structs.replace(CLUSTER, machine=probe.identity(), busy=busy))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.cluster.write_text(clusters.dumps(CLUSTER))
    with train.recording(folder, RECIPE, True, predicted(PLANS[0], 1.0).predicted) as emit:
        for step in range(30):
            emit("step", step=step + 1, seconds=seconds, exposed=0.0, loss=1.0)
    machine.runs.clear()
    machine.tried()
    assert len(machine.runs) == again
    assert (probe.cached() is None) == (busy > 0 and seconds < 1 / 1.5)
