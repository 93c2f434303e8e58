"""One host of bench/hybrid.py: all-reduces by several contestants in turn, steps of DistributedDataParallel, rings
through two sites."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espalier
from cuts_rank import Cut, RandomTokens, Task, place_batches
from espalier.comm import Traffic, connect, ddp_hook, disconnect, traffic
from espalier.comm.codecs import codec
from espalier.launch.launchers import detect_launcher
from espalier.machine import cluster as clusters
from espalier.machine import link
from espalier.machine.cluster import machine_order
from espalier.mechanisms.codecs import hybrid_compression
from espalier.recipe import defaults, recipe_file
from espalier.train.rank_setup import RankSetup
from espalier.train.rank_spec import RankSpec, store
from espalier.train.trainer import Trainer

TIMEOUT = 300.0
WARM = 2**18
"""Values of each contestant's first all-reduce, which does not count."""
PACKET = 66
"""Bytes of Ethernet, IP and TCP headers with timestamps."""


def wire_bytes() -> int:
    """Payload that this host's interface has sent; on loopback 0."""
    place = Path("/sys/class/net/eth0/statistics")
    if not place.is_dir():
        return 0
    total, packets = (int((place / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return total - PACKET * packets


def all_reducer(name: str) -> Callable[[torch.Tensor], None]:
    """Sums a tensor over the ranks, in place."""
    limit = timedelta(seconds=TIMEOUT)
    if name == "mpi":
        return by_mpi()
    if name in ("gloo", "gloo again", "fp16"):
        group: Any = dist.new_group(backend="gloo", timeout=limit)

        def plain(x: torch.Tensor) -> None:
            if name != "fp16":
                dist.all_reduce(x, group=group)
            else:  # what torch's fp16_compress_hook sends
                half = x.half()
                dist.all_reduce(half, group=group)
                x.copy_(half)

        return plain
    group = dist.new_group(timeout=limit)
    group.use(Traffic.GRADIENTS, codec(name))

    def coded(x: torch.Tensor) -> None:
        with traffic(Traffic.GRADIENTS):
            dist.all_reduce(x, group=group)

    return coded


def by_mpi() -> Callable[[torch.Tensor], None]:
    """MPI's own all-reduce."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def plain(x: torch.Tensor) -> None:
        comm.Allreduce(MPI.IN_PLACE, x.numpy())

    return plain


def chosen_here() -> tuple[str, str]:
    """What `auto` takes on the link as a collective finds it, with codecs measured on all hosts at once, and why."""
    plain, x = all_reducer("gloo"), torch.zeros(2**21)
    plain(x)
    begin = time.perf_counter()
    plain(x)
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    ranks = dist.get_world_size()
    bandwidth = 2 * (ranks - 1) / ranks * x.nbytes / float(took)
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, {name: tuple(rate) for name, rate in hybrid_compression.measure().items()})
    slowest = {
        name: hybrid_compression.CodecRate(*map(min, zip(*(one[name] for one in told), strict=True)))
        for name in told[0]
    }
    chosen = hybrid_compression.choose("auto", bandwidth, slowest)
    return chosen.codecs.get(Traffic.GRADIENTS, "exact"), chosen.why


def reduce(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each turn, and bytes of one all-reduce by the interface and by the ledger, of each contestant."""
    names = list(task["contestants"])
    taken, why = chosen_here() if "auto" in names else ("", "")
    names = [taken if name == "auto" else name for name in names]
    runs = {label: all_reducer(name) for label, name in zip(task["contestants"], names, strict=True)}
    values = torch.randn(task["bytes"] // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    ledger = dist.group.WORLD.ledger
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    wire: dict[str, list[float]] = {label: [] for label in runs}
    booked: dict[str, float] = {}
    for turn in range(-1, task["turns"]):
        for label, run in runs.items():
            x = values[: WARM if turn < 0 else None].clone()
            dist.barrier()
            before, sent, begin = wire_bytes(), sum(ledger.by_class().values()), time.perf_counter()
            run(x)
            took = time.perf_counter() - begin
            dist.barrier()
            time.sleep(0.05)
            if turn >= 0:
                seconds[label].append(took)
                wire[label].append(wire_bytes() - before)
                booked[label] = sum(ledger.by_class().values()) - sent
    return {
        "seconds": seconds,
        "wire": {label: statistics.median(found) for label, found in wire.items()},
        "ledger": booked,
        "auto": why,
        "chosen": taken,
    }


def sites(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of Gloo's ring with ranks numbered in turn, as these are, and in the order that measured links give."""
    found = machine_order.ring(link.measure(repeats=4, large=2**19).bandwidth.tolist())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    limit = timedelta(seconds=TIMEOUT)
    groups = {}
    for label, places in (("turn", range(ranks)), ("ring", found)):
        store = dist.PrefixStore(label, dist.group.WORLD.get_group_store())
        groups[label] = dist.ProcessGroupGloo(store, list(places).index(rank), ranks, limit)
    seconds: dict[str, list[float]] = {label: [] for label in groups}
    for turn in range(-1, task["turns"]):
        for label, group in groups.items():
            x = torch.zeros(task["bytes"] // 4)
            dist.barrier()
            begin = time.perf_counter()
            group.allreduce([x]).wait()
            if turn >= 0:
                seconds[label].append(time.perf_counter() - begin)
    return {"seconds": seconds, "order": found}


def net(width: int) -> nn.Module:
    """Four layers of width x width, a multilayer perceptron whose compute is small beside its gradients."""
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each turn of DDP steps by each contestant, the loss at the end, and what the last of them encodes
    with."""
    models, found = {}, {"seconds": {}, "losses": {}}
    limit = timedelta(seconds=TIMEOUT)
    for label in task["contestants"]:
        group = dist.new_group(backend="gloo", timeout=limit)
        model = DistributedDataParallel(net(task["width"]), process_group=group)
        if label == "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(group, fp16_compress_hook)
        elif label != "ddp":
            hook = ddp_hook(label, group=group, timeout=TIMEOUT)
            model.register_comm_hook(None, hook)
            found["chosen"] = hook.codec
        models[label] = (model, torch.optim.SGD(model.parameters(), lr=0.1))
        found["seconds"][label] = []
    for turn in range(-1, task["turns"]):
        for label, (model, optimizer) in models.items():
            dist.barrier()
            begin = time.perf_counter()
            for step in range(task["steps"]):
                draw = torch.Generator().manual_seed(100 * turn + step + 7 * dist.get_rank() + 1000)
                x = torch.randn(16, task["width"], generator=draw)
                optimizer.zero_grad()
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
            if turn >= 0:
                found["seconds"][label].append((time.perf_counter() - begin) / task["steps"])
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            found["losses"][label] = float(mean) / dist.get_world_size()
    return found


def cut(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps of a decoder that is cut over the hosts, by the plan of each scheme of codecs, in turn; the loss
    of the last step, and the bytes of a step that rank 0 sent, by class of traffic, and that its plan foretold."""
    rank, world = dist.get_rank(), dist.get_world_size()
    machines = clusters.loads(task["machines"])
    runs, result = {}, {"seconds": {}, "losses": {}, "sent": {}, "planned": {}, "why": {}}
    for label in task["contestants"]:
        table = recipe_file.to_table(Task(Cut()).recipe())
        table |= {"comm": {"codec": label}, "sync": {"kind": "every_step"}}
        recipe = defaults.resolve(recipe_file.from_table(table))[0]
        plan = espalier.make_plan(recipe, machines, ranks=world, **task["pin"])
        setting = RankSetup(recipe, plan, RandomTokens(recipe), RankSpec(rank=rank, world=world))
        runs[label] = (setting, Trainer(setting, dist.new_group(timeout=timedelta(seconds=TIMEOUT))))
        result["seconds"][label] = []
        result["planned"][label] = plan.predicted.sent_bytes if plan.predicted else {}
        result["why"][label] = [sentence for sentence in plan.why if "odec" in sentence or " as " in sentence]
    for turn in range(-1, task["turns"]):
        for label, (setting, trainer) in runs.items():
            dist.barrier()
            before = dist.group.WORLD.ledger.by_class()
            begin = time.perf_counter()
            for number in range(task["steps"]):
                batches = place_batches(setting, (turn + 1) * task["steps"] + number)
                result["losses"][label] = float(trainer.train_step(batches).loss)
            dist.barrier()
            if turn >= 0:
                result["seconds"][label].append((time.perf_counter() - begin) / task["steps"])
            now = dist.group.WORLD.ledger.by_class()
            result["sent"][label] = {
                str(kind): (size - before.get(kind, 0)) / task["steps"] for kind, size in now.items()
            }
    return result


TASKS = {"all_reduce": reduce, "sites": sites, "ddp": train, "cut": cut}


def main() -> None:
    """The task is the one argument; rank 0 prints the result."""
    torch.set_num_threads(1)
    task = json.loads(sys.argv[1])
    place = detect_launcher.place()
    assert place is not None
    if task["what"] == "sites":  # machines of the two sites in turn
        place = replace(place, rank=[0, 2, 1, 3][place.rank])
    connect(store(place, TIMEOUT), place.rank, place.world, timeout=TIMEOUT)
    found = TASKS[task["what"]](task)
    if place.rank == 0:
        print(json.dumps(found), flush=True)
    disconnect()


if __name__ == "__main__":
    main()
