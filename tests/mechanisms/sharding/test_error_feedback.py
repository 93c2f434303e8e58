"""Gradients through codecs: lossless ones change nothing, lossy ones train with feedback, saved and resharded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.checkpoint import state_tree
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.comm import Channel, compressed_collectives
from espalier.comm.codecs import codec
from espalier.mechanisms.codecs.lowbit import Lowbit
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.mechanisms.sharding.flat_parameter import FlatParameter, ParameterSlot
from espalier.optim import adamw
from espalier.plan.axes.flat_layout import Arranged
from espalier.plan.axes.placement import ShardFactors, Span
from espalier.plan.axes.placement_plan import Spread
from espalier.recipe import Adamw
from many_ranks import forks, same

STEPS = 6
TRIPLES = [ShardFactors(), ShardFactors(1, 1, 2), ShardFactors(1, 2, 4), ShardFactors(2, 2, 4), ShardFactors(4, 4, 4)]
TWO_NODES = [0, 0, 1, 1]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 64)).double()


def spread(factors: ShardFactors, name: str, level: str = "inside", **more: Any) -> Spread:
    return Spread(factors=[("*", factors)], codecs={("gradients", level): name, ("parameters", level): name}, **more)


def rows(step: int, part: int, of: int) -> tuple[Tensor, float]:
    """The part-th of so many parts of 32 samples, and its share."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(32, 64, dtype=torch.float64, generator=draw)
    return x.chunk(of)[part], 1 / 32


def one_step(sharding: Amsp, optimizer: Any, step: int, place: tuple[int, int], accumulate: int = 1) -> None:
    rank, world = place
    sharding.clear()
    for index in range(accumulate):
        with sharding.accumulate(index == accumulate - 1):
            x, share = rows(step, rank * accumulate + index, world * accumulate)
            (sharding.model(x) - x.flip(1)).square().sum().mul(share).backward()
    sharding.wait()
    optimizer.step(1.0)
    sharding.refresh()


def made(channel: Channel | None, how: Spread) -> tuple[Amsp, Any]:
    sharding = Amsp(net(), channel, how)
    return sharding, adamw.build(Adamw(learning_rate=3e-3), sharding.owned)


def parameters(sharding: Amsp) -> dict[str, Tensor]:
    sharding.detach()
    return {name: one.detach().clone() for name, one in sharding.model.named_parameters()}


def trained(channel: Channel | None, how: Spread, steps: int = STEPS, accumulate: int = 1) -> dict[str, Tensor]:
    sharding, optimizer = made(channel, how)
    place = (0, 1) if channel is None else (channel.rank(), channel.size())
    for step in range(steps):
        one_step(sharding, optimizer, step, place, accumulate)
    return parameters(sharding)


def loss(values: dict[str, Tensor]) -> float:
    model = net()
    model.load_state_dict(values)
    x, share = rows(999, 0, 1)
    with torch.no_grad():
        return float((model(x) - x.flip(1)).square().sum() * share)


def _every_triple(channel: Channel, name: str, accumulate: int) -> Any:
    found = []
    for factors in TRIPLES:
        found.append(trained(channel, spread(factors, name), accumulate=accumulate))
        found.append(trained(channel, spread(factors, name, "between", nodes=TWO_NODES), accumulate=accumulate))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["split", pytest.param("mpc", marks=pytest.mark.slow)])
