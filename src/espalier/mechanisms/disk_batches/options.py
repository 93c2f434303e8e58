"""`[store]`: features on disk, whose rows are packed for mini-batches. Imports no torch."""

from __future__ import annotations

from typing import Literal

from espalier.recipe import units
from espalier.recipe.errors import UserError
from espalier.recipe.sections import DiskOptions, GraphOptions, RecipeBase


class Store(DiskOptions, frozen=True):
    """Features on disk: mini-batches are sampled once into a pool, and their rows packed beside it (DiskGNN).

    `device`: bytes of the most used rows that each rank keeps on its GPU (default: half of what the plan leaves free);
    `disk`: bytes that packed rows may take (default: what the fastest layout takes); `rows`: how packed rows are
    stored; `resample`: share of the pool that is sampled anew in each epoch.
    """

    device: str | int | None = None
    disk: str | int | None = None
    rows: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    resample: float = 0.0

    def check(self, recipe: RecipeBase) -> None:
        """Raises UserError for values that are not possible, and for batches that are not drawn."""
        graph = recipe.graph or GraphOptions()
        if graph.task != "node" or not graph.fanouts:
            raise UserError(
                f"[store] is not possible with graph.task = {graph.task!r} and graph.fanout = {list(graph.fanout)}.",
                why="the rows of sampled neighbourhoods of nodes are packed",
                do='graph.task = "node" and graph.fanout = [10, 10]',
            )
        if units.size(self.memory, "store.memory") <= 0:
            raise UserError(f"store.memory = {self.memory!r} holds no batch.", do='store.memory = "512MiB"')
        for name in ("device", "disk"):
            if (value := getattr(self, name)) is not None:
                units.size(value, f"store.{name}")
        check_share(self.resample)
        if self.path == () or (isinstance(self.path, tuple) and len(set(self.path)) < len(self.path)):
            raise UserError(
                f"store.path = {list(self.path)} is not possible.", do="one folder for each disk, or leave it out"
            )


def check_share(resample: float) -> None:
    """Raises UserError where no share of a pool is so large."""
    if not 0 <= resample <= 1:
        raise UserError(
            f"store.resample = {resample} is not possible.",
            why="it is the share of the pool that is sampled anew in each epoch",
            do="store.resample = 0.1; 0 keeps all batches, 1 replaces all",
        )


OPTIONS = Store
