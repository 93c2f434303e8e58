"""`espalier.apply` with ranks that share matrices: an ordinary loop round a model that carries a `tp_plan`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.comm import Channel
from espalier.machine import cluster
from espalier.plan import base as plans
from espalier.recipe.errors import UserError
from many_ranks.forks import forks
from many_ranks.ranks import ranks

STEPS, ROWS = 3, 8


def llama(tied: bool, heads: int = 4) -> Any:
    with warnings.catch_warnings():  # transformers on import: its own use of deprecated parts of torch and Python
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
            num_key_value_heads=heads // 2, max_position_embeddings=32, tie_word_embeddings=tied, pad_token_id=3,
        )  # fmt: skip
        return LlamaForCausalLM(config).double()


def plan_of(world: int, tensor: int, shard: int) -> plans.Plan:
    groups = world // tensor
    held = tuple(range(0, world, tensor))[:shard] if shard > 1 else ()
    each = ROWS // groups
    return plans.Plan(
        ranks=tuple(plans.Rank(share=(each * (n // tensor), each * (n // tensor + 1))) for n in range(world)),
        units=(plans.Unit(optimizer=held),),
        stages=(plans.Stage(ranks=tuple(range(world)), layers=(0, 1), tensor=tensor),),
        micro_batch=each,
        algorithm="megatron",
    )


def made_plan(model: nn.Module, tensor: int) -> plans.Plan:
    """What the planner says of `tensor` ranks."""
    machine = cluster.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n')
    plan = espalier.make_plan(model, machine, batch=ROWS, ranks=tensor, tp=tensor)
    assert [(stage.ranks, stage.tensor) for stage in plan.stages] == [(tuple(range(tensor)), tensor)]
    return plan


def looped(model: Any, optimizer: Any, start: int, stop: int) -> Any:
    """An ordinary loop: (losses, norms before clipping, states)."""
    draw = torch.Generator().manual_seed(4)
    data = torch.randint(0, 64, (ROWS, 12), generator=draw)[start:stop]
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=data[:, :-1]).logits  # its own loss is in float32
        loss = F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, norms, state, optimizer.state_dict()


def applied(channel: Channel, tensor: int, shard: int, tied: bool) -> Any:
    model = llama(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = plan_of(channel.size(), tensor, shard) if channel.size() > tensor else made_plan(model, tensor)
    model, optimizer = espalier.apply(plan, model, optimizer, group=channel)
    shape = tuple(model.model.layers[0].mlp.gate_proj.weight.shape)
    found = looped(model, optimizer, *plan.ranks[channel.rank()].share)
    for value in model.parameters():
        value.data.zero_()
    model.load_state_dict(found[2])
    again = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.load_state_dict(found[3])
    assert all(torch.equal(again[name], value) for name, value in found[2].items())
    return *found, shape


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world", "tensor", "shard", "tied"),
    [(2, 2, 1, False), pytest.param(2, 2, 1, True, marks=pytest.mark.slow), (4, 2, 2, True)],
)
def test_a_llama_of_transformers_trains_as_it_does_uncut(world: int, tensor: int, shard: int, tied: bool) -> None:
    model = llama(tied)
    losses, norms, state, states = looped(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 0, ROWS)
    results = forks(world, applied, tensor, shard, tied, timeout=60.0)
    mean = [sum(one[0][step] for one in results) / world for step in range(STEPS)]
    assert mean == pytest.approx(losses, rel=1e-12)
    for _, own_norms, own, own_states, shape in results:
        assert shape == (48 // tensor, 32)
        assert own_norms == pytest.approx(norms, rel=1e-11)
        assert own.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-11)
        for number, kinds in states["state"].items():
            torch.testing.assert_close(own_states["state"][number]["exp_avg"], kinds["exp_avg"], rtol=1e-8, atol=1e-12)


def refused(channel: Channel, model: nn.Module) -> UserError:
    with pytest.raises(UserError) as caught:
        espalier.apply(plan_of(channel.size(), channel.size(), 1), model, torch.optim.SGD(model.parameters(), lr=0.1))
    return caught.value


def test_a_model_that_does_not_say_how_is_refused_with_what_it_would_have_to_say() -> None:
    error = ranks(2, lambda channel: refused(channel, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))[0]
    assert "Sequential does not say how ranks may share its matrices" in error.what
    assert "_tp_plan = {" in error.do

    def error(style: str, module: nn.Module, name: str = "0") -> str:
        odd = nn.Sequential(module)
        odd._tp_plan = {name: style}  # type: ignore[assignment]
        return str(ranks(2, lambda channel: refused(channel, odd))[0].what)

    assert "'sideways' of 0" in error("sideways", nn.Linear(4, 4))
    assert "Ranks cannot share 0: Conv1d is no plain Linear." in error("colwise", nn.Conv1d(4, 4, 1))
    assert "None of the modules that ranks are to share is in Sequential." in error("colwise", nn.Linear(4, 4), "7")


def test_heads_that_ranks_cannot_share_equally_are_refused_with_the_nearest_degree() -> None:
    llama(False)  # transformers is imported once
    error = ranks(4, lambda channel: refused(channel, llama(False)))[0]
    assert error.what == "tp = 4 ranks cannot share 2 heads equally."
    assert error.do == "tp = 2"