def test_lossless_codecs_train_as_one_rank_does(name: str) -> None:
    plain = trained(None, Spread())
    for results in forks(4, _every_triple, name, 1, timeout=55.0):
        for found in results:
            same(found, plain, relative=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_int8_with_feedback_trains_under_every_triple(accumulate: int) -> None:
    plain, start = loss(trained(None, Spread())), loss(dict(net().state_dict()))
    first, *others = forks(4, _every_triple, "int8", accumulate, timeout=55.0)
    for other in others:
        same(other, first, bitwise=True)
    for found in first:
        assert abs(loss(found) - plain) < 0.02 * (start - plain)


class There(Lowbit):
    """int8 with kernels for a device without memory."""

    def runs_on(self, device: str) -> bool:
        return device == "meta"


@pytest.mark.parametrize("name", ["int8", "topk:0.01", "split"])
def test_a_residual_is_beside_the_parameters_where_they_are_encoded(name: str) -> None:
    """A tensor without values stands for a GPU's."""
    parameter = nn.Parameter(torch.empty(4, 6, device="meta", dtype=torch.bfloat16))
    rounding = {"int8": [There(8)], "topk:0.01": [codec("topk:0.01")], "split": []}[name]
    mesh: Any = SimpleNamespace(held=lambda length, state: Span(0, length), rounding=rounding)
    flat = FlatParameter([ParameterSlot("one", parameter, 0)], Arranged((0,), (0,), 32), mesh)
    if name == "split":
        assert flat.residual is None
        return
    assert flat.residual is not None
    assert flat.residual.device == (parameter.device if name == "int8" else torch.device("cpu"))
    assert (flat.residual.dtype, flat.residual.shape) == (torch.float32, (32,))


def _with_and_without(channel: Channel) -> Any:
    """Twenty times fewer bits than int8: only what is carried over brings them to every parameter."""
    found = []
    for keeps in (True, False):
        sharding, optimizer = made(channel, spread(ShardFactors(), "topk:0.02"))
        for step in range(20):
            for flat in sharding.flats:
                if flat.residual is not None and not keeps:
                    flat.residual.zero_()
            one_step(sharding, optimizer, step, (channel.rank(), channel.size()))
        found.append(parameters(sharding))
    return found


def test_feedback_brings_what_topk_left_out() -> None:
    kept, dropped = forks(2, _with_and_without)[0]
    assert loss(kept) < loss(dropped)


def _total(sharding: Amsp) -> dict[str, Tensor]:
    """This rank's residuals by parameter."""
    found = {}
    for flat in sharding.flats:
        assert flat.residual is not None
        for slot in flat.slots:
            found[slot.name] = flat.residual[slot.span.start : slot.span.stop].clone()
    return found


def _unbroken(channel: Channel, folder: Path, factors: ShardFactors) -> Any:
    """(parameters at the end, residuals right after saving)."""
    sharding, optimizer = made(channel, spread(factors, "int4"))
    group = torch.distributed.new_group(backend="gloo")
    place = (channel.rank(), channel.size())
    kept = {}
    for step in range(STEPS):
        if step == STEPS // 2:
            Checkpoints(folder, group=group).save(step, sharding.parts(optimizer), {}, wait=True)
            kept = _total(sharding)
        one_step(sharding, optimizer, step, place)
    return parameters(sharding), kept


def _resumed(channel: Channel, folder: Path, factors: ShardFactors) -> Any:
    sharding, optimizer = made(channel, spread(factors, "int4"))
    group = torch.distributed.new_group(backend="gloo")
    assert Checkpoints(folder, group=group).load(sharding.parts(optimizer)) is not None
    kept = _total(sharding)
    for step in range(STEPS // 2, STEPS):
        one_step(sharding, optimizer, step, (channel.rank(), channel.size()))
    return parameters(sharding), kept


@pytest.mark.extremes
@pytest.mark.parametrize(
    "factors",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in (ShardFactors(), ShardFactors(4, 4, 4))),
        ShardFactors(1, 2, 4),
    ],
)
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(factors: ShardFactors, tmp_path: Path) -> None:
    unbroken = forks(4, _unbroken, tmp_path, factors)
    same(forks(4, _resumed, tmp_path, factors), unbroken, bitwise=True)


def _saved_at(channel: Channel, when: list[set[int]]) -> Any:
    """The parameters at the end of runs that saved after some steps."""
    found = []
    for steps in when:
        sharding, optimizer = made(channel, spread(ShardFactors(1, 1, 2), "int4"))
        parts = sharding.parts(optimizer)
        for step in range(STEPS):
            one_step(sharding, optimizer, step, (channel.rank(), channel.size()))
            if step in steps:
                state_tree.flatten(parts)
        found.append(parameters(sharding))
    return found


def test_when_a_run_saves_changes_no_bit_of_it() -> None:
    """How often it does follows measured times."""
    for never, once, often in forks(2, _saved_at, [set(), {1}, {0, 2, 3}], timeout=55.0):
        same(once, never, bitwise=True)
        same(often, never, bitwise=True)


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("ranks", "factors"),
    [
        (2, ShardFactors(1, 1, 2)),
        pytest.param(4, ShardFactors(1, 1, 4), marks=pytest.mark.slow),
        pytest.param(6, ShardFactors(1, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_on_other_ranks_and_shards_the_sum_of_the_residuals_is_kept(
    ranks: int, factors: ShardFactors, tmp_path: Path
) -> None:
    before = [kept for _, kept in forks(4, _unbroken, tmp_path, ShardFactors(1, 2, 4))]
    after = [kept for _, kept in forks(ranks, _resumed, tmp_path, factors)]
    for name in before[0]:
        total = sum(one[name] for one in before)
        assert total.abs().max() > 0
        same(sum(one[name] for one in after), total, relative=1e-12)


def _booked(channel: Channel) -> Any:
    sharding, optimizer = made(channel, spread(ShardFactors(), "int8"))
    before = dict(channel.ledger.bytes)
    one_step(sharding, optimizer, 0, (channel.rank(), channel.size()))
    sent = channel.ledger.bytes["gradients", "all_reduce"] - before.get(("gradients", "all_reduce"), 0)
    lengths = [flat.length for flat in sharding.flats]
    held = sharding.bytes_held()["feedback"]
    sharding.detach()
    return sent, lengths, held


def test_the_ledger_has_the_formulas_bytes() -> None:
    for rank, (sent, lengths, held) in enumerate(forks(2, _booked)):
        assert sent == sum(
            compressed_collectives.sent_bytes(codec("int8"), "all_reduce", length, (rank, 2)) for length in lengths
        )
        assert held == 8 * sum(lengths)
