"""One contestant of bench/diskgnn.py in a process of its own: a line with a number of batches in, one measurement of
the first so many out, as JSON.

    python diskgnn_rank.py REQUEST.json mmap | lru | belady | packed
    python diskgnn_rank.py REQUEST.json epoch-packed | epoch-memory | epoch-plain

The first load the features of the same batches, the others train on them for an epoch. `lru` and `belady` read missing
rows with the same O_DIRECT reader as ours (every page of a batch once, in the order of the file) and hold as many rows
as fit into the memory; which rows, is decided beforehand and not timed.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import memory_cgroup
from espalier import recipe as config
from espalier.graph.data import synthetic
from espalier.graph.networks import compiled_aggregate
from espalier.graph.networks.gnn import Gnn
from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.kernels.cross_entropy import cross_entropy
from espalier.mechanisms.disk_batches.mini_batches import MemoryShare
from espalier.mechanisms.disk_batches.pack import PackedSet
from espalier.mechanisms.disk_batches.reader import PackedBatches, TieredFeatures, TierStats
from espalier.store.rows import RowFile, RowLayout

STYLE = Style(False, "mean")


class World:
    """What a request names, opened when it is used."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request, self.folder, self.graph_folder = request, Path(request["folder"]), Path(request["graph"])
        self.stats, self.set = TierStats(), "packed"

    @cached_property
    def batches(self) -> list[np.ndarray]:
        nodes, starts = (np.load(self.folder / f"{name}.npy") for name in ("nodes", "starts"))
        return np.split(nodes, starts[1:-1])

    @cached_property
    def seeds(self) -> list[np.ndarray]:
        found = np.load(self.folder / "seeds.npy")
        return [found[at : at + self.request["batch"]] for at in range(0, len(found), self.request["batch"])]

    @cached_property
    def mapped(self) -> np.ndarray:
        return np.load(self.graph_folder / "features.npy", mmap_mode="r")

    @cached_property
    def features(self) -> RowFile:
        layout = RowLayout(len(self.mapped), torch.float32, self.mapped.shape[1:], self.mapped.offset)
        return RowFile(self.graph_folder / "features.npy", layout)

    @cached_property
    def labels(self) -> Tensor:
        return torch.from_numpy(np.load(self.graph_folder / "labels.npy"))

    @cached_property
    def room(self) -> Tensor:
        return torch.zeros(max(map(len, self.batches)), self.mapped.shape[1])


Run = Callable[[range], float]
"""Passes over these batches; the number that is to be the same."""


def loaded(world: World, what: str) -> Run:
    """Loads batches; the sum of one value of each row, which all contestants agree on."""
    if what == "packed":
        return packed(world)
    if what == "mmap":
        return mapped(world)
    return cached(world, np.load(world.folder / f"{what}.npz"))


