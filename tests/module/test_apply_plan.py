"""`espalier.apply`: somebody else's model in somebody else's loop gives what plain PyTorch gives."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch
from foreign import BATCH, MODELS, STEPS, Made, adamw, plan_of, resnet
from torch import nn

import espalier
from espalier.comm import Channel
from espalier.mechanisms.local_rounds import CO2
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan.base import Plan
from espalier.recipe.errors import UserError
from many_ranks import forks, ranks, same


def train(made: Made, optimizer: torch.optim.Optimizer, rows: range, clip: float = 0.0) -> list[float]:
    """An ordinary loop; the norms that clipping saw."""
    model, loss = made
    norms = []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        loss(model, rows, step).backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return norms


def plainly(name: str, clip: float = 0.0) -> Any:
    made = MODELS[name]()
    optimizer = adamw(made[0])
    norms = train(made, optimizer, range(BATCH), clip)
    return made[0].state_dict(), optimizer.state_dict(), norms


def _applied(channel: Channel, name: str, plan: Plan, clip: float = 0.0) -> Any:
    model, loss = MODELS[name]()
    model, optimizer = espalier.apply(plan, model, adamw(model))
    norms = train((model, loss), optimizer, range(*plan.ranks[channel.rank()].share), clip)
    return copy.deepcopy(model.state_dict()), optimizer.state_dict(), norms


TRIPLES = [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 4), (2, 2, 2), (2, 2, 4), (4, 4, 4)]


def _all(channel: Channel, name: str, triples: Any) -> Any:
    return [_applied(channel, name, plan_of(4, shard), 0.1) for shard in triples]


@pytest.mark.parametrize(
    ("name", "triples"),
    [
        ("llama", TRIPLES[::3]),
        pytest.param("llama", TRIPLES, marks=pytest.mark.slow),
        pytest.param("resnet", TRIPLES, marks=pytest.mark.slow),
    ],
)
def test_a_foreign_model_in_an_ordinary_loop_trains_as_in_plain_pytorch(name: str, triples: Any) -> None:
    """Clipping, a scheduler, and both states, which come out whole in torch's own form."""
    state, optimizer, norms = plainly(name, 0.1)
    assert all(norm > 0.1 for norm in norms), "the clip must bind, or its test shows nothing"
    for results in forks(4, _all, name, triples, timeout=150):
        for found, found_optimizer, found_norms in results:
            same(found, state, relative=1e-10)
            same(found_norms, norms, relative=1e-10)
            same(found_optimizer["state"], optimizer["state"], relative=1e-10)
            assert found_optimizer["param_groups"] == optimizer["param_groups"]


@pytest.mark.extremes
@pytest.mark.parametrize("shard", [(1, 1, 1), (1, 4, 4), (2, 2, 4)])
def test_unequal_shares_give_the_gradient_of_the_whole_batchs_mean(shard: tuple[int, int, int]) -> None:
    state, _, _ = plainly("resnet")
    plan = plan_of(4, shard, cuts=[0, 1, 6, 8, 12])
    for found, _, _ in forks(4, _applied, "resnet", plan):
        same(found, state, relative=1e-12)


# --- states ---


def _reloaded(channel: Channel, before: Any, shard: tuple[int, int, int]) -> Any:
    made = resnet()
    plan = plan_of(channel.size(), shard)
    model, optimizer = espalier.apply(plan, made[0], adamw(made[0]))
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    rows = range(*plan.ranks[channel.rank()].share)
    for step in range(3, STEPS):
        made[1](model, rows, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict()), optimizer.state_dict()


