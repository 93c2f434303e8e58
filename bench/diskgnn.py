"""Graphs on disk: packed mini-batches beside other ways to load the features of the same batches, and whole epochs.

    python bench/diskgnn.py [--quick] [--folder DISK] [--dgl PYTHON] [--only CASE]

The graph is a planted partition with uneven degrees. All contestants read the features of the same batches; rows that
they hold in memory may take 10 % of the bytes of the features, beside the batches that training holds. Those that map
the file run in a memory cgroup of that size (which needs root), with room for what they compute, which the kernel
gives to the file's cache as long as it is free; they tell the kernel to read no pages ahead (MADV_RANDOM). Each
contestant is a process of its own that passes over the batches once before it is measured, in turns with ours. Peers
that take a page from a map for each row are slow: they, and ours beside them, pass over other batches in each turn, as
many as their rows say, in three turns, so that no page of one turn serves the next; the others pass over all, in five.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import memory_cgroup
from diskgnn_accuracy import GRAPH, accuracy
from espalier.graph.data import synthetic
from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.mechanisms.disk_batches import manifest
from espalier.mechanisms.disk_batches.batch_pool import Draws, Pool
from espalier.mechanisms.disk_batches.features import open_features
from espalier.mechanisms.disk_batches.mini_batches import HELD, QUEUES, MemoryShare
from espalier.mechanisms.disk_batches.pack import PackedSet, PackRequest, pack
from espalier.mechanisms.disk_batches.reader import LargestBatch, ReaderOptions
from espalier.store.direct_io import DirectFile, aligned
from table import Row, arguments, compare, publish, save

FANOUTS, WIDTH, CLASSES = (10, 10, 10), 128, 16
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Size:
    """Of a graph and its batches; `held`: the share of the features that may be in memory; `spare`: bytes beside it for
    those that train in a memory cgroup; `some`: batches that slow peers pass over."""

    nodes: int
    batch: int
    batches: int
    hidden: int = 64
    held: float = 0.1
    spare: int = 0
    some: int = 8

    @property
    def text(self) -> str:
        return f"planted:nodes={self.nodes},degree=15,features={WIDTH},classes={CLASSES},skew=1.5,homophily=0.6"

    @property
    def memory(self) -> int:
        return int(self.held * self.nodes * WIDTH * 4)

    def text_of(self, batches: int) -> str:
        cut = "" if batches == self.batches else f" (of {self.batches})"
        return f"{self.nodes:,} nodes x {WIDTH}, {batches} batches{cut} of {self.batch}"

    def __str__(self) -> str:
        return self.text_of(self.batches)


QUICK, FULL = Size(300_000, 8, 12, some=6), Size(5_000_000, 64, 32, hidden=256)
TINY, WRITTEN = Size(2_000, 64, 8, held=0.5, spare=256 << 20), Size(100_000, 256, 24, held=0.0)


class World:
    """A graph on disk with its batches packed. Has state: the processes of the contestants."""

    def __init__(self, size: Size, folder: Path, python: str | None) -> None:
        self.size, self.folder, self.python = size, folder, python
        self.graph_folder = folder / "graph"
        self.graph_folder.parent.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        synthetic.write(synthetic.parse(size.text), self.graph_folder)
        tell(f"graph of {size.nodes:,} nodes", begun)
        self.graph = synthetic.opened(self.graph_folder)
        assert self.graph.parts is not None
        order = np.random.default_rng(0).permutation(self.graph.parts.train)[: size.batch * size.batches]
        self.seeds = [order[at : at + size.batch] for at in range(0, len(order), size.batch)]
        np.save(folder / "seeds.npy", order)
        self.stack = ExitStack()
        self.sampled, self.packing = self._pack("packed", None)
        tell(f"{size}: sampled in {self.sampled:.1f} s, packed in {self.packing:.1f} s", begun)
        pool = PackedSet([folder / "packed"]).pool
        self.nodes = [pool.nodes(at) for at in range(len(pool))]
        np.save(folder / "nodes.npy", np.concatenate(self.nodes))
        np.save(folder / "starts.npy", np.concatenate([[0], np.cumsum([len(one) for one in self.nodes])]))
        largest = max(map(len, self.nodes)) * WIDTH * 4
        request = {"folder": str(folder), "graph": str(self.graph_folder), "threads": torch.get_num_threads()}
        request |= {"fanouts": FANOUTS, "batch": size.batch, "sizes": [WIDTH, size.hidden, size.hidden, CLASSES]}
        request |= {"memory": self.memory(LargestBatch.of(pool)), "limit": size.memory + 2 * largest}
        request |= {"epoch_limit": size.memory + 24 * largest + size.spare}
        (folder / "request.json").write_text(json.dumps(request))

    def memory(self, largest: LargestBatch) -> int:
        """What ours may hold: as the others, the batches that training holds, and blocks and positions."""
        sizes = ReaderOptions(*QUEUES[0], HELD, cache_pages=1).sizes(largest, 0, WIDTH)
        rows = 5 * largest.inputs * WIDTH * 4
        return self.size.memory + rows + sizes["blocks and positions of batches"]

    @property
    def writing(self) -> float:
        """Seconds of packing's pass over the features: from the last write of the plan to that of the rows' index."""
        ends = [(self.folder / "packed" / f"{name}.extents.index").stat().st_mtime_ns for name in ("plan", "rows")]
        return (ends[1] - ends[0]) / 1e9

    def request(self, name: str, disk: int | None) -> PackRequest:
        sampler = Sampler(self.graph, Style(False, "mean"))
        features = open_features(self.graph_folder / "features.npy")
        draws = Draws(self.seeds, range(len(self.seeds)), FANOUTS)
        folders = (self.folder / name,)
        return PackRequest(folders, sampler, manifest.graph_hash(self.graph), features, draws, 0, disk)

    def _pack(self, name: str, disk: int | None) -> tuple[float, float]:
        """Seconds of sampling, and of planning and packing."""
        request, sampled = self.request(name, disk), 0.0
        begun = time.perf_counter()

        def memory(pool: Pool) -> int:
            nonlocal sampled
            sampled, largest = time.perf_counter() - begun, LargestBatch.of(pool)
            share = MemoryShare(self.memory(largest))
            return share.hot_bytes(largest, request.row) if self.size.held else 0

        pack(replace(request, memory=memory)).close()
        return sampled, time.perf_counter() - begun - sampled

    @cached_property
    def budget(self) -> int:
        """Bytes of rows on disk half way between every row once and every row of every batch; a set is packed so."""
        with closing(PackedSet([self.folder / "packed"])) as packed:
            own = [packed.nodes_of(f"cold/{at}") for at in range(len(packed))]
            disk = (sum(map(len, own)) + len(np.unique(np.concatenate(own)))) // 2 * packed.row.row_bytes
        self._pack("packed-budget", disk)
        return disk

    # --- contestants -------------------------------------------------------------------------------------------------

    def contestant(self, what: str, batches: int | None = None) -> Callable[[], dict[str, Any]]:
        """Starts the process of a contestant, lets it pass over the first `batches` once, and gives what measures
        it: in each turn over those that follow."""
        script, python = HERE / "diskgnn_rank.py", sys.executable
        if what.startswith("dgl"):
            assert self.python is not None
            script, python = HERE / "peers" / "dgl_disk.py", self.python
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or "dgl" not in what}
        command = [python, str(script), str(self.folder / "request.json"), what.removeprefix("dgl-")]
        process = self.stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.stack.callback(process.stdin.close)
        given, told = process.stdin, process.stdout
        count = batches or self.size.batches
        starts = cycle(range(0, self.size.batches, count))

        def measure() -> dict[str, Any]:
            start = next(starts)
            given.write(f"{start} {start + count}\n")
            given.flush()
            line = told.readline()
            assert line, f"{what} ended"
            found = json.loads(line)
            return found if isinstance(found, dict) else {"seconds": found}

        measure()
        return measure

    def beside(self, ours: str, peer: str, case: str, pairs: int) -> Row:
        """Seconds of both, in turns."""
        slow = peer in SLOW and self.size.some < self.size.batches
        batches, pairs = (self.size.some, min(pairs, 3)) if slow else (self.size.batches, pairs)
        with ExitStack() as self.stack:
            memory_cgroup.forget_file(str(self.graph_folder / "features.npy"))
            first, second = self.contestant(ours, batches), self.contestant(peer, batches)
            taken = [(first(), second()) for _ in range(pairs)]
        values = [{round(one["value"]) for one in pair if "value" in one and "epoch" not in case} for pair in taken]
        assert max(map(len, values)) < 2, f"{ours} and {peer} did not load the same: {values}"
        seconds = [(one["seconds"], other["seconds"]) for one, other in taken]
        return compare(f"{case}, {self.size.text_of(batches)}", peer, "s", seconds, higher_is_better=False)

    def plan_cache(self, policy: str) -> None:
        """Which rows of each batch a cache holds, and which it takes in, when the batches are passed over again and
        again: by last use (`lru`), or by next use (`belady`, as Ginex decides for a batch at a time)."""
        rows, count = self.size.memory // (WIDTH * 4), len(self.nodes)
        following = _next_uses(self.nodes, self.size.nodes)
        place = np.full(self.size.nodes, -1, np.int64)
        worth = np.zeros(self.size.nodes, np.int64)  # of a row in the cache: the larger, the later it goes
        inside, plan = np.zeros(0, np.int64), {"rows": np.array(rows)}
        for turn in range(2 * count):
            at, nodes = turn % count, self.nodes[turn % count]
            if turn == count:
                plan["first"] = inside[np.argsort(place[inside])]
            held = np.flatnonzero(place[nodes] >= 0)
            missing = np.flatnonzero(place[nodes] < 0)
            slots = place[nodes[held]]
            worth[nodes] = turn if policy == "lru" else -(turn + following[at])
            every = np.concatenate([inside, nodes[missing]])
            kept = every if len(every) <= rows else every[np.argpartition(-worth[every], rows - 1)[:rows]]
            stays = np.zeros(self.size.nodes, bool)
            stays[kept] = True
            free = np.setdiff1d(np.arange(rows), place[inside[stays[inside]]], assume_unique=True)
            place[inside[~stays[inside]]] = -1
            entering = missing[stays[nodes[missing]]]
            place[nodes[entering]] = free[: len(entering)]
            inside = kept
            if turn >= count:
                into = place[nodes[entering]]
                plan |= {f"{k}{at}": v for k, v in zip(NAMES, (held, slots, missing, entering, into), strict=True)}
        np.savez(self.folder / f"{policy}.npz", **plan)


def tell(what: str, begun: float) -> None:
    """Progress, with the seconds since `begun`."""
    print(f"{time.strftime('%H:%M:%S')} {what}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


NAMES = ("held", "slots", "missing", "kept", "into")


def _next_uses(batches: Sequence[np.ndarray], nodes: int) -> list[np.ndarray]:
    """After how many batches each node of each batch is used again, the batches repeating."""
    count = len(batches)
    coming = np.full(nodes, 2 * count + 1, np.int64)
    found: list[np.ndarray] = [np.zeros(0, np.int64)] * count
    for turn in range(2 * count - 1, -1, -1):
        own = batches[turn % count]
        found[turn % count] = coming[own] - turn
        coming[own] = turn
    return found


# --- figures that are not turns of two contestants -------------------------------------------------------------------


def figures(world: World) -> list[Row]:
    """Amplification, stalls, and after how many epochs packing has paid."""
    size = world.size
    some = min(size.some, size.batches)
    with ExitStack() as world.stack:
        memory_cgroup.forget_file(str(world.graph_folder / "features.npy"))
        load, epoch = world.contestant("packed")(), world.contestant("epoch-packed")()
        mapped = world.contestant("mmap", some)()
    packed = PackedSet([world.folder / "packed"])
    useful = sum(len(packed.split(at).cold_at) for at in range(len(packed))) * packed.row.row_bytes
    saved = mapped["seconds"] * size.batches / some - load["seconds"]
    computed = (epoch["seconds"] - epoch["stalled"]) / size.batches
    return [
        fact(f"bytes read of packed rows, {size}", "bytes of these rows", useful, load["packed"], "bytes"),
        fact(
            f"stalls of an epoch that computes {1e3 * computed:.0f} ms a batch, {size}",
            "15 % of the epoch",
            0.15 * epoch["seconds"],
            epoch["stalled"],
            "s",
        ),
        fact(
            f"epochs until sampling and packing have paid, {size} (mmap timed on {some})",
            "mmap",
            1.0,
            (world.sampled + world.packing) / saved,
            "epochs",
        ),
    ]


def budgeted(world: World, ours: str, peer: str, pairs: int) -> Row:
    """Rows that batches share lie once on disk, in so few bytes."""
    what = "epoch" if "epoch" in peer else "features of the batches"
    return world.beside(ours, peer, f"{what}, rows on disk in {world.budget / 1e6:,.0f} MB", pairs)


def fact(case: str, peer: str, bound: float, ours: float, unit: str) -> Row:
    return Row(case, peer, bound, ours, bound / ours if ours else float("inf"), unit, "(n=1)")


def packing(folder: Path, pairs: int) -> list[Row]:
    """Bytes of packed rows in a second, of planning and packing together and of the pass that writes them, beside those
    of a sequential write past the page cache of as many bytes."""
    both, alone = [], []
    for turn in range(pairs):
        world = World(WRITTEN, folder / f"{turn}", None)
        written = (world.folder / "packed" / "rows.extents").stat().st_size
        disk = sequential(folder / "sequential", written) / 1e6
        both.append((written / world.packing / 1e6, disk))
        alone.append((written / world.writing / 1e6, disk))
        subprocess.run(["rm", "-r", str(world.folder)], check=True)
    return [
        compare(f"packing, {WRITTEN}", "sequential write", "MB/s", alone),
        compare(f"planning and packing, {WRITTEN}", "sequential write", "MB/s", both),
    ]


def rolling(folder: Path, seeds: int) -> list[Row]:
    """Test accuracy of a rolling pool, by the share that is drawn anew, beside online sampling."""
    graph = synthetic.load(GRAPH, folder)
    online = [accuracy(graph, 1.0, seed) for seed in range(seeds)]
    rows = []
    for share in (0.0, 0.1):
        pairs = [(accuracy(graph, share, seed), other) for seed, other in enumerate(online)]
        rows.append(compare(f"accuracy, {share:g} of the pool anew in each epoch", "online sampling", "%", pairs))
    return rows


def sequential(path: Path, size: int) -> float:
    """Bytes per second."""
    buffer = aligned(8 << 20)
    buffer.random_(0, 255)
    file = DirectFile(path, "create", size)
    begun = time.perf_counter()
    for at in range(0, size - len(buffer) + 1, len(buffer)):
        file.write_from(buffer, at)
    file.sync()
    seconds = time.perf_counter() - begun
    file.close()
    path.unlink()
    return size // len(buffer) * len(buffer) / seconds


# --- all of it ---------------------------------------------------------------------------------------------------

LOADS = ("mmap", "lru", "belady", "dgl-gather")
EPOCHS = ("dgl-epoch", "epoch-plain", "epoch-memory")
SLOW = ("mmap", "dgl-gather", "dgl-epoch", "epoch-plain")


def cases(size: Size, folder: Path, python: str | None, pairs: int) -> dict[str, Callable[[], list[Row]]]:
    made: dict[Size, World] = {}

    def world(of: Size) -> World:
        if of not in made:
            made[of] = World(of, folder / f"{of.nodes}", python)
            for policy in ("lru", "belady"):
                made[of].plan_cache(policy)
        return made[of]

    def beside(of: Size, ours: str, peer: str, case: str) -> Callable[[], list[Row]]:
        return lambda: [world(of).beside(ours, peer, case, pairs)]

    found: dict[str, Callable[[], list[Row]]] = {}
    found |= {f"load-{peer}": beside(size, "packed", peer, "features of the batches") for peer in LOADS}
    found |= {f"{peer}": beside(size, "epoch-packed", peer, "epoch") for peer in EPOCHS}
    found |= {f"tiny-{peer}": beside(TINY, "epoch-packed", peer, "epoch") for peer in ("epoch-plain", "epoch-memory")}
    for peer in ("lru", "belady", "epoch-memory"):
        ours = "epoch-packed-budget" if "epoch" in peer else "packed-budget"
        found[f"budget-{peer}"] = lambda ours=ours, peer=peer: [budgeted(world(size), ours, peer, pairs)]
    found["figures"] = lambda: figures(world(size))
    found["rolling"] = lambda: rolling(folder, 2 if size is QUICK else 5)
    found["packing"] = lambda: packing(folder / "packing", 3 if size is QUICK else pairs)
    return found


def main() -> None:
    own = {"only": {"default": ""}, "dgl": {"metavar": "PYTHON"}, "folder": {"metavar": "DISK"}}
    options = arguments(__doc__ or "", **own)
    size, pairs = (QUICK, options.pairs or 2) if options.quick else (FULL, options.pairs or 5)
    here = HERE / ".dgl" / "bin" / "python"
    python = options.dgl or (str(here) if here.exists() else None)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, run in cases(size, Path(folder), python, pairs).items():
            if options.only not in name:
                continue
            if "dgl" in name and python is None:
                print(f"{name}: no DGL (bench/peers/dgl.sh, or --dgl PYTHON)", file=sys.stderr)
                continue
            begun = time.perf_counter()
            fresh = run()
            rows += fresh
            if options.json:  # of a run that is cut short
                save(rows, options.json)
            tell(f"{name}: {msgspec.json.encode(fresh).decode()}", begun)
    publish(rows, options.json)


if __name__ == "__main__":
    main()
