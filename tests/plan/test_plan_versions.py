"""Plan files say what single systems decide in `choices`; those of another version are refused."""

from __future__ import annotations

import json

import pytest

from espalier.mechanisms.disk_batches.state import DiskBatchesState
from espalier.mechanisms.expert_parallel.state import ExpertParallelState
from espalier.mechanisms.halo_exchange.state import HaloAge, HaloExchangeState
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.mechanisms.task_waves.state import TaskWavesState, WaveSlice
from espalier.plan.base import ChoiceState, Plan, Rank, check, dumps, loads
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


def with_states(*states: ChoiceState) -> Plan:
    plan = Plan(ranks=(Rank(share=(0, 4)), Rank(share=(4, 8))))
    for state in states:
        plan = plan.with_state(state)
    return plan


@pytest.mark.parametrize("states", [(), *((state,) for state in STATES), STATES])
def test_what_is_written_is_read_again(states: tuple[ChoiceState, ...]) -> None:
    plan = with_states(*states)
    assert loads(dumps(plan)) == plan


@pytest.mark.parametrize("version", [1, 2, 4])
def test_another_version_is_refused(version: int) -> None:
    table = json.loads(dumps(with_states())) | {"version": version}
    with pytest.raises(UserError, match=r"(?s)plan\.json cannot be read.*version.*it is then planned again"):
        loads(json.dumps(table))


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
        loads(f'{{"choices": {choices}}}')