@pytest.mark.parametrize("shard", [(1, 1, 1), (1, 2, 4), (4, 4, 4)])
def test_states_of_plain_pytorch_go_into_any_sharding_and_back(shard: tuple[int, int, int]) -> None:
    model, loss = resnet()
    optimizer = adamw(model)
    states = []
    for step in range(STEPS):
        if step == 3:
            states = [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())]
        loss(model, range(BATCH), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, found_optimizer in forks(4, _reloaded, states, shard):
        same(found, model.state_dict(), relative=1e-10)
        same(found_optimizer["state"], optimizer.state_dict()["state"], relative=1e-10)


def _low(channel: Channel, shard: tuple[int, int, int]) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    plan = plan_of(2, shard, precision="bf16")
    model, optimizer = espalier.apply(plan, model, adamw(model))
    x = torch.linspace(-1, 1, BATCH * 16).view(BATCH, 16)[slice(*plan.ranks[channel.rank()].share)]
    losses = []
    for _ in range(30):
        loss = (model(x).float() - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kinds = {str(p.dtype) for p in model.parameters()}, {str(v.dtype) for v in model.state_dict().values()}
    return losses, kinds


def test_bf16_parameters_have_fp32_masters_with_the_optimizer() -> None:
    replicated = [losses for losses, _ in forks(2, _low, (1, 1, 1))]
    for rank, (losses, (computed, saved)) in enumerate(forks(2, _low, (1, 2, 2))):
        assert computed == {"torch.bfloat16"}
        assert saved == {"torch.float32"}
        assert losses[-1] < 0.3 * losses[0]
        assert losses[-1] == pytest.approx(replicated[rank][-1], rel=0.1)


# --- mistakes ---


def _changed(channel: Channel, change: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    model, optimizer = espalier.apply(plan_of(2, (1, 1, 2)), model, adamw(model))
    if change == "thawed":
        model[0].bias.requires_grad_(True)
    elif change == "moved":
        model.double()
    elif change == "twice":
        espalier.apply(plan_of(2, (1, 1, 2)), model, optimizer)
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    model(torch.ones(6, 3, dtype=model[0].weight.dtype)).sum().backward()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("thawed", "changed at '0.bias'"),
        ("moved", "changed at '1.bias'"),
        ("twice", "sharded already"),
        ("grown", "A parameter group was added"),
    ],
)
def test_a_model_changed_after_it_was_applied_is_refused(change: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        forks(2, _changed, change)


def test_an_optimizer_that_moves_more_than_the_model_is_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(UserError, match=r"moves a parameter of shape \[2\] that is not in the model"):
        espalier.apply(plan_of(1), model, optimizer)


def _touched(channel: Channel) -> None:
    model, loss = resnet()
    model, _ = espalier.apply(plan_of(2, (1, 1, 2)), model, adamw(model))
    loss(model, range(6), 0).backward()
    _ = next(model.parameters()).grad + 1  # type: ignore[operator]


def test_a_gradient_in_shards_says_so_when_it_is_read() -> None:
    with pytest.raises(UserError, match=r"The gradient of '.*' is sharded"):
        forks(2, _touched)


def _muon(channel: Channel, whole: bool) -> Any:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * (number + 1))
    plan = plan_of(2, (1, 1, 2))
    plan = msgspec.structs.replace(plan, units=(msgspec.structs.replace(plan.units[0], whole=whole),))
    model, optimizer = espalier.apply(plan, model, torch.optim.Muon(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.eye(8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


def test_an_optimizer_of_whole_matrices_is_refused_pieces_and_runs_where_they_are_whole() -> None:
    with pytest.raises(UserError, match=r"Muon may need whole matrices, and the plan shards '\d.weight'"):
        forks(2, _muon, False)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * (number + 1))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.eye(8)).square().sum().backward()
        optimizer.step()
    for found in forks(2, _muon, True):
        same(found, model.state_dict(), relative=1e-2)  # it computes in bf16


def test_plans_for_others_are_refused_by_name() -> None:
    model = nn.Linear(3, 3)
    for plan, said in (
        (plan_of(2), "The plan is for 2 ranks, and there is no process group"),
        (plan_of(1, executable=False, missing="pipeline stages"), "cannot be applied: pipeline stages"),
        (plan_of(1, recompute="block"), "recomputes activations"),
    ):
        with pytest.raises(UserError, match=said):
            espalier.apply(plan, model, adamw(model))


def test_a_plan_of_another_precision_is_refused_by_name() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UserError, match=r"The plan is for fp64, and 'weight' is torch\.float32"):
        espalier.apply(plan_of(1, precision="fp64"), model, adamw(model))
    model = model.double()
    assert espalier.apply(plan_of(1, precision="fp64"), model, adamw(model))[0] is model


def _three(channel: Channel) -> None:
    model = nn.Linear(3, 3)
    espalier.apply(plan_of(2), model, adamw(model))


def test_a_plan_for_fewer_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="The plan is for 2 ranks; this process group has 3"):
        ranks(3, _three)


