"""Cutting: a graph is cut over ranks once, into a folder in the cache; ranks open their parts together."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from espalier.comm import plain_collectives
from espalier.graph.parts import halo, partial_sums, partition_folder
from espalier.graph.sampling.neighbor_sampler import whole
from espalier.recipe import terminal
from espalier.recipe.cache_dir import cache_folder, hashed, keep_made
from espalier.recipe.errors import UserError
from espalier.sparse.partition import clusters_of, library
from espalier.sparse.rcmpp.pattern import SparsityPattern
from espalier.track.progress import Stages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from espalier.graph.data.graph import Array, Graph
    from espalier.graph.sampling.neighbor_sampler import Style

CUTS = 3
"""Version of the cutting: parts in the cache of another are not read."""
LARGE = 1 << 20
"""Edges of a graph that takes over two seconds to cut."""
PAYS = 0.9
"""Share of the rows up to which partial sums are sent: they are made by a product of their own."""


@dataclass(frozen=True, eq=False)
class Cutting:
    """How a graph is cut for networks of `style`; `sums`: whether partial sums may cross."""

    graph: Graph
    style: Style
    sums: bool = False

    def folder(self, shares: Sequence[int]) -> Path:
        """Where the parts wait."""
        style = [self.style.loops, self.style.scale]
        key = [self.graph.fingerprint(), *style, self.sums, list(shares), library(), CUTS]
        if self.graph.cut is not None:
            key.append(hashed([self.graph.cut.tobytes().hex()]))
        return cache_folder() / "partitions" / hashed(key)

    def parts(self, shares: Sequence[int]) -> Array:
        """int32 [nodes]: the rank of each node, as given where it is for as many ranks. Raises UserError for more ranks
        than nodes."""
        graph = self.graph
        if graph.cut is not None and int(graph.cut.max()) < len(shares):
            return graph.cut
        if graph.nodes < len(shares):
            raise UserError(
                f"{graph.origin} has {graph.nodes:,} nodes for {len(shares)} ranks.", do=f"plan.pin.ranks={graph.nodes}"
            )
        if graph.edges <= LARGE:
            return self._made(shares)
        return self._kept(self.folder(shares).with_suffix(".parts"), shares)

    def _kept(self, file: Path, shares: Sequence[int]) -> Array:
        """What a plan has cut is kept in `file` for the ranks."""
        graph = self.graph
        with suppress(OSError):
            known = np.fromfile(file, np.int32)
            if len(known) == graph.nodes and known.min() >= 0 and known.max() < len(shares):
                return known
        terminal.say(
            f"Cutting a graph of {graph.nodes:,} nodes into {len(shares)} parts (once).", file=sys.stderr, flush=True
        )
        made = self._made(shares)
        keep_made(file, made.tofile)  # on a full disk it is cut again
        return made

    def _made(self, shares: Sequence[int]) -> Array:
        with Stages("Cutting the graph") as stages:
            pattern = SparsityPattern.of(self.graph.indptr, self.graph.indices)
            return clusters_of(pattern, len(shares), shares, begin=stages.begin)

    def boundary(self, parts: Array, ranks: int) -> tuple[halo.Boundary, partial_sums.Covers | None]:
        """What crosses between `parts`: rows, or where they are fewer by a tenth rows and sums."""
        with Stages("Finding the rows that cross") as stages:
            block = whole(self.graph, self.style)
            stages.begin("boundary", 0, 1 + self.sums)
            cut = halo.boundary(block.indptr, block.indices, parts, ranks)
            if not self.sums:
                return cut, None
            stages.begin("partial sums", 1, 2)
            every = partial_sums.covers(block, cut)
        few = partial_sums.crossing_rows(every, ranks).sum() <= PAYS * cut.rows.sum()
        return cut, every if few else None

    def write(self, folder: Path, parts: Array, ranks: int) -> None:
        """Writes a folder of `parts`. Raises UserError as `partition_folder.write`."""
        partition_folder.write(folder, self.graph, self.style, *self.boundary(parts, ranks))


def open_part(
    cutting: Cutting, shares: Sequence[int], group: dist.ProcessGroup, *, writes: bool = True
) -> partition_folder.Part:
    """The part of this rank of `group`. All ranks call it alike; the graph is cut by the first where it was not, and
    where machines have other parts than it has.

    Args:
        shares: of the nodes, for each rank; writes: whether this rank writes the parts for its machine.
    """
    identity = cutting.graph.fingerprint()
    folder = cutting.folder(shares)
    rank = group.rank()
    known = set(plain_collectives.all_gather(partition_folder.intact(folder, rank, identity), group))
    if None in known or len(known) > 1:
        made = cutting.parts(shares).tobytes() if rank == 0 else b""
        parts = np.frombuffer(plain_collectives.broadcast(made, group), np.int32)
        if writes:
            with _locked(folder):
                if len(known - {None}) > 1 or not partition_folder.holds(folder, parts, identity):
                    cutting.write(folder, parts, len(shares))
        plain_collectives.all_gather(True, group)
    return partition_folder.read(folder, rank, group, identity)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process of a machine at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
