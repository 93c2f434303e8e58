"""Plan files of version 1, in which the fields of single systems stood beside the rest, are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from espalier.mechanisms.halo_exchange.state import HaloAge, HaloExchangeState
from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.mechanisms.task_waves.state import TaskWavesState, WaveSlice
from espalier.plan.base import BEFORE_CHOICES, ChoiceState, Plan, Rank, dumps, loads
from espalier.recipe.errors import UserError

SLICE = WaveSlice(task="read", node="head", first=0, last=1, ranks=(0, 1))
STATES = (
    TaskWavesState(waves=((SLICE,),), nested=4),
    HaloExchangeState(halo_ages=(HaloAge(nodes=(0, 1), steps=2),)),
    OptimizerNodeState(layer_window=3, node_link=1e9),
)


def first_version(plan: Plan) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(dumps(plan))
    choices = table.pop("choices")
    for name, fields in BEFORE_CHOICES.items():
        table |= fields | choices.get(name, {})
    return table | {"version": 1}


@pytest.mark.parametrize("states", [(), *((state,) for state in STATES), STATES])
def test_version_1_is_read_as_version_2(states: tuple[ChoiceState, ...]) -> None:
    plan = Plan(ranks=(Rank(), Rank()))
    for state in states:
        plan = plan.with_state(state)
    assert loads(json.dumps(first_version(plan))) == plan
    assert loads(dumps(plan)) == plan


@pytest.mark.parametrize(
    "choices", ['{"nobody": {}}', '{"task_waves": {"wavez": []}}', '{"task_waves": {"nested": "x"}}']
)
def test_what_no_system_says_is_refused(choices: str) -> None:
    with pytest.raises(UserError, match="is not a plan"):
        loads(f'{{"choices": {choices}}}')
