"""Gradients of grids between ranks: what `sparse` sends is the dense exchange bit for bit, in the bytes of its formula,
and it is chosen where links are slow and a step touches little."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.comm import Channel, compressed_collectives, sparse_blocks, wire_format
from espalier.comm.codecs import codec
from espalier.machine.cluster import Cluster, loads
from espalier.mechanisms.codecs import choice as codecs
from espalier.mechanisms.codecs import sparse
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.parallel.workload import Shard
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.placement_plan import Spread
from espalier.plan.request import Request
from espalier.radiance.workload import RadianceWorkload
from espalier.recipe import recipe_file
from espalier.train import request_from_recipe, workload_registry
from many_ranks import forks, same

ROOT = Path(__file__).parents[2]
RAYS, STEPS = 48, 3


def opened(*changes: str) -> RadianceWorkload:
    options = ["data.path=knot:views=6,size=16", "model.resolution=24", "model.width=8", f"train.batch_tokens={RAYS}"]
    recipe = recipe_file.load(ROOT / "examples" / "scene.toml", [*options, "model.kind=spikingnerf", *changes])
    found = workload_registry.open_workload(workload_registry.settle(recipe, ROOT))
    assert isinstance(found, RadianceWorkload)
    return found


def backward(workload: RadianceWorkload, model: nn.Module, step: int, place: tuple[int, int]) -> None:
    rank, ranks = place
    shard = Shard(rank * RAYS // ranks, (rank + 1) * RAYS // ranks, RAYS)
    loss, _ = workload.loss(model, workload.batches(step, shard)[0])
    (loss / RAYS).backward()


def bytes_by_hand(gradients: list[Tensor], rank: int) -> float:
    """What a rank sends of its own gradients [n] to the owners of their parts, and of the sum of its part to all."""
    ranks, sent = len(gradients), 0

    def of(values: Tensor) -> float:
        blocks = int(nn.functional.pad(values != 0, (0, -len(values) % 64)).view(-1, 64).any(1).sum())
        return wire_format.HEADER + sparse.sent_bytes(len(values), blocks, int((values != 0).sum()))

    for owner, (start, stop) in enumerate(pairwise(compressed_collectives.parts(len(gradients[0]), ranks))):
        for piece in compressed_collectives.pieces(start, stop):
            if owner != rank:
                sent += of(gradients[rank][piece])
            else:
                sent += (ranks - 1) * of(torch.stack([one[piece] for one in gradients]).sum(0))
    return sent


def _trained(channel: Channel | None, name: str) -> Any:
    """(parameters after some steps, bytes sent as gradients in the first, this rank's own gradient of each unit)."""
    workload = opened()
    model = workload.build(torch.device("cpu"), torch.float32)
    spread = Spread(factors=[("*", ShardFactors())], codecs={("gradients", "inside"): name}, bucket_bytes=1 << 30)
    sharding, sent, own = Amsp(model, channel, spread), 0.0, list[Tensor]()
    place = (0, 1) if channel is None else (channel.rank(), channel.size())
    optimizer = torch.optim.Adam([one.tensor for one in sharding.owned], lr=1e-2, foreach=False)
    for step in range(STEPS):
        sharding.clear()
        with sharding.accumulate(True):
            backward(workload, model, step, place)
        if step == 0 and channel is not None:
            alone = workload.build(torch.device("cpu"), torch.float32)
            backward(workload, alone, step, place)
            grads = {n: p.grad.flatten() for n, p in alone.named_parameters() if p.grad is not None}
            own = [torch.cat([grads[slot.name] for slot in flat.slots]) for flat in sharding.flats]
            own = [nn.functional.pad(one, (0, flat.length - len(one))) for one, flat in zip(own, sharding.flats)]  # noqa: B905
        sharding.wait()
        if step == 0 and channel is not None:
            sent = channel.ledger.bytes["gradients", "all_reduce"]
        optimizer.step()
        sharding.refresh()
    sharding.detach()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, sent, own


def _both(channel: Channel) -> Any:
    return _trained(channel, "sparse"), _trained(channel, "split")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sparse_gradients_are_the_dense_ones_bit_for_bit_in_the_formulas_bytes(ranks: int) -> None:
    torch.set_num_threads(1)
    plain, _, _ = _trained(None, "exact")
    found = forks(ranks, _both, timeout=100.0)
    for few, dense in found:
        same(few[0], dense[0], bitwise=True)
        same(few[0], plain, relative=1e-3)
    units = list(zip(*(few[2] for few, _ in found), strict=True))
    for rank, ((_, sent, _), _) in enumerate(found):
        large = [list(one) for one in units if one[0].nbytes >= compressed_collectives.SMALL]
        assert sent == sum(bytes_by_hand(one, rank) for one in large)
        raw = sum(2 * (ranks - 1) / ranks * one[0].nbytes for one in large)
        assert sent < raw / 1.2


def test_the_formula_is_the_codecs() -> None:
    for share, run in ((0.0, 1), (0.02, 1), (0.1, 12), (0.5, 24), (1.0, 1)):
        draw = torch.Generator().manual_seed(1)
        rows = (torch.rand(60_000 // run + 1, generator=draw) < share).repeat_interleave(run)[:60_000]
        values = rows * (1 + torch.rand(60_000, generator=draw))
        wire = codec("sparse").encode(values)
        assert wire is not None
        blocks = int(nn.functional.pad(rows, (0, -60_000 % 64)).view(-1, 64).any(1).sum())
        assert len(wire) == sparse.sent_bytes(60_000, blocks, int(rows.sum()))
        assert values.nbytes / len(wire) == pytest.approx(sparse_blocks.ratio(share, run), rel=0.1)


# --- as the planner sees it --------------------------------------------------------------------------------------

HOST = '[[nodes]]\nname = "{}"\ncores = 2\nmemory = "8GiB"\n[nodes.device]\nname = "cpu"\nkind = "cpu"\n'
HOST += "memory = 8589934592\nmemory_bandwidth = 1e10\nflops = {{ fp32 = 4e10 }}\n"
HOST += 'codecs = [["int8", 3.94, 4e9, 6e9], ["sparse", 0.97, 7e8, 7e8], ["split", 1.19, 3e8, 5e8]]\n'


def machines(between: str) -> Cluster:
    links = f'[links]\nbetween = {{ bandwidth = "{between}", latency = "100us" }}\n'
    return loads("".join(HOST.format(name) for name in "ab") + links)


def asked(*changes: str) -> Request:
    workload = opened(*changes)
    return request_from_recipe.of_recipe(workload.recipe, lambda: workload)


def test_the_planner_takes_sparse_gradients_where_a_step_touches_little_and_says_so() -> None:
    large, dense = asked("model.resolution=96", "train.batch_tokens=256"), asked("train.batch_tokens=4096")
    assert large.profile.sparse > 5
    assert dense.profile.sparse < 1
    for request, expected in ((large, "sparse"), (dense, "int8")):
        taken, why = codecs.encoded(request.changed(codec="auto"), machines("100Mbit/s"))
        crossing = taken.crossings.get("gradients")
        assert crossing is not None
        assert (crossing.codec, crossing.lossy) == (expected, expected == "int8")
        assert any("codec sparse" in line for line in why)
    fast, _ = codecs.encoded(large.changed(codec="auto"), machines("100Gbit/s"))
    assert not fast.crossings


def test_the_share_that_a_step_touches_is_near_what_the_plan_says() -> None:
    """At most twice what is sent, and hardly less: what masks leave out is not foreseen."""
    workload = opened("model.resolution=40", "train.batch_tokens=48")
    model = workload.build(torch.device("cpu"), torch.float32)
    backward(workload, model, 0, (0, 1))
    grids = [p.grad.flatten() for n, p in model.named_parameters() if n.endswith("values") and p.grad is not None]
    wire = sum(len(found) for one in grids if (found := codec("sparse").encode(one)) is not None)
    assert 0.9 < sum(one.nbytes for one in grids) / wire / workload.sparse_gradients() < 2
