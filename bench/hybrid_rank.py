"""One host of bench/hybrid.py: all-reduces, or steps of DistributedDataParallel, by several contestants in turn."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from espalier.comm import Traffic, connect, ddp_hook, disconnect, hybrid, traffic
from espalier.comm.codecs import codec
from espalier.launch import torchrun
from espalier.launch.base import store

TIMEOUT = 300.0
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
    if name in ("gloo", "fp16"):
        group: Any = dist.new_group(backend="gloo", timeout=limit)

        def plain(x: torch.Tensor) -> None:
            if name == "gloo":
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


def reduce(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each turn, and bytes of one all-reduce by the interface and by the ledger, of each contestant."""
    names = list(task["contestants"])
    if "auto" in names:  # on the link as a collective finds it
        plain, x = all_reducer("gloo"), torch.zeros(2**21)
        plain(x)
        begin = time.perf_counter()
        plain(x)
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        ranks = dist.get_world_size()
        bandwidth = 2 * (ranks - 1) / ranks * x.nbytes / float(took)
        rates = {} if dist.get_rank() else hybrid.measure()
        told = [rates]
        dist.broadcast_object_list(told, 0)
        chosen = hybrid.choose("auto", bandwidth, {key: hybrid.Rate(*value) for key, value in told[0].items()})
        names[names.index("auto")] = chosen.codecs.get(Traffic.GRADIENTS, "gloo")
        task["auto"] = chosen.why
    runs = {label: all_reducer(name) for label, name in zip(task["contestants"], names, strict=True)}
    values = torch.randn(task["bytes"] // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    ledger = dist.group.WORLD.ledger
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    wire: dict[str, list[float]] = {label: [] for label in runs}
    booked: dict[str, float] = {}
    for turn in range(-1, task["turns"]):
        for label, run in runs.items():
            x = values.clone()
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
        "auto": task.get("auto", ""),
    }


def net(width: int) -> nn.Module:
    """Four layers of width x width, a multilayer perceptron whose compute is small beside its gradients."""
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each turn of DDP steps by each contestant, and the loss at the end."""
    models, found = {}, {"seconds": {}, "losses": {}}
    limit = timedelta(seconds=TIMEOUT)
    for label in task["contestants"]:
        group = dist.new_group(backend="gloo", timeout=limit)
        model = DistributedDataParallel(net(task["width"]), process_group=group)
        if label == "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(group, fp16_compress_hook)
        elif label != "ddp":
            model.register_comm_hook(None, ddp_hook(label, group=group, timeout=TIMEOUT))
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


def main() -> None:
    """The task is the one argument; rank 0 prints the result."""
    torch.set_num_threads(1)
    task = json.loads(sys.argv[1])
    place = torchrun.place()
    assert place is not None
    connect(store(place, TIMEOUT), place.rank, place.world, timeout=TIMEOUT)
    found = reduce(task) if task["what"] == "all_reduce" else train(task)
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)
    disconnect()


if __name__ == "__main__":
    main()
