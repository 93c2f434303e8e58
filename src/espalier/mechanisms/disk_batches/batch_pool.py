"""Pool of sampled mini-batches: drawn before training by the sampler of the in-memory workload, kept in one container.

Entry i of a pool is, bit for bit, the batch that `NodeTask.batch(seeds[i], steps[i])` draws in memory, its features
left out: what a draw gives depends on (seed, step, layer, node) alone. Positions and offsets lie on disk as int32 where
they fit, and are widened when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.graph.data.graph import Array
from espalier.graph.networks.base import Forms, MessageBlock, MessageBlocks
from espalier.graph.sampling.neighbor_sampler import Drawn, NeighborSampling
from espalier.mechanisms.disk_batches.cost import TOGETHER
from espalier.mechanisms.disk_batches.disk_sampler import DiskSampler
from espalier.parallel.workload import Progress
from espalier.recipe import serialization
from espalier.store.extents import ExtentFile, ExtentWriter

FILE = "pool.extents"
COMMIT = 64
"""Batches after which the container is committed: what a killed run draws again."""
_FIELDS = ("indptr", "indices", "weights", "left", "right", "features")


@dataclass(frozen=True, eq=False)
class Draws:
    """The batches of a pool before they are drawn.

    Attributes:
        seeds: int64 of each batch, the nodes it asks for. steps: the training step of each; several may share one
            (micro-batches, ranks).
        fanouts: neighbours per node, the layer next to the seeds first. seed: of the draws.
    """

    seeds: Sequence[Array]
    steps: Sequence[int]
    fanouts: tuple[int, ...]
    seed: int = 0


@dataclass(frozen=True, eq=False)
class SampledBatch:
    """A batch without its features: int64 seeds, and one block per layer, the farthest from the seeds first."""

    seeds: Tensor
    blocks: MessageBlocks


def epoch_seeds(train: Array, batch: int, seed: int, epoch: int = 0) -> list[Array]:
    """The training nodes of an epoch in its order, cut into batches, the last one short."""
    order = train[np.random.default_rng([seed, epoch]).permutation(len(train))]
    return [order[at : at + batch] for at in range(0, len(order), batch)]


def sample_pool(folder: Path, sampler: NeighborSampling, draws: Draws, progress: Progress | None = None) -> Pool:
    """Draws the batches that `folder` does not hold yet. Killed at any point and called again, it goes on."""
    with ExtentWriter(folder / FILE, resume=True) as writer:
        missing = [at for at in range(len(draws.seeds)) if f"blocks/{at}" not in writer]
        for at, drawn in _drawn(sampler, draws, missing):
            if progress is not None:
                progress(at, len(draws.seeds))
            if f"nodes/{at}" not in writer:
                writer.append(f"nodes/{at}", torch.from_numpy(drawn.nodes))
            writer.append(f"blocks/{at}", _encoded(draws.seeds[at], drawn.blocks))
            if (at + 1) % COMMIT == 0:
                writer.commit()
    return Pool(folder)


def _drawn(sampler: NeighborSampling, draws: Draws, batches: Sequence[int]) -> Iterator[tuple[int, Drawn]]:
    """Each of `batches` with its neighbourhood; of edges on disk several are drawn together, every page read once."""
    if not isinstance(sampler, DiskSampler):
        yield from ((at, sampler.draw(draws.seeds[at], draws.fanouts, draws.seed, draws.steps[at])) for at in batches)
        return
    for first in range(0, len(batches), TOGETHER):
        some = batches[first : first + TOGETHER]
        seeds = [draws.seeds[at] for at in some]
        steps = [draws.steps[at] for at in some]
        yield from zip(some, sampler.draw_together(seeds, draws.fanouts, draws.seed, steps), strict=True)


class Pool(Sequence[SampledBatch]):
    """The batches that `sample_pool` drew into a folder, read when they are asked for."""

    def __init__(self, folder: Path, remedy: str = "") -> None:
        self.file = ExtentFile(folder / FILE, remedy)
        self._length = sum(name.startswith("blocks/") for name in self.file)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, batch: Any) -> Any:
        """One batch."""
        return _decoded(self.file.read(f"blocks/{range(self._length)[batch]}"))

    def nodes(self, batch: int) -> Array:
        """int64: the input nodes of a batch, in the order in which its first block numbers them."""
        return self.file.read(f"nodes/{range(self._length)[batch]}").view(torch.int64).numpy()

    @cached_property
    def most_inputs(self) -> int:
        """Input nodes of the largest batch."""
        return max((self.file.bytes(f"nodes/{batch}") // 8 for batch in range(self._length)), default=0)

    @cached_property
    def most_blocks(self) -> int:
        """Bytes of the blocks of the largest batch, as they are read."""
        return max((self.file.bytes(f"blocks/{batch}") for batch in range(self._length)), default=0)

    @property
    def node_lists(self) -> NodeLists:
        """The input nodes of all batches."""
        return NodeLists(self)

    def close(self) -> None:
        self.file.close()


class NodeLists(Sequence[Array]):
    """Input nodes by batch, read at every access."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __len__(self) -> int:
        return len(self.pool)

    def __getitem__(self, batch: Any) -> Any:
        """int64, those of one batch."""
        return self.pool.nodes(batch)


def _encoded(seeds: Array, blocks: Sequence[MessageBlock]) -> Tensor:
    encoded = [
        {name: _narrow(getattr(block, name)) for name in _FIELDS} | {"sources": block.sources} for block in blocks
    ]
    data = bytearray(serialization.dumps({"seeds": torch.from_numpy(np.asarray(seeds, np.int64)), "blocks": encoded}))
    return torch.frombuffer(data, dtype=torch.uint8)


def _narrow(tensor: Tensor | None) -> Tensor | None:
    """int64 values as int32 where they fit. All that blocks hold as int32 is as the graph's indices are."""
    if tensor is None or tensor.dtype != torch.int64 or (tensor.numel() and int(tensor.max()) >= 2**31):
        return tensor
    return tensor.to(torch.int32)


def _decoded(data: Tensor) -> SampledBatch:
    table = serialization.loads(data.numpy().data, "a batch of the pool")
    blocks = []
    for entry in table["blocks"]:
        known: dict[str, Any] = {name: _wide(entry[name]) for name in _FIELDS}
        blocks.append(MessageBlock(sources=entry["sources"], forms=Forms(), **known))
    return SampledBatch(table["seeds"], tuple(blocks))


def _wide(tensor: Tensor | None) -> Tensor | None:
    return tensor.to(torch.int64) if tensor is not None and tensor.dtype == torch.int32 else tensor