def test_alone_nothing_changes() -> None:
    model = nn.Linear(3, 3)
    optimizer = adamw(model)
    found = espalier.apply(plan_of(1), model, optimizer)
    assert found == (model, optimizer)
    assert not model._forward_pre_hooks


# --- rounds --------------------------------------------------------------------------------------------------------


def small() -> tuple[nn.Module, Any]:
    """Ranks are threads of one process here: what they draw from must be their own."""
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2)).double()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 4)
    inputs = torch.randn(BATCH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def loss(model: nn.Module, rows: range, step: int) -> Any:
        chosen = [(row + step) % BATCH for row in rows]
        return (model(inputs[chosen]) - inputs[chosen, :2]).square().mean()

    return model, loss


def by_rounds(replicas: int, each: int, method: str, **settings: Any) -> Plan:
    """Replicas of some ranks each, with rounds of three steps."""
    groups = tuple(tuple(range(each * index, each * (index + 1))) for index in range(replicas))
    outer = LocalRoundsState(replicas=groups, method=method, settings=settings, steps=3, adapt=False)
    return plan_of(replicas * each, (1, 1, each), choices={"local_rounds": outer})


def looped(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, rows: range) -> None:
    for step in range(8):
        loss(model, rows, step).backward()
        optimizer.step()
        optimizer.zero_grad()


METHODS = [("co2", {}), ("co2", {"codec": "int8"}), ("diloco", {"momentum": 0.5}), ("local_sgd", {})]


@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_a_plan_with_rounds_trains_as_those_rounds_do(method: str, settings: dict[str, Any]) -> None:
    """Replicas of one rank: bit for bit what `espalier.mechanisms.local_rounds.CO2` gives, and as many bytes."""

    def applied(channel: Channel) -> Any:
        model, loss = small()
        model, optimizer = espalier.apply(by_rounds(2, 1, method, **settings), model, adamw(model), group=channel)
        looped(model, optimizer, loss, range(*by_rounds(2, 1, method).ranks[channel.rank()].share))
        model.finish()
        return copy.deepcopy(model.state_dict()), channel.ledger.by_class()["outer_step"]

    def plain(channel: Channel) -> Any:
        model, loss = small()
        optimizer = adamw(model)
        outer = CO2(model, optimizer, steps=3, method=method, group=channel, **settings)
        looped(model, optimizer, loss, range(*by_rounds(2, 1, method).ranks[channel.rank()].share))
        outer.finish()
        outer.detach()
        return copy.deepcopy(model.state_dict())

    found, expected = ranks(2, applied), ranks(2, plain)
    for (state, sent), other in zip(found, expected, strict=True):
        assert state.keys() == other.keys()
        assert all(torch.equal(state[name], other[name]) for name in state)
        assert sent > 0
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])


def test_replicas_of_several_ranks_sum_inside_and_agree_by_rounds() -> None:
    """Two replicas of two ranks, the optimizer's state cut in each: as two ranks with a replica's whole batch."""

    def applied(channel: Channel) -> Any:
        plan = by_rounds(2, 2, "co2")
        model, loss = small()
        model, optimizer = espalier.apply(plan, model, adamw(model), group=channel)
        looped(model, optimizer, loss, range(*plan.ranks[channel.rank()].share))
        model.finish()
        return copy.deepcopy(model.state_dict())

    def plain(channel: Channel) -> Any:
        model, loss = small()
        optimizer = adamw(model)
        outer = CO2(model, optimizer, steps=3, group=channel)
        half = BATCH // 2
        looped(model, optimizer, loss, range(half * channel.rank(), half * (channel.rank() + 1)))
        outer.finish()
        outer.detach()
        return copy.deepcopy(model.state_dict())

    found, expected = ranks(4, applied), ranks(2, plain)
    for state in found:
        assert all(torch.equal(state[name], found[0][name]) for name in state)
        for name, value in state.items():
            torch.testing.assert_close(value, expected[0][name], rtol=1e-6, atol=1e-7)


def test_finish_is_there_without_rounds() -> None:
    model = nn.Linear(3, 3)
    model, _ = espalier.apply(plan_of(1), model, adamw(model))
    model.finish()
