"""States of a model that ranks share: gradients of what several hold, the norm counted once, slices in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from regular_mesh import ParallelDegrees, regular
from torch import Tensor, nn

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.comm import Channel
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.optim import adamw
from espalier.optim.base import owned_by
from espalier.parallel.mesh import ProcessMesh
from espalier.parallel.model_cut import Holders, ModelCut, Slab
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.placement_plan import Spread
from espalier.recipe import Adamw
from espalier.train.worker import saving_group
from many_ranks.forks import forks
from many_ranks.ranks import ranks

STEPS = 3
ROWS = {2: ((0, 2), (2, 5)), 1: ((0, 5),)}


class Parts(nn.Module):
    """A matrix of which a rank has some rows, and two vectors that every rank has."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        matrix = torch.randn(5, 7, dtype=torch.float64, generator=draw)
        self.rows = range(first, last)
        self.matrix = nn.Parameter(matrix[first:last].clone())
        self.partly = nn.Parameter(torch.randn(3, dtype=torch.float64, generator=draw))
        self.wholly = nn.Parameter(torch.randn(4, dtype=torch.float64, generator=draw))

    def forward(self, sample: int) -> Tensor:
        """A loss whose parts over the ranks that share the matrix add up, but for `wholly`, which each computes."""
        rows = torch.tensor([row + 1.0 + sample for row in self.rows], dtype=torch.float64)
        tied = self.matrix.square().sum(1) @ rows + (self.partly.pow(3) * len(self.rows) * (1 + sample)).sum()
        return tied + (self.wholly.square() * (2 + sample)).sum()


def alone() -> tuple[dict[str, Tensor], list[float]]:
    model = Parts(0, 5)
    optimizer = adamw.build(Adamw(learning_rate=1e-2), owned_by(model))
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        sum(model(sample + step) for sample in range(4)).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step(1.0)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, norms


def cut_model(channel: Channel, tensor: int, factors: ShardFactors) -> Any:
    mesh = ProcessMesh(regular(ParallelDegrees(dp=channel.size() // tensor, tp=tensor)), channel, channel.rank())
    at, among = mesh.coordinates.tp, mesh.group("tp")
    first, last = ROWS[tensor][at]
    cut = ModelCut(mesh.replica)
    if tensor > 1:
        cut.slabs["matrix"] = Slab(torch.Size((5, 7)), (first, 0))
        cut.holders |= {"partly": Holders(tensor, among), "wholly": Holders(tensor)}
    sharding = Amsp(Parts(first, last), mesh.same_parameters or mesh.alone, Spread([("*", factors)]), cut)
    return mesh, sharding, adamw.build(Adamw(learning_rate=1e-2), sharding.owned)


def trained(channel: Channel, tensor: int, factors: ShardFactors, folder: Path | None = None) -> Any:
    mesh, sharding, optimizer = cut_model(channel, tensor, factors)
    norms, totals = [], []
    for step in range(STEPS):
        sharding.clear()
        each = 4 // (channel.size() // tensor)
        samples = [mesh.coordinates.dp * each + index for index in range(each)]
        for sample in samples:
            with sharding.accumulate(sample == samples[-1]):
                sharding.model(sample + step).backward()
        total = torch.tensor([1.0 * mesh.mesh.counts(mesh.rank)], dtype=torch.float64)
        sharding.wait(total)
        totals.append(float(total))
        norms.append(sharding.norm())
        optimizer.step(1.0)
        sharding.refresh()
    sharding.settle()
    if folder is not None:
        saved = Checkpoints(folder, group=saving_group(channel))
        saved.save(STEPS, sharding.parts(optimizer), {}, wait=True)
    sharding.summon()
    return {name: value.detach().clone() for name, value in sharding.model.state_dict().items()}, norms, totals


@pytest.mark.parametrize(
    ("world", "factors"),
    [
        (2, ShardFactors()),
        (4, ShardFactors()),
        (4, ShardFactors(1, 1, 2)),
        (4, ShardFactors(1, 2, 2)),
        (4, ShardFactors(2, 2, 2)),
    ],
)
def test_gradients_and_norms_of_a_shared_model_are_those_of_one_rank(world: int, factors: ShardFactors) -> None:
    wanted, norms = alone()
    for rank, (found, own, totals) in enumerate(ranks(world, trained, 2, factors)):
        first, last = ROWS[2][rank % 2]
        assert own == pytest.approx(norms, rel=1e-13)
        assert totals == [world / 2] * STEPS
        for name, value in wanted.items():
            part = value[first:last] if name == "matrix" else value
            torch.testing.assert_close(found[name], part, rtol=1e-13, atol=0)


def read(channel: Channel, tensor: int, factors: ShardFactors, folder: Path) -> Any:
    _, sharding, optimizer = cut_model(channel, tensor, factors)
    saved = Checkpoints(folder, group=saving_group(channel))
    saved.load(sharding.parts(optimizer))
    sharding.settle()
    sharding.summon()
    state = {key: value.local for key, value in sharding.parts(optimizer)["optimizer"].state_dict().items()}
    return {name: value.detach().clone() for name, value in sharding.model.state_dict().items()}, state


def test_a_checkpoint_holds_the_whole_model_whatever_cut_it(tmp_path: Path) -> None:
    parts = forks(4, trained, 2, ShardFactors(1, 2, 2), tmp_path)
    whole = {name: value for name, value in parts[0][0].items() if name != "matrix"}
    whole["matrix"] = torch.cat([parts[0][0]["matrix"], parts[1][0]["matrix"]])
    one, state = forks(1, read, 1, ShardFactors(), tmp_path)[0]
    assert all(torch.equal(one[name], value) for name, value in whole.items())
    again = forks(2, read, 2, ShardFactors(), tmp_path)
    assert torch.equal(torch.cat([found["matrix"] for found, _ in again]), whole["matrix"])
    momentum = torch.cat([own["matrix/exp_avg"] for _, own in again])
    assert torch.equal(momentum, state["matrix/exp_avg"])
    assert momentum.abs().min() > 0
