"""Parameters are here when they are used, and not longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import ROWS, Odd, every, loss, one_step, plain, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from espalier.comm import Channel
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.optim import adamw
from espalier.plan.axes.placement import ShardFactors
from espalier.recipe import Adamw
from espalier.recipe.errors import UserError
from many_ranks import ranks, same

STEPS = 5


class AttendingLayer(nn.Module):
    """A block with an attention that bears its name, and a feed-forward after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Both, one after the other."""
        return self.mlp(torch.tanh(self.attn(x)))


def _order(channel: Channel, prefetch: Any, again: bool, attends: bool) -> tuple[list[str], list[Tensor]]:
    """What begins in the second step of three blocks, and the weights after it."""
    model = nn.Sequential(*(AttendingLayer(3) if attends else nn.Linear(3, 3) for _ in range(3)))
    draw = torch.Generator().manual_seed(3)  # one of its own: ranks are threads
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=draw)
    for block in model if again else ():
        block.forward = lambda x, inner=block.forward: checkpoint(inner, x, use_reentrant=False)
    sharding = Amsp(model, channel, every(ShardFactors(2, 2, 2), prefetch=prefetch))
    optimizer = adamw.build(Adamw(learning_rate=1e-2), sharding.owned)
    said: list[str] = []
    for flat in sharding.flats:

        def gather(flat: Any = flat, plain: Any = flat.gather) -> Any:
            said.append(f"gather {flat.slots[0].name[0]}")
            return plain()

        flat.gather = gather  # type: ignore[method-assign]
    for number, block in enumerate(model):
        for name, module in block.named_children() if attends else [("block", block)]:
            module.register_forward_pre_hook(lambda *_, said_=f"{name} {number}": said.append(said_))
    for _ in range(2):
        said.clear()
        sharding.clear()
        with sharding.accumulate(last=True):
            model(torch.ones(1, 3)).sum().backward()
        sharding.wait()
        optimizer.step(1.0)
        sharding.refresh()
    return list(said), list(whole(sharding).values())


FORWARD = {
    "block": "gather 0, gather 1, attn 0, mlp 0, gather 2, attn 1, mlp 1, attn 2, mlp 2",
    "attention": "gather 0, attn 0, gather 1, mlp 0, attn 1, gather 2, mlp 1, attn 2, mlp 2",
    "none": "gather 0, attn 0, mlp 0, gather 1, attn 1, mlp 1, gather 2, attn 2, mlp 2",
}
RECOMPUTED = {
    "block": "gather 1, attn 2, mlp 2, gather 0, attn 1, mlp 1, attn 0, mlp 0",
    "attention": "attn 2, gather 1, mlp 2, attn 1, gather 0, mlp 1, attn 0, mlp 0",
    "none": "attn 2, mlp 2, gather 1, attn 1, mlp 1, gather 0, attn 0, mlp 0",
}


@pytest.mark.parametrize("again", [False, True])
def test_the_next_block_is_gathered_from_the_chosen_moment_on(again: bool) -> None:
    """The last block stays from forward to backward. Weights are the same bit for bit."""
    weights = []
    for prefetch, forward in FORWARD.items():
        for said, found in ranks(2, _order, prefetch, again, True):
            assert ", ".join(said) == f"{forward}, {RECOMPUTED[prefetch] if again else 'gather 1, gather 0'}"
            weights.append(found)
    assert all(torch.equal(one, other) for found in weights[1:] for one, other in zip(found, weights[0], strict=True))


def test_blocks_without_attention_gather_the_next_one_as_they_begin() -> None:
    said = [ranks(2, _order, prefetch, False, False)[0][0] for prefetch in ("block", "attention")]
    assert said[0] == said[1] == ["gather 0", "gather 1", "block 0", "gather 2", *said[0][4:]]


def _evaluated_by_some(channel: Channel, factors: ShardFactors) -> float:
    """The loss of eight rows, after a step, of which ranks that have none only wait for the sum."""
    rank, world = channel.rank(), channel.size()
    model = Odd(torch.float64)
    sharding = Amsp(model, channel, every(factors))
    one_step(sharding, adamw.build(Adamw(learning_rate=1e-2), sharding.owned), 0, 1, (rank, world))
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        if rank % 3 == 0:
            total += loss(model, range(8 * (rank // 3) // 3, 8 * (rank // 3 + 1) // 3))
        sharding.idle(rank % 3 != 0)
    channel.allreduce([total]).wait()
    return float(total)


@pytest.mark.parametrize("factors", [ShardFactors(1, 1, 1), ShardFactors(1, 2, 4), ShardFactors(2, 4, 8)])
def test_ranks_without_a_forward_pass_bring_parameters_to_those_that_have_one(factors: ShardFactors) -> None:
    """Their exchanges go on too, also those of several stages."""
    found = ranks(8, _evaluated_by_some, factors)
    same(found, [found[0]] * 8)
    same(found[0], ranks(8, _evaluated_by_some, ShardFactors(1, 1, 8))[0], relative=1e-12)


def _bypassed(channel: Channel) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    sharding = Amsp(model, channel, every(ShardFactors(2, 2, 2)))
    with sharding.accumulate(last=True):
        nn.functional.linear(torch.ones(1, 3), model[1].weight, model[1].bias).sum().backward()


def test_a_sharded_block_that_is_not_called_is_named() -> None:
    with pytest.raises(
        UserError, match=r"'1.(weight|bias)' got a gradient, but the module that holds it was never called"
    ):
        ranks(2, _bypassed)


def _checkpointed(channel: Channel, factors: ShardFactors) -> dict[str, Tensor]:
    model = Odd()
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    sharding = Amsp(model, channel, every(factors))
    optimizer = adamw.build(Adamw(learning_rate=1e-2), sharding.owned)
    for step in range(STEPS):
        one_step(sharding, optimizer, step, 2, (channel.rank(), channel.size()))
    return whole(sharding)


@pytest.mark.parametrize("factors", [ShardFactors(), ShardFactors(2, 2, 2), ShardFactors(1, 2, 2)])
def test_activation_checkpointing_changes_nothing(factors: ShardFactors) -> None:
    expected = plain(torch.float64, STEPS)["parameters"]
    for parameters in ranks(2, _checkpointed, factors):
        same(parameters, expected, relative=1e-12)


def _memory(channel: Channel) -> Any:
    sharding = Amsp(Odd(layers=6), channel, every(ShardFactors(2, 2, 2)))
    most, inner = [0], sharding._windows._enter

    def counted(window: Any) -> None:
        inner(window)
        here = [flat for flat in sharding.flats if flat.gathered or flat.gathering is not None]
        most[0] = max(most[0], sum(flat not in sharding._windows._root.flats for flat in here))

    sharding._windows._enter = counted  # type: ignore[method-assign]
    with sharding.accumulate(last=True):
        loss(sharding.model, range(ROWS)).backward()
    sharding.wait()
    stored = sum(flat.full.untyped_storage().nbytes() for flat in sharding.flats)
    return most[0], stored, all(bool(torch.isnan(p).all()) for p in sharding.model.blocks.parameters())


def test_of_sharded_parameters_two_blocks_are_here_at_a_time_and_none_afterwards() -> None:
    for most, stored, gone in ranks(2, _memory):
        assert most == 2
        assert stored == 0
        assert gone, "a parameter that is not here reads as not a number"
