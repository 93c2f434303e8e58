"""`espalier.apply`: somebody else's model in somebody else's loop gives what plain PyTorch gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.comm import Channel
from espalier.errors import UserError
from espalier.plan.base import Plan, Rank, Unit
from espalier.testing import forks, ranks, same

BATCH, STEPS = 12, 6
Made = tuple[nn.Module, Callable[[nn.Module, range, int], Tensor]]


def plan_of(n: int, shard: tuple[int, int, int] = (1, 1, 1), cuts: Any = None, **more: Any) -> Plan:
    """`n` ranks; `cuts`: where each rank's share of the batch begins."""
    cuts = cuts or [BATCH * rank // n for rank in range(n + 1)]
    groups = [tuple(range(size)) if size > 1 else () for size in shard]
    unit = Unit(params=groups[0], grads=groups[1], optimizer=groups[2])
    shares = tuple(Rank(share=(cuts[rank], cuts[rank + 1])) for rank in range(n))
    return Plan(ranks=shares, units=(unit,), micro_batch=BATCH, **more)


# --- models nobody here wrote ---


class Residual(nn.Module):
    """A block of a residual net: two convolutions of odd sizes."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(1, outer)
        self.short = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.two(torch.relu(self.one(x)))) + self.short(x))


def resnet() -> Made:
    torch.manual_seed(1)
    body = nn.Sequential(Residual(3, 5), Residual(5, 7), Residual(7, 7))
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 4)).double()
    images, labels = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64), torch.arange(BATCH) % 4

    def loss(model: nn.Module, rows: range, step: int) -> Tensor:
        chosen = [(row + step) % BATCH for row in rows]
        return nn.functional.cross_entropy(model(images[chosen]), labels[chosen])

    return model, loss


def llama() -> Made:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 3, "vocab_size": 53}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).double()
    tokens = torch.randint(53, (BATCH, 9))

    def loss(model: nn.Module, rows: range, step: int) -> Tensor:
        chosen = tokens[[(row + step) % BATCH for row in rows]]
        found: Tensor = model(input_ids=chosen, labels=chosen).loss
        return found

    return model, loss


MODELS = {"resnet": resnet, "llama": llama}


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


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


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


def _all(channel: Channel, name: str) -> Any:
    return [_applied(channel, name, plan_of(4, shard), 0.1) for shard in TRIPLES]


@pytest.mark.parametrize("name", MODELS)
def test_a_foreign_model_in_an_ordinary_loop_trains_as_in_plain_pytorch(name: str) -> None:
    """Clipping, a scheduler, and both states, which come out whole in torch's own form."""
    state, optimizer, norms = plainly(name, 0.1)
    assert all(norm > 0.1 for norm in norms), "the clip must bind, or its test shows nothing"
    for results in forks(4, _all, name, timeout=55.0):
        for found, found_optimizer, found_norms in results:
            same(found, state, relative=1e-10)
            same(found_norms, norms, relative=1e-10)
            same(found_optimizer["state"], optimizer["state"], relative=1e-10)
            assert found_optimizer["param_groups"] == optimizer["param_groups"]


@pytest.mark.parametrize("shard", [(1, 1, 1), (1, 4, 4), (2, 2, 4)])
def test_unequal_shares_give_the_gradient_of_the_whole_batchs_mean(shard: tuple[int, int, int]) -> None:
    state, _, _ = plainly("resnet")
    plan = plan_of(4, shard, cuts=[0, 1, 6, 8, 12])
    for found, _, _ in forks(4, _applied, "resnet", plan):
        same(found, state, relative=1e-12)


# --- accumulation, in every way people write it ---


def _accumulating(channel: Channel, plan: Plan, way: str) -> Any:
    model, loss = resnet()
    model, optimizer = espalier.apply(plan, model, adamw(model))
    start, stop = plan.ranks[channel.rank()].share
    half = (start + stop) // 2
    for step in range(STEPS):
        if way == "no_sync":
            with model.no_sync():
                (loss(model, range(start, half), step) / 2).backward()
        elif way == "all in no_sync":
            with model.no_sync():
                (loss(model, range(start, half), step) / 2).backward()
                (loss(model, range(half, stop), step) / 2).backward()
        else:
            (loss(model, range(start, half), step) / 2).backward()
        if way != "all in no_sync":
            (loss(model, range(half, stop), step) / 2).backward()
        optimizer.step()
        model.zero_grad() if step % 2 else optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("way", ["no_sync", "all in no_sync", "every backward exchanges"])
@pytest.mark.parametrize("shard", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_accumulation_adds_up_however_it_is_written(shard: tuple[int, int, int], way: str) -> None:
    state = _skipping(None, plan_of(1), ())
    for found in forks(2, _accumulating, plan_of(2, shard), way):
        same(found, state, relative=1e-12)


def _skipping(channel: Channel | None, plan: Plan, odd: tuple[int, ...] = (2, 3)) -> Any:
    """One step is thrown away after its backward, and of another the gradients are kept into the next."""
    model, loss = resnet()
    model, optimizer = espalier.apply(plan, model, adamw(model))
    rows = range(*plan.ranks[channel.rank() if channel else 0].share)
    for step in range(STEPS):
        loss(model, rows, step).backward()
        if step == 2 and odd:
            optimizer.zero_grad()
            continue
        optimizer.step()
        if step != 3 or not odd:
            optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("shard", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_gradients_stay_until_they_are_cleared(shard: tuple[int, int, int]) -> None:
    expected = _skipping(None, plan_of(1))
    for found in forks(2, _skipping, plan_of(2, shard)):
        same(found, expected, relative=1e-12)


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


def _touched(channel: Channel) -> None:
    model, loss = resnet()
    model, _ = espalier.apply(plan_of(2, (1, 1, 2)), model, adamw(model))
    loss(model, range(6), 0).backward()
    _ = next(model.parameters()).grad + 1  # type: ignore[operator]


def test_a_gradient_in_shards_says_so_when_it_is_read() -> None:
    with pytest.raises(UserError, match=r"The gradient of '.*' is not on this rank: it lies in shards"):
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
    with pytest.raises(UserError, match=r"Muon may need whole matrices, and the plan cuts '\d.weight'"):
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
        (plan_of(2), "The plan is for 2 ranks, and this process is alone"),
        (plan_of(1, executable=False, missing="pipeline stages"), "cannot be applied: pipeline stages"),
        (plan_of(1, recompute="block"), "recomputes activations"),
    ):
        with pytest.raises(UserError, match=said):
            espalier.apply(plan, model, adamw(model))


def _three(channel: Channel) -> None:
    model = nn.Linear(3, 3)
    espalier.apply(plan_of(2), model, adamw(model))


def test_a_plan_for_fewer_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="The plan is for 2 ranks; here are 3"):
        ranks(3, _three)


def test_alone_nothing_changes() -> None:
    model = nn.Linear(3, 3)
    optimizer = adamw(model)
    found = espalier.apply(plan_of(1), model, optimizer)
    assert found == (model, optimizer)
    assert not model._forward_pre_hooks
