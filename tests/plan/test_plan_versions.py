"""Plan files of versions 1 and 2, in which fields of single systems stood beside the rest, are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from espalier.mechanisms.disk_batches.state import DiskBatchesState
from espalier.mechanisms.expert_parallel.state import ExpertParallelState
from espalier.mechanisms.halo_exchange.state import HaloAge, HaloExchangeState
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.mechanisms.task_waves.state import TaskWavesState, WaveSlice
from espalier.plan.base import BEFORE_CHOICES, ChoiceState, Plan, Rank, check, dumps, loads
from espalier.recipe.errors import UserError
from espalier.recipe.graphs import Batches

SLICE = WaveSlice(task="read", node="head", first=0, last=1, ranks=(0, 1))
STATES = (
    TaskWavesState(waves=((SLICE,),), nested=4),
    HaloExchangeState(halo_ages=(HaloAge(nodes=(0, 1), steps=2),)),
    OptimizerNodeState(layer_window=3, node_link=1e9),
    ExpertParallelState(experts=((0, 2), (1,))),
    DiskBatchesState(batches=Batches(fanout=(10, 5), batch_tokens=64, steps=7)),
    LocalRoundsState(replicas=((0,), (1,)), method="eager", settings={"codec": "int4"}, steps=9, adapt=False),
)
SINCE_VERSION_2 = ("task_waves", "halo_exchange", "optimizer_node")
"""Whose fields lie in `choices` in version 2."""


def older(plan: Plan, version: int) -> dict[str, Any]:
    """The table of a plan as `version` had it: fields of single systems beside the rest."""
    table: dict[str, Any] = json.loads(dumps(plan))
    choices = table.pop("choices")
    table["outer"] = choices.pop("local_rounds", None)
    for name, fields in BEFORE_CHOICES.items():
        if version == 1 or name not in SINCE_VERSION_2:
            table |= fields | choices.pop(name, {})
    return table | {"version": version} | ({"choices": choices} if version == 2 else {})


def with_states(*states: ChoiceState) -> Plan:
    plan = Plan(ranks=(Rank(share=(0, 4)), Rank(share=(4, 8))))
    for state in states:
        plan = plan.with_state(state)
    return plan


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("states", [(), *((state,) for state in STATES), STATES])
def test_older_versions_are_read_as_version_3(states: tuple[ChoiceState, ...], version: int) -> None:
    plan = with_states(*states)
    table = older(plan, version)
    assert {"outer", "experts", "batches"} <= set(table)
    assert loads(json.dumps(table)) == plan
    assert loads(dumps(plan)) == plan
    assert json.loads(dumps(plan))["version"] == 3


def test_what_the_core_asks_of_states_is_answered_by_whoever_has_it() -> None:
    rounds, experts, plain = with_states(STATES[-1]), with_states(STATES[3]), with_states(STATES[0])
    assert (rounds.replicas, plain.replicas) == (((0,), (1,)), ())
    assert (experts.layout.ep, plain.layout.ep) == (2, 1)
    assert (experts.exchanged, plain.exchanged) == ("experts on several ranks", "")
    assert (experts.changed(micro_batch=2).rounds, plain.rounds) == (2, None)


@pytest.mark.parametrize("experts", [((0, 1), (1,)), ((0,), (2,))])
def test_an_expert_that_is_held_twice_or_by_nobody_is_refused(experts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(UserError, match="each is held once"):
        check(with_states(ExpertParallelState(experts=experts)), 8)


@pytest.mark.parametrize(
    "choices", ['{"nobody": {}}', '{"task_waves": {"wavez": []}}', '{"task_waves": {"nested": "x"}}', "[]", "3"]
)
def test_what_no_system_says_is_refused(choices: str) -> None:
    with pytest.raises(UserError, match=r"plan\.json cannot be read"):
        loads(f'{{"choices": {choices}, "outer": {{"replicas": [[0], [1]]}}}}')
