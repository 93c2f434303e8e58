"""Frozen parameters of blocks are sharded with the others: gathered for each pass, never reduced, saved in slices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import Odd, every, one_step, plain, triples
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from espalier.comm import Channel
from espalier.mechanisms.offload.host_memory import HostWeights
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.mechanisms.sharding.sharded_state_dict import ModelState, whole_state_dict
from espalier.optim import adamw
from espalier.plan.axes.placement import ShardFactors
from espalier.recipe import Adamw
from many_ranks import ranks, same

FROZEN = ("inner.weight", "gain")
SHARDED = [factors for factors in triples(4) if factors.params > 1]


def adapted(kind: str = "few") -> Odd:
    """Of each block (or of all of the first block too) some parameters are frozen, one of them in another dtype."""
    model = Odd(layers=4)
    for number, block in enumerate(model.blocks):
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(name not in FROZEN and not (kind == "all" and number in (0, 2)))
    if kind == "all":
        for parameter in (model.embed, model.sometimes):
            parameter.requires_grad_(False)
    return model


class Recomputed(nn.Module):
    """A block that is computed again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def recomputed() -> Odd:
    model = adapted()
    model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    return model


MODELS = {"few": adapted, "all": lambda: adapted("all"), "recomputed": recomputed}


def trained(channel: Channel, factors: ShardFactors, kind: str, accumulate: int, waits: bool = False) -> Any:
    weights = HostWeights(torch.device("cpu")) if waits else None
    sharding = Amsp(MODELS[kind](), channel, replace(every(factors), weights=weights))
    assert sharding.frozen
    optimizer = adamw.build(Adamw(learning_rate=1e-2), sharding.owned)
    most = [0]

    def gathered(*_: Any) -> None:
        blocks = {
            slot.name.split(".")[1]
            for unit in sharding.frozen
            if unit.full.untyped_storage().size()
            for slot in unit.slots
        }
        most[0] = max(most[0], len(blocks))

    for _, parameter in sharding.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gathered)
    place = (channel.rank(), channel.size())
    norms = [one_step(sharding, optimizer, step, accumulate, place) for step in range(4)]
    assert most[0] <= 2
    assert not any(unit.gathered for unit in sharding.frozen)
    sharding.detach()
    return {name: parameter.detach().clone() for name, parameter in sharding.model.named_parameters()}, norms


@pytest.mark.sampled(3)
@pytest.mark.parametrize("factors", SHARDED, ids=lambda factors: "-".join(map(str, factors)))
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_with_sharded_frozen_parameters_trains_as_on_one_rank(kind: str, factors: ShardFactors) -> None:
    expected = plain(torch.float64, 4, model=MODELS[kind]())
    for parameters, norms in ranks(4, trained, factors, kind, 2):
        same(parameters, expected["parameters"], relative=1e-12)
        same(norms, expected["norms"], relative=1e-12)
        for name, parameter in MODELS[kind]().named_parameters():
            if not parameter.requires_grad:
                assert torch.equal(parameters[name], parameter)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "factors", [ShardFactors(1, 1, 1), ShardFactors(1, 2, 4), ShardFactors(2, 2, 4), ShardFactors(4, 4, 4)], ids=str
)
@pytest.mark.parametrize("kind", MODELS)
def test_frozen_parameters_that_wait_in_host_memory_train_as_on_one_rank(kind: str, factors: ShardFactors) -> None:
    """Sharded or not, they come block by block."""
    expected = plain(torch.float64, 4, model=MODELS[kind]())
    for parameters, norms in ranks(4, trained, factors, kind, 2, True):
        same(parameters, expected["parameters"], relative=1e-12)
        same(norms, expected["norms"], relative=1e-12)


def held(channel: Channel, factors: ShardFactors) -> Any:
    sharding = Amsp(adapted(), channel, every(factors))
    whole = adapted()
    frozen = {name: p for name, p in whole.named_parameters() if not p.requires_grad}
    shared = sum(p.nbytes for name, p in frozen.items() if name.startswith("blocks."))
    outside = sum(p.nbytes for p in frozen.values()) - shared
    units = sum(unit.part.nbytes for unit in sharding.frozen)
    assert sharding.bytes_held()["frozen"] == units + outside
    assert 0 <= units * factors.params - shared <= 8 * 4 * 4 * len(sharding.frozen)
    state = ModelState(sharding).state_dict()
    return {
        name: (value.start, value.local.clone(), value.writes)
        for name, value in state.items()
        if name in frozen and name.startswith("blocks.")
    }


@pytest.mark.parametrize("factors", SHARDED, ids=lambda factors: "-".join(map(str, factors)))
def test_slices_of_frozen_parameters_are_written_once_and_make_the_whole(factors: ShardFactors) -> None:
    slices = ranks(4, held, factors)
    for name, parameter in adapted().named_parameters():
        if name in slices[0]:
            values = torch.full_like(parameter, torch.nan).view(-1)
            written = torch.zeros_like(values)
            for rank in slices:
                start, local, writes = rank[name]
                if writes:
                    values[start : start + len(local)] = local
                    written[start : start + len(local)] += 1
            assert (written == 1).all()
            assert torch.equal(values.view(parameter.shape), parameter)


def reloaded(channel: Channel, factors: ShardFactors) -> Any:
    sharding, model = Amsp(adapted(), channel, every(factors)), adapted()
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    sharding.summon()  # what is loaded then is not what was gathered before
    ModelState(sharding).load_state_dict(model.state_dict())
    sharding.detach()
    return {name: parameter.detach().clone() for name, parameter in sharding.model.named_parameters()}


def test_a_sharded_model_takes_whole_frozen_parameters() -> None:
    for parameters in ranks(4, reloaded, ShardFactors(2, 2, 4)):
        same(parameters, {name: p.detach() + 1.0 for name, p in adapted().named_parameters()}, relative=0)


def saved(channel: Channel, factors: ShardFactors) -> Any:
    sharding = Amsp(adapted(), channel, every(factors))
    state = sharding.model.state_dict()
    whole_state_dict(sharding, sharding.model, state, "", None)
    return {name: value.clone() for name, value in state.items()}


def test_the_state_of_a_loop_of_one_s_own_has_whole_frozen_parameters() -> None:
    for state in ranks(4, saved, ShardFactors(2, 2, 4)):
        same(state, adapted().state_dict(), relative=0)
