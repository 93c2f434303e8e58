"""`[graph.halo]`: rows of boundary nodes that cross, in few bits or late. Imports no torch."""

from __future__ import annotations

from typing import Literal

from espalier.recipe.errors import UserError
from espalier.recipe.graphs import GraphTransformer, Network
from espalier.recipe.sections import GraphParts, RecipeBase

WHOLE, MOST = 32, 8
"""Bits of a value that crosses as it is, and the most of one that is rounded."""
LATE_ACCURACY = (
    "after 61 epochs of a planted graph of 200,000 nodes 82.7 % of the held-out ones were right, 97.4 % with fresh rows"
)
"""Of 1 bit, every fifth epoch fresh (bench/sylvie.py, one run): more than the half a point that is taken unasked."""


class HaloOptions(GraphParts, frozen=True):
    """A part of the graph for each rank, which exchange the rows of boundary nodes before each layer (Sylvie).

    `bits` of a value that crosses between hidden layers: 32 as it is, 1 to 8 rounded at random, `auto` what the links
    inside and between machines carry while ranks compute; `by_degree`: more for rows of nodes with more neighbours.
    Every `synchronize`-th step waits for fresh rows, the others take those of the step before (1: all wait; 0: none but
    the first), or of up to `staleness` steps before where a link takes so long, and fresh ones from machines whose link
    is fast. Late rows cost accuracy and are refused without `late`. `adapt`: bits and late rows follow how fast
    the loss changes.
    `delta`: what crosses is the difference to what crossed before, with what rounding lost of it.
    A graph transformer takes none of these options: each rank has a range of the tokens, and computes some heads.
    """

    bits: Literal[1, 2, 4, 8, 32, "auto"] = 32
    by_degree: bool = False
    synchronize: int = 1
    staleness: int = 1
    late: bool = False
    adapt: bool = False
    delta: bool = False
    parts: str = ""

    def check(self, recipe: RecipeBase) -> None:
        """Raises UserError for options that contradict each other, the network, or what is asked of the graph."""
        graph = recipe.graph
        model = recipe.model
        assert graph is not None
        if graph.task != "node" or graph.fanouts:
            raise UserError(
                f"[graph.halo] is not possible with graph.task = {graph.task!r} and graph.fanout = "
                f"{list(graph.fanouts)}.",
                why="the whole graph is cut into parts, and each rank trains on the nodes of its own",
                do='graph.task = "node" without graph.fanout, or leave [graph.halo] out',
            )
        if isinstance(model, GraphTransformer):
            if self != HaloOptions():
                raise UserError(
                    "[graph.halo] has no options for a graph transformer.",
                    why="its ranks exchange queries, keys and values, as they are and in every step",
                    do="[graph.halo] without options",
                )
            return
        self._check_bits()
        if isinstance(model, Network) and model.activation == "maxk":
            self._check_maxk()
        if recipe.train.precision == "fp16" and self.bits != WHOLE:
            raise UserError(
                f'graph.halo.bits = {self.bits!r} is not possible with train.precision = "fp16".',
                why="a step whose scaled gradients overflow is left out, and few bits cannot say that one did",
                do='train.precision = "bf16", or graph.halo.bits = 32',
            )
        if self.synchronize != 1 and not self.late:
            raise UserError(
                f"graph.halo.synchronize = {self.synchronize} makes rows late, which costs accuracy.",
                why=LATE_ACCURACY,
                do="graph.halo.synchronize = 1, or graph.halo.late = true where an epoch's time counts for more",
            )

    def _check_bits(self) -> None:
        if self.synchronize < 0:
            raise UserError(f"graph.halo.synchronize = {self.synchronize} is below 0.", do="graph.halo.synchronize = 1")
        if self.bits == "auto" and (self.by_degree or self.adapt or self.delta):
            raise UserError(
                'graph.halo.bits = "auto" is not possible with by_degree, adapt and delta.',
                why="it gives all rows for a peer the bits that the link to it carries",
                do="graph.halo.bits = 1",
            )
        if (self.by_degree or self.adapt) and self.bits == WHOLE:
            raise UserError(
                f"graph.halo.{'by_degree' if self.by_degree else 'adapt'} has no effect when values cross as they are.",
                why=f"graph.halo.bits = {WHOLE}",
                do="graph.halo.bits = 1",
            )
        if self.by_degree and not self.adapt and self.bits == MOST:
            raise UserError(
                f"graph.halo.by_degree has no effect with graph.halo.bits = {MOST}.",
                why=f"rows of nodes with more neighbours have more bits, up to {MOST}",
                do="graph.halo.bits = 4",
            )
        if self.staleness < 1 or (self.staleness > 1 and self.synchronize == 1):
            setting = f"graph.halo.synchronize = {self.synchronize}"
            raise UserError(
                f"graph.halo.staleness = {self.staleness} is not possible with {setting}.",
                why="it is how many steps old rows may be, at least 1, in steps that do not wait for fresh ones",
                do="graph.halo.staleness = 1" if self.synchronize == 1 else "graph.halo.staleness = 2",
            )
        if self.delta and (self.bits == WHOLE or self.adapt):
            raise UserError(
                f"graph.halo.delta is not possible with graph.halo.bits = {self.bits}{' and adapt' * self.adapt}.",
                why="values that cross as they are lose nothing that could be sent later",
                do="graph.halo.bits = 1, without adapt",
            )

    def _check_maxk(self) -> None:
        if self.delta:
            raise UserError(
                'graph.halo.delta is not possible with model.activation = "maxk".',
                why="kept values are of other columns in each step",
                do="graph.halo.delta = false",
            )
        if self.synchronize != 1:
            raise UserError(
                f'graph.halo.synchronize = {self.synchronize} is not possible with model.activation = "maxk".',
                why="the gradients of a late row are for columns that its owner no longer keeps",
                do="graph.halo.synchronize = 1",
            )


OPTIONS = HaloOptions
