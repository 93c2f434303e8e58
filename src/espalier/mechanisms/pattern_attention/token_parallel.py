"""A graph transformer over ranks: each holds a range of the tokens, and in attention computes all tokens of some heads.

After TorchGT's cluster-aware graph parallelism (arXiv 2407.14106, section 3.2). The nodes are cut in their order, in
which clusters are contiguous where `graph.order` makes them so, in proportion to the ranks' shares; every rank knows
all edges. Deviations: virtual tokens are the last rank's alone, where the authors average copies; nothing is padded;
ranks may have unequal numbers of heads; losses are divided by the number of all training nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from espalier.comm.base import Traffic
from espalier.graph.networks.base import placement
from espalier.graph.sampling.batch_strategy import OVER_RANKS, HeldRows, OverRanks, all_rows
from espalier.graph.sampling.subgraphs import SubgraphBatch, forward
from espalier.mechanisms.pattern_attention.model import GraphTransformer
from espalier.mechanisms.pattern_attention.over_ranks import TokenExchange
from espalier.parallel.sequence_slots import divided
from espalier.parallel.ulysses import HeadSplit
from espalier.parallel.workload import SummedLoss, to_device
from espalier.recipe import GraphTransformer as Options
from espalier.recipe.cost import VALUE_BYTES
from espalier.recipe.errors import UserError
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from torch import nn

    from espalier.graph.run import GraphRun
    from espalier.graph.tasks.node_classification import NodeTask
    from espalier.plan.base import Plan
    from espalier.recipe import GraphParts, Recipe

CLAIM = replace(OVER_RANKS, name="tokens")
"""Ranks compute one another's heads within a step, so all make the same steps with the same weights."""


def tokens_by_rank(nodes: int, virtual: int, shares: Sequence[int]) -> list[int]:
    """How many tokens each rank holds: nodes in proportion to `shares`, and the last one the virtual tokens too."""
    nodes_by_rank = np.diff(divided(nodes, shares)).tolist()
    return [*nodes_by_rank[:-1], nodes_by_rank[-1] + virtual]


class TokenPart:
    """What one rank trains on, and how it evaluates with the others.

    Args:
        task: whose nodes are trained on; model: that is trained; shares: of the nodes, for each rank.
        placed: device and dtype of the model.
    """

    def __init__(
        self, task: NodeTask, model: GraphTransformer, shares: Sequence[int], placed: dict[str, Any], group: Any
    ) -> None:
        view = task.train
        rank = group.rank()
        if view.graph.nodes < len(shares):
            raise UserError(
                f"{view.graph.origin} has {view.graph.nodes:,} nodes for {len(shares)} ranks.",
                why="each rank holds a range of the nodes",
                do=f"plan.pin.ranks={view.graph.nodes}",
            )
        pieces = tokens_by_rank(view.graph.nodes, len(model.virtual), shares)
        start = sum(pieces[:rank])
        stop = min(start + pieces[rank], view.graph.nodes)
        self.task = task
        self.group = group
        self.range = (start, stop)
        ids = torch.arange(start, stop, device=placed["device"])
        self.rows = HeldRows(ids, 0, pieces[rank] / sum(pieces))
        self.features = view.features[start:stop].to(**placed)
        whole = to_device(view.block, **placed)
        self.block = whole._replace(tokens=TokenExchange(tuple(pieces), group))
        train = task.parts.train
        local_ids = train[(train >= start) & (train < stop)]
        chosen = torch.from_numpy(local_ids - start)
        labels = task.labels[local_ids]
        self._batch = SubgraphBatch(
            self.features, (self.block,), labels.to(placed["device"]), chosen=chosen.to(placed["device"])
        )

    def batch(self, step: int) -> SubgraphBatch:
        """Own tokens."""
        return self._batch._replace(step=step)

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        """See `Workload.loss`, of the rank's own training nodes."""
        return self.task.loss(model, batch)

    @torch.no_grad()
    def logits(self, model: nn.Module) -> Tensor:
        """[nodes, outputs] of all nodes, on every rank. All ranks call it alike."""
        return all_rows(
            forward(model, self.features, (self.block,)), slice(*self.range), len(self.task.labels), self.group
        )