def unwarned(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():  # it is not writable, and is not written to
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def mapped(world: World) -> Run:
    ids = [torch.from_numpy(one) for one in world.batches]
    features = unwarned(memory_cgroup.at_random(world.mapped))
    world.room.zero_()

    def run(which: range) -> float:
        found = (torch.index_select(features, 0, one, out=world.room[: len(one)]) for one in (ids[at] for at in which))
        return sum(float(x[:, 0].sum()) for x in found)

    return run


def opened(world: World) -> TieredFeatures:
    packed = PackedSet([world.folder / world.set])
    reader = TieredFeatures(packed, MemoryShare(world.request["memory"]).options(packed))
    world.stats = reader.stats
    return reader


def packed(world: World) -> Run:
    reader = opened(world)

    def run(which: range) -> float:
        with PackedBatches(reader, which) as batches:
            return sum(float(one.features[:, 0].sum()) for one in batches)

    return run


def cached(world: World, plan: Any) -> Run:
    """By a plan of bench/diskgnn.py: rows that are in the cache, and those that are read and take their places."""
    steps = [
        tuple(torch.from_numpy(plan[f"{name}{at}"]).long() for name in ("held", "slots", "missing", "kept", "into"))
        for at in range(len(world.batches))
    ]
    ids = [torch.from_numpy(one) for one in world.batches]
    cache = torch.empty(int(plan["rows"]), world.mapped.shape[1])
    first = torch.from_numpy(plan["first"])
    world.features.read(first, cache[: len(first)])
    read, begin = torch.empty_like(world.room), cache.clone()

    def run(which: range) -> float:
        total = 0.0
        cache.copy_(begin)  # a hundredth of the time at most
        for at in which:
            (held, slots, missing, kept, into), nodes = steps[at], ids[at]
            x = world.room[: len(nodes)]
            x[held] = cache[slots]
            if len(missing):
                rows = read[: len(missing)]
                world.features.read(nodes[missing], rows)
                x[missing] = rows
            cache[into] = x[kept]
            total += float(x[:, 0].sum())
        return total

    return run


# --- epochs ------------------------------------------------------------------------------------------------------


def network(request: dict[str, Any]) -> Gnn:
    torch.manual_seed(1)
    first, *inner, last = request["sizes"]
    options = config.Sage(depth=len(inner) + 1, width=inner[0], dropout=0.0, activation="relu")
    return compiled_aggregate.equip(Gnn(options, first, last)).train()


Batch = tuple[Tensor, Sequence[Any], np.ndarray]


def trained(world: World, batches: Callable[[range], Iterator[Batch]]) -> Run:
    model = network(world.request)
    optimizer = torch.optim.Adam(model.parameters(), 0.001)

    def run(which: range) -> float:
        total = 0.0
        for features, blocks, seeds in batches(which):
            optimizer.zero_grad()
            loss = cross_entropy(model(features, blocks), world.labels[seeds]) / len(seeds)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total

    return run


def from_memory(world: World) -> Callable[[range], Iterator[Batch]]:
    """Drawn and gathered in memory, which holds all features."""
    graph = synthetic.opened(world.graph_folder)
    sampler = Sampler(graph, STYLE)
    features = torch.from_numpy(
        np.fromfile(world.graph_folder / "features.npy", np.float32, offset=world.mapped.offset)
    )
    features = features.view(world.mapped.shape)
    memory_cgroup.forget_file(str(world.graph_folder / "features.npy"))

    def batches(which: range) -> Iterator[Batch]:
        for step in which:
            drawn = sampler.draw(world.seeds[step], world.request["fanouts"], 0, step)
            yield features[torch.from_numpy(drawn.nodes)], drawn.blocks, world.seeds[step]

    return batches


def from_packed(world: World) -> Callable[[range], Iterator[Batch]]:
    reader = opened(world)

    def batches(which: range) -> Iterator[Batch]:
        with PackedBatches(reader, which) as found:
            for one in found:
                assert one.sampled is not None
                assert one.features is not None
                yield one.features, one.sampled.blocks, one.sampled.seeds.numpy()

    return batches


def plain(world: World) -> Run:
    from plain_graph_loop import PlainLoop

    request = world.request
    loop = PlainLoop(world.graph_folder, request["fanouts"], request["sizes"])
    return lambda which: sum(loop.step(torch.from_numpy(world.seeds[at]), at) for at in which)


def epochs(world: World, what: str) -> Run:
    if what == "epoch-plain":
        return plain(world)
    sources = {"epoch-memory": from_memory, "epoch-packed": from_packed}
    return trained(world, sources[what](world))


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main(path: str, what: str) -> None:
    world = World(json.loads(Path(path).read_text()))
    torch.set_num_threads(world.request["threads"])
    if what.endswith("-budget"):  # the set that was packed into less disk
        what, world.set = what.removesuffix("-budget"), "packed-budget"
    run = (epochs if what.startswith("epoch") else loaded)(world, what)
    if what in ("mmap", "epoch-plain"):
        memory_cgroup.join(world.request["limit" if what == "mmap" else "epoch_limit"])
    for line in sys.stdin:
        before, stats, begun = bytes_read(), asdict(world.stats), time.perf_counter()
        value = run(range(*map(int, line.split())))
        told = {"seconds": time.perf_counter() - begun, "read": bytes_read() - before, "value": value}
        told |= {name: getattr(world.stats, name) - stats[name] for name in ("stalled", "packed", "disk_cache", "host")}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
