from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from espalier import comm
from espalier.comm import Channel, Traffic, traffic
from many_ranks import forks, ranks, same

WIDTH = 12


def _net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, WIDTH)).to(dtype)


def _batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def _grads(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def _plain() -> tuple[Tensor, dict[str, Tensor]]:
    model = _net()
    out = model(_batch())
    out.square().sum().backward()
    return out.detach(), _grads(model)


# --- foreign code through the Channel ---


def _tensor_parallel(channel: Channel) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    assert isinstance(mesh.get_group(), Channel)
    model = parallelize_module(_net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = model(_batch())
    out.square().sum().backward()
    calls = dict(channel.ledger.calls), dict(channel.ledger.bytes)
    return out.detach(), _grads(model), calls


def test_tensor_parallel_runs_through_the_channel() -> None:
    for out, grads, (calls, sent) in forks(2, _tensor_parallel):
        same((out, grads), _plain(), relative=1e-12)
        # Rowwise ends in one all-reduce of [8, 12] doubles forward; Colwise in one of the same input's gradient,
        # which nobody asked for here. Two ranks send 2 · 1/2 of it.
        assert sent["activations", "all_reduce"] == 8 * WIDTH * 8 * calls["activations", "all_reduce"]
        assert calls["activations", "all_reduce"] >= 1


def _fsdp(channel: Channel) -> Any:
    channel.default_traffic = Traffic.PARAMETERS
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(_net(), mesh=mesh)
    rows = _batch().chunk(2)[channel.rank()]
    out = model(rows)
    (out.square().sum() * 2).backward()  # FSDP2 averages over ranks
    sent = dict(channel.ledger.bytes)
    return out.detach(), _grads(model), sent


def test_fsdp2_runs_through_the_channel_and_its_bytes_are_the_formulas() -> None:
    expected_out, expected_grads = _plain()
    results = forks(2, _fsdp)
    same(torch.cat([out for out, _, _ in results]), expected_out, relative=1e-12)
    whole = sum(parameter.nbytes for parameter in _net().parameters())
    for _, grads, sent in results:
        same(grads, expected_grads, relative=1e-12)
        # dims of 20 and 12 divide by two, so nothing is padded: forward gathers, backward gathers again and scatters
        assert sent["parameters", "reduce_scatter"] == whole / 2
        assert sent["parameters", "all_gather"] == whole / 2  # the root module keeps its parameters for backward


class _Stage(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


def _pipeline(channel: Channel, kind: type) -> Any:
    rank = channel.rank()
    net = _net()
    part = _Stage(net[:2] if rank == 0 else net[2:])
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pipelining's own notices about shape inference
        schedule = kind(stage, n_microbatches=4, loss_fn=lambda out, _: out.square().sum(), scale_grads=False)
        for _ in range(2):  # in the first step the stages also tell each other their shapes
            before = dict(channel.ledger.bytes)
            part.zero_grad()
            if rank == 0:
                schedule.step(_batch())
            else:
                schedule.step(target=_batch(), losses=[])
    key = ("activations", "send")
    return _grads(part), channel.ledger.bytes[key] - before.get(key, 0)


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_pipelining_runs_through_the_channel(kind: type) -> None:
    _, grads = _plain()
    (first, sent0), (second, sent1) = forks(2, _pipeline, kind)
    found = {name.removeprefix("layers."): grad for name, grad in {**first, **second}.items()}
    same(found, grads, relative=1e-12)
    hidden = 8 * 20 * 8  # [8 rows, 20] doubles, forward from rank 0 and its gradient back from rank 1
    assert (sent0, sent1) == (hidden, hidden)


def _ddp(channel: Channel) -> Any:
    model = nn.parallel.DistributedDataParallel(_net(), gradient_as_bucket_view=True)
    model(_batch().chunk(2)[channel.rank()]).square().sum().backward()
    return {name: grad * 2 for name, grad in _grads(model.module).items()}, dict(channel.ledger.bytes)


def test_ddp_runs_through_the_channel() -> None:
    _, grads = _plain()
    for found, sent in forks(2, _ddp):
        same(found, grads, relative=1e-12)
        assert sent["activations", "all_reduce"] >= sum(grad.nbytes for grad in grads.values())


# --- every operation, on real Gloo and on threads ---


def _every_operation(channel: Channel) -> dict[str, Any]:
    n, rank = channel.size(), channel.rank()
    mine = torch.arange(3.0) + 10 * rank
    found: dict[str, Any] = {}
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        total = mine.clone()
        dist.all_reduce(total, getattr(dist.ReduceOp, op))
        found[f"all_reduce {op}"] = total
    for op in ("SUM", "AVG", "MAX"):
        part = torch.empty(3)
        dist.reduce_scatter_single(part, torch.cat([mine + r for r in range(n)]), op=getattr(dist.ReduceOp, op))
        found[f"reduce_scatter {op}"] = part
    bits = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter_single(bits, torch.arange(2 * n) | 1 << rank + 4, op=dist.ReduceOp.BOR)
    found["reduce_scatter BOR"] = bits
    part = torch.empty(3)
    dist.reduce_scatter(part, [mine + r for r in range(n)])
    found["reduce_scatter list"] = part
    whole = torch.empty(3 * n)
    dist.all_gather_single(whole, mine)
    found["all_gather"] = whole
    parts = [torch.empty(3) for _ in range(n)]
    dist.all_gather(parts, mine)
    found["all_gather list"] = parts
    found["broadcast"] = mine.clone()
    dist.broadcast(found["broadcast"], src=n - 1)
    found["reduce"] = mine.clone()
    dist.reduce(found["reduce"], dst=0)
    if rank:
        del found["reduce"]  # undefined off the root
    gathered = [torch.empty(3) for _ in range(n)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    found["gather"] = gathered
    found["scatter"] = torch.empty(3)
    dist.scatter(found["scatter"], [mine + r for r in range(n)] if rank == 0 else None, src=0)
    crossed = torch.empty(2 * n)
    dist.all_to_all_single(crossed, torch.arange(2.0 * n) + 100 * rank)
    found["all_to_all"] = crossed
    uneven = [torch.empty(rank + 1) for _ in range(n)]
    dist.all_to_all(uneven, [torch.full((r + 1,), float(rank)) for r in range(n)])
    found["all_to_all list"] = uneven
    message = torch.empty(3)
    work = dist.irecv(message, (rank - 1) % n)
    dist.send(mine, (rank + 1) % n)
    assert work is not None
    work.wait()
    found["message"] = message
    dist.barrier()
    found["objects"] = [None] * n
    dist.all_gather_object(found["objects"], {"rank": rank})
    found["calls"] = channel.ledger.calls
    found["bytes"] = channel.ledger.bytes
    return found


def test_threads_and_forks_agree_on_every_operation_and_its_bytes() -> None:
    for real, threaded in zip(forks(3, _every_operation), ranks(3, _every_operation), strict=True):
        same(threaded, real)


def test_every_operation_gives_what_its_name_says() -> None:
    for rank, found in enumerate(ranks(3, _every_operation)):
        base = torch.arange(3.0)
        everyone = [base + 10 * r for r in range(3)]
        same(found["all_reduce SUM"], sum(everyone))
        same(found["all_reduce PRODUCT"], everyone[0] * everyone[1] * everyone[2])
        same(found["reduce_scatter SUM"], sum(everyone) + 3 * rank)
        same(found["reduce_scatter AVG"], sum(everyone) / 3 + rank)
        same(found["reduce_scatter BOR"], torch.tensor([2 * rank | 0b1110000, 2 * rank + 1 | 0b1110000]))
        same(found["all_gather"], torch.cat(everyone))
        same(found["broadcast"], everyone[2])
        same(found["scatter"], base + rank)
        same(found["all_to_all"], torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(3)]))
        same(found["all_to_all list"], [torch.full((rank + 1,), float(r)) for r in range(3)])
        same(found["message"], everyone[(rank - 1) % 3])


def _booked(channel: Channel, dtype: torch.dtype, elements: int) -> dict[Any, float]:
    n = channel.size()
    value = torch.ones(elements, dtype=dtype)
    with traffic(Traffic.GRADIENTS):
        dist.all_reduce(value)
    with traffic(Traffic.PARAMETERS):
        dist.all_gather_single(value.new_empty(n * elements), value)
        dist.broadcast(value, src=0)
    with traffic(Traffic.EXPERTS):
        splits = [r + 1 for r in range(n)]
        target = value.new_empty(n * (channel.rank() + 1))
        dist.all_to_all_single(target, value.new_ones(sum(splits)), [channel.rank() + 1] * n, splits)
    return channel.ledger.bytes


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ledger_books_the_formula_to_the_byte(n: int, dtype: torch.dtype) -> None:
    elements, width = 37, dtype.itemsize
    for rank, sent in enumerate(ranks(n, _booked, dtype, elements)):
        volume = elements * width
        others = sum(r + 1 for r in range(n) if r != rank) * width
        assert sent == {
            ("gradients", "all_reduce"): 2 * volume * ((n - 1) / n),
            ("parameters", "all_gather"): n * volume * ((n - 1) / n),
            ("parameters", "broadcast"): volume if rank == 0 and n > 1 else 0,
            ("experts", "all_to_all"): others,
        }


def test_one_rank_sends_nothing() -> None:
    (found,) = ranks(1, _every_operation_alone)
    assert set(found.values()) == {0}


def _every_operation_alone(channel: Channel) -> dict[Any, float]:
    value = torch.ones(4)
    dist.all_reduce(value)
    dist.reduce_scatter_single(torch.empty(4), value)
    dist.all_gather_single(torch.empty(4), value)
    dist.broadcast(value, 0)
    dist.all_to_all_single(torch.empty(4), value)
    return channel.ledger.bytes


# --- groups ---


def _groups(channel: Channel) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    inside = mesh.get_group("tp")
    assert isinstance(inside, Channel)
    inside.default_traffic = Traffic.KEYS_VALUES
    value = torch.tensor([float(channel.rank())])
    dist.all_reduce(value, group=inside)
    pair = dist.new_group([1, 3])
    if channel.rank() in (1, 3):
        assert isinstance(pair, Channel)
        assert pair.ledger is channel.ledger
        dist.broadcast(value, src=3, group=pair)
    spread = distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)])
    return value.item(), channel.ledger.bytes, spread.full_tensor(), inside.members


def test_new_groups_and_meshes_are_channels_with_the_same_ledger() -> None:
    values, ledgers, spread, members = zip(*ranks(4, _groups), strict=True)
    assert values == (1.0, 5.0, 5.0, 5.0)
    assert members == ((0, 1), (0, 1), (2, 3), (2, 3))
    assert all(sent["keys_values", "all_reduce"] == 4 for sent in ledgers)
    same(list(spread), [torch.arange(8.0)] * 4)


def _foreign(channel: Channel) -> Any:
    comm.disconnect()
    assert not dist.is_initialized()
    store = channel.get_group_store()
    dist.init_process_group(
        "espalier", store=dist.PrefixStore("again", store), rank=channel.rank(), world_size=channel.size()
    )
    value = torch.ones(3)
    dist.all_reduce(value)
    group = dist.group.WORLD
    assert isinstance(group, Channel)
    result = value.tolist(), dist.get_backend(), group.ledger.by_class()
    comm.disconnect()
    return result


def test_the_backend_works_by_name_for_foreign_code_and_after_disconnecting() -> None:
    assert forks(2, _foreign) == [([2.0] * 3, "espalier", {"activations": 12.0})] * 2