class TokenParallel(Mechanism):
    """Each rank trains on its tokens."""

    claim = CLAIM
    record = "torchgt"

    def wrap(self, context: Build) -> None:
        """Gives this rank its tokens."""
        run = cast("GraphRun", context.workload)
        mesh = context.mesh
        model = context.model
        group = mesh.replica
        assert group is not None, "tokens are of several ranks"
        assert isinstance(model, GraphTransformer)
        shares = [context.plan.ranks[rank].samples for rank in mesh.replica_ranks]
        placed = placement(model)
        run.batching.part = TokenPart(run.whole_task, model, shares, placed, group)


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the recipe asks for it and there are several ranks. Raises UserError for more ranks than heads."""
    options = recipe.model
    ranks = len(plan.trainers)
    if ranks < 2 or not isinstance(options, Options):
        return None
    if ranks > (options.heads or 1):
        raise UserError(
            f"model.heads = {options.heads} cannot be computed by {ranks} ranks.",
            why="in attention each rank computes all tokens of some heads",
            do=f"plan.pin.ranks={options.heads or 1}",
        )
    return TokenParallel()


class TokenBatching(OverRanks):
    """Some tokens of the whole graph on each rank."""

    def halos(self) -> TokenCut:
        model = self.run.bare()
        graph = self.run.whole_task.train.graph
        options = self.run.recipe.graph
        assert isinstance(model, GraphTransformer)
        assert options is not None
        assert options.halo is not None
        return TokenCut(model, graph.nodes, options.halo, graph.fingerprint())


# --- cost ------------------------------------------------------------------------------------------------------------


class TokenCut:
    """What a plan is told of tokens that are cut over ranks; has what `halo_parallel.Halos` has.

    Args:
        model: that is trained; nodes: of the graph; options: of `[graph.halo]`; origin: a name of the graph.
    """

    traffic = Traffic.ACTIVATIONS.value

    def __init__(self, model: GraphTransformer, nodes: int, options: GraphParts, origin: str) -> None:
        self.model, self.nodes, self.options, self._origin = model, nodes, options, origin
        self.exchanges = 4 * len(model.layers)
        self.most_ranks = model.options.heads or 1

    def __repr__(self) -> str:
        """All that a plan depends on."""
        return f"TokenCut({self._origin}, {self.nodes}, {self.model.options})"

    def step_bytes(self, shares: Sequence[int], size: int, by_pair: Any = None) -> Any:
        """float [ranks, ranks]: payload bytes that each rank sends each other in a step, forward and backward.

        Rank i sends j its tokens' queries, keys and values of j's heads, and of its own heads the answers for j's
        tokens; backward as many.
        """
        pieces = np.array(tokens_by_rank(self.nodes, len(self.model.virtual), shares), float)
        heads = self.model.options.heads or 1
        each = (self.model.options.width or 0) // heads
        split = HeadSplit(heads, heads, len(shares)).queries
        widths = np.array([each * (stop - start) for start, stop in split], float)
        to_heads = pieces[:, None] * widths[None]
        return 4.0 * size * len(self.model.layers) * (to_heads + to_heads.T) * (1 - np.eye(len(shares)))

    def value_bytes(self, precision: str) -> int:
        """Of a query, key, value or answer: at least those of fp32, which autocast leaves them in."""
        return max(4, VALUE_BYTES[precision])

    def told(self, shares: Sequence[int]) -> str:
        """How the graph is cut, for people."""
        pieces = tokens_by_rank(self.nodes, len(self.model.virtual), shares)
        heads = [stop - start for start, stop in HeadSplit(self.most_ranks, self.most_ranks, len(shares)).queries]
        return (
            f"{sum(pieces):,} tokens are cut into {len(pieces)} ranges of {_span(pieces)}; in each layer a rank "
            f"computes all tokens of {_span(heads)} heads"
        )


def _span(counts: Sequence[int]) -> str:
    least = min(counts)
    most = max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
